"""Runs whose replies come from a server by its address: real sockets, a tiny model behind them."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.errors import RunFailed
from megatrain.generate import Sampling, Server
from megatrain.generate import server as client
from tests.cli import test_rollouts
from tests.cli.cases import sets
from tests.cli.test_ranks import CHANGED, assert_same_run, run_of, stopped_at
from tests.inside import sized
from tests.parity.ranks import run_ranks
from tests.sweeps import few

rollout_file = test_rollouts.rollout_file  # a fixture


class Served(ThreadingHTTPServer):
    """Says what vLLM's server says; `faults` are what goes wrong, and `asked` what was asked."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.faults, self.asked, self.loaded, self.room = {}, [], 0, 48
        self.lock = threading.Lock()

    def continued(self, body, at):
        """One reply, its tokens drawn one after the other."""
        generator = torch.Generator().manual_seed(body["seed"] + at)
        ids, said, stops = list(body["prompt"]), [], set(body["stop_token_ids"])
        while len(said) < body["max_tokens"]:
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1] / body["temperature"]
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
            said.append(float(logits.log_softmax(-1)[token]))
            ids.append(token)
            if token in stops:
                break
        new = ids[len(body["prompt"]) :]
        return {
            "index": at,
            "finish_reason": "stop" if new[-1] in stops else "length",
            "prompt_token_ids": body["prompt"],
            "token_ids": new,
            "logprobs": {"token_logprobs": said},
        }


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def _say(self, code, tree):
        said = json.dumps(tree).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def do_GET(self):
        self._say(200, {"data": [{"id": "tiny", "max_model_len": self.server.room}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, body))
            self._say(*self._answer(body))

    def _answer(self, body):
        server, faults = self.server, self.server.faults
        code = faults.get(self.path)
        if code and (code != 503 or sum(path == self.path for path, _ in server.asked) < 3):
            return code, {"error": {"message": "not so"}}
        if self.path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            server.loaded += 1
            folder = body["kwargs"]["weights_path"]
            server.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if self.path != "/v1/completions":
            return 200, {"success": not faults.get("kept")}
        choices = [server.continued(body, at) for at in range(body["n"])]
        if server.loaded > 1 or faults.get("at once"):  # not of the first step
            time.sleep(faults.get("seconds", 0))
            for choice in choices:
                choice |= faults.get("choice", {})
                choice["token_ids"] = [i + faults.get("off", 0) for i in choice["token_ids"]]
                far = [p - faults.get("far", 0) for p in choice["logprobs"]["token_logprobs"]]
                choice["logprobs"] = {"token_logprobs": far}
        return 200, {"choices": choices}


@pytest.fixture
def served(monkeypatch):
    sized(monkeypatch, client, _WAITS=(0, 0, 0))
    with Served() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # seconds to a look
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def file_of(rollout_file, served, tmp_path):
    def made(loss=None, **rollout):
        given = {"server": served.address, "server_weights": str(tmp_path / "weights")} | rollout
        return rollout_file({"name": "grpo"} | (loss or {}), ["even"], temperature=0.8, **given)

    return made


def test_a_run_learns_from_a_servers_replies(megatrain, file_of, served, tmp_path):
    """Log-probabilities agree at each step, so that the server has each step's weights."""
    served.faults["/v1/completions"] = 503  # for a moment
    megatrain.done("train", file_of({"num_iterations": 2}), *sets(training__steps=5))
    records = test_rollouts.read(tmp_path / "run")
    far = "sampling/sampling_logp_difference/max"
    assert [far in record for record in records] == [True, False, True, False, True]
    assert all(record[far] < 1e-4 for record in records if far in record)
    assert all(record["grad_norm"] > 0 for record in records)
    assert served.loaded == 3
    bodies = [body for path, body in served.asked if path == "/v1/completions"]
    assert all((body["n"], body["temperature"]) == (3, 0.8) for body in bodies)
    assert len({body["seed"] for body in bodies}) == 12  # a prompt has its own, sent again or not


def test_each_setting_of_drawing_is_asked_of_the_server(served):
    served.faults["/v1/completions"] = 400
    server = Server(served.address, vocab_size=9, length=8, seconds=9)
    with pytest.raises(RunFailed, match="/v1/completions with 400"):
        server.continued([[1, 2]], 1, Sampling(4, 0.7, 0.9, 20, 1.2, seed=6), {3, 2})
    [(_, body)] = served.asked
    wanted = {"max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 3,
              "repetition_penalty": 1.2, "min_p": 0.0, "stop_token_ids": [2, 3]}  # fmt: skip
    assert wanted.items() <= body.items()


REFUSED = {
    "started": ({"/collective_rpc": 404}, 48, "start it with VLLM_SERVER_DEV_MODE=1"),
    "weights": ({"/collective_rpc": 500}, 48, "answers /collective_rpc with 500: .*not so"),
    "cache": ({"kept": True}, 48, "keeps what it has computed with earlier weights"),
    "short": ({}, 8, "takes 8 tokens, and data.sequence_length is 48; start it with"),
}


@pytest.mark.parametrize(("faults", "room", "message"), few(REFUSED.values()), ids=REFUSED)
def test_a_server_that_cannot_be_used_is_refused_before_the_run(
    megatrain, file_of, served, faults, room, message
):
    served.faults, served.room = faults, room
    result = megatrain("train", file_of())
    assert result.exit_code == 2, result.output
    [line] = result.stderr.strip().splitlines()[-1:]
    assert test_rollouts.re.search(f"rollout.server {served.address}: .*{message}", line), line


FAILED = {
    "other tokens": ({"off": 100_000}, "the model's tokens are 0 to .*: it serves another model"),
    "other weights": ({"far": 0.6}, "are 0.6 from the engine's .*: it serves other weights"),
    "other prompt": ({"choice": {"prompt_token_ids": [1]}}, "replied to other tokens than those"),
    "no ids": ({"choice": {"index": "x", "finish_reason": None}}, "a reply ended with None"),
    "slow": ({"seconds": 3}, "no answer to /v1/completions in 2 s; see rollout.server_seconds"),
}


@pytest.mark.parametrize(("faults", "message"), few(FAILED.values(), 1), ids=FAILED)
def test_a_server_that_fails_ends_the_run_with_its_last_state(
    megatrain, file_of, served, tmp_path, faults, message
):
    served.faults = faults
    result = megatrain("train", file_of(server_seconds=2.0))
    assert result.exit_code == 4, result.output
    line = result.stderr.strip().splitlines()[-1]
    assert test_rollouts.re.search(message, line), line
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()


def test_an_address_where_nobody_answers_is_refused(megatrain, file_of, served):
    file = file_of()
    served.server_close()
    result = megatrain("train", file)
    assert result.exit_code == 2
    assert f"rollout.server {served.address}: it cannot be reached" in result.stderr


def test_an_adapter_is_merged_for_the_server(megatrain, file_of, served, tmp_path):
    adapter = {"adapter__method": "lora", "adapter__r": 4, "training__steps": 2}
    megatrain.done("train", file_of(), *sets(**adapter))
    records = test_rollouts.read(tmp_path / "run")
    assert [r["sampling/sampling_logp_difference/max"] < 1e-4 for r in records] == [True, True]
    assert served.loaded == 2


def test_replies_far_from_the_engine_are_not_learnt_from_unless_told(
    megatrain, file_of, served, tmp_path
):
    """The default is TRL's: a whole reply whose ratio is above 3 counts for nothing."""
    served.faults |= {"far": 0.4, "at once": True}  # of 8 tokens e^3.2
    megatrain.done("train", file_of(), *sets(training__steps=1, loss__beta=0.0))
    [record] = test_rollouts.read(tmp_path / "run")
    assert record["sampling/importance_sampling_ratio/min"] == 0
    assert record["sampling/importance_sampling_ratio/max"] < 3


@pytest.mark.exhaustive
def test_ranks_learn_from_the_replies_of_one_server(megatrain, file_of, served, tmp_path):
    """The first rank speaks with it; two ranks begin, three go on between steps of one rollout."""
    file = file_of({"num_iterations": 2}, server_weights=str(tmp_path / "of one"))
    changed = [part for each in CHANGED for part in ("--set", each)]
    megatrain.done("train", file, *changed, *sets(output__folder="one", training__steps=5))
    asked, loaded = _completions(served), served.loaded
    for size, resume in ((2, False), (3, True)):
        (tmp_path / str(size)).mkdir()
        at = None if resume else stopped_at(2)
        given = str(tmp_path / "several"), "training.steps=5"
        work = run_of(file, *given, resume=resume, at=at)
        ended = run_ranks(size, tmp_path / str(size), work)
        assert ended == ["None" if resume else "SIGTERM"] * size
    assert_same_run(tmp_path / "one", tmp_path / "several", least=1e-6)
    again = _completions(served)
    assert sorted(again[len(asked) :]) == sorted(asked)  # none is asked twice
    assert served.loaded == 2 * loaded + 1  # and once more as the run goes on
    logs = (test_rollouts.read(tmp_path / each) for each in ("several", "one"))
    for mine, other in zip(*logs, strict=True):
        for name in ("sampling/importance_sampling_ratio/mean", "reward", "clip_ratio/region_mean"):
            assert mine.get(name, 0) == pytest.approx(other.get(name, 0), abs=1e-5), name


def _completions(served):
    return [json.dumps(body) for path, body in served.asked if path == "/v1/completions"]
