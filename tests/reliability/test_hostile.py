"""Nothing that is read is trusted: an error of one line, no execution, no exhaustion, no hang."""

import importlib.util
import json
import os
import shutil
from contextlib import suppress
from unittest import mock

import pytest
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatrain import Engine, InputError
from megatrain.compat.transformers import attention_of, set_attention
from megatrain.data.tokenizer import load_tokenizer
from tests.checkpoint.cases import add_code, engine_of
from tests.checkpoint.test_damage import change
from tests.cli.cases import sets, tiny_llama
from tests.families.tiny import tiny_config
from tests.forks import forked
from tests.refusals import table
from tests.reliability.cases import start_run, toy_run
from tests.reliability.readers import feed, fuzz, limit_memory, readers

READERS = (
    "run file", "manifest", "run state", "shard", "index", "text", "chat", "json", "csv",
    "config.json", "tokenizer.json", "metrics",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readers")
    found = readers(folder)
    assert tuple(found) == READERS
    yield found
    assert not list(folder.rglob("pwned"))


@pytest.mark.parametrize("name", READERS)
def test_only_errors_of_our_own_come_out(made, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert feed(made[name], made[name].valid)
    fuzz(made[name], 25)
    assert not list(tmp_path.iterdir())


CONFIGS = ({"num_hidden_layers": 2**64}, {"head_dim": 2**31}, {"attention_bias": None})
FOUND = [
    *(("config.json", json.dumps(tiny_llama(**sizes))) for sizes in CONFIGS),
    ("index", json.dumps({"weight_map": {"a": "9" * 400}})),
    *map(tuple, table(__file__, "found.yaml")),
]


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_was_found_once(made, name, data):
    assert not feed(made[name], data.encode())


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", READERS)
def test_only_errors_of_our_own_come_out_of_many_inputs(made, name, monkeypatch, tmp_path):
    """In a process with bounded memory and time; `make fuzz` does ten times as many."""
    monkeypatch.chdir(tmp_path)

    def bounded():
        limit_memory()
        fuzz(made[name], int(os.environ.get("MEGATRAIN_FUZZ", 1000)))

    assert forked(bounded) == 0


@pytest.fixture
def with_code(tmp_path, tokenizer_folder):
    """A run file of a model that brings code, and the file that the code would leave."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = AutoConfig.for_model(**tiny_llama(vocab_size=len(tokenizer)))
    model, mark = tmp_path / "model", tmp_path / "ran"
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    add_code(model, f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    short = {"training__steps": 1, "training__eval_every": None}
    return toy_run(tmp_path / "files", tokenizer_folder, model={"path": str(model)}, **short), mark


def test_code_of_a_model_runs_only_if_asked_for(with_code, tmp_path):
    run, mark = with_code
    home = {"HF_HOME": str(tmp_path / "hf")}
    refused = start_run("train", run, log=tmp_path / "1", **home)
    assert refused.wait() == 2, refused.output
    assert not mark.exists()
    for option in (["--resume"], []):
        assert start_run("train", run, *option, log=tmp_path / "2").wait() == 2
    assert not mark.exists()
    best = {"checkpoint__best": "eval_loss", "checkpoint__load_best": True, "optimizer__lr": 9.0}
    asked = sets(model__trust_remote_code=True, training__eval_every=1, training__steps=2, **best)
    trained = start_run("train", run, *asked, log=tmp_path / "3", **home)
    assert trained.wait() == 0, trained.output
    text = ("generate", run.with_name("run"), "--prompt", "a", "--max-new-tokens", "1")
    for command in (("export", run.with_name("run"), tmp_path / "out", "--dtype", "float16"), text):
        mark.unlink()
        told = start_run(*command, log=tmp_path / command[0], **home)
        assert told.wait() == 2 and "or --trust-remote-code" in " ".join(told.output.split())
        assert not mark.exists()
        again = start_run(*command, "--trust-remote-code", log=tmp_path / "4", **home)
        assert again.wait() == 0, again.output
        assert mark.exists()


@pytest.mark.parametrize("text", ['{"eos_token": "<a>", "eos_token": "<b>"}', "{", "[" * 10**5])
def test_a_tokenizer_with_settings_that_say_two_things_or_none(tmp_path, tokenizer_folder, text):
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_folder, folder)
    load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(
        InputError, match=r"tokenizer_config.json: its JSON cannot be read: .*copy it again"
    ):
        load_tokenizer(folder)


ENDLESS = {
    "config.json": "config.json: not a plain file",
    "tokenizer.json": "tokenizer.json: not a plain file",
    "chat_template.jinja": "chat_template.jinja: not a plain file",
    "model.safetensors": "no model.safetensors",
}


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="limits memory as Linux does")
@pytest.mark.parametrize("place", ENDLESS)
def test_endless_files_are_not_read(with_code, tmp_path, place):
    """A link to a device has no end."""
    run, _ = with_code
    config = tmp_path / "model" / "config.json"
    plain = {key: v for key, v in json.loads(config.read_text()).items() if key != "auto_map"}
    config.write_text(json.dumps(plain | {"model_type": "llama"}))
    path = tmp_path / "model" / place
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")
    before = "from tests.reliability.readers import limit_memory; limit_memory()"
    start_run("train", run, log=tmp_path / "1", before=before).refused(ENDLESS[place])


def test_an_endless_run_file_is_not_read(tmp_path):
    start_run("train", "/dev/zero", log=tmp_path / "1").refused("larger than")


# What a file says never makes transformers download code and run it.


KERNEL = "org/kernel"
KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation")


@pytest.fixture
def fetched():
    """What transformers would download of the hub's kernels, as if `kernels` were installed."""
    with mock.patch.object(transformers.modeling_utils, "lazy_import_flash_attention") as fetch:
        yield fetch.mock_calls


@pytest.mark.parametrize("key", KEYS)
def test_a_configuration_does_not_choose_code_of_the_hub(key, fetched, tmp_path):
    tree = tiny_config("mixtral").to_dict() | {key: KERNEL}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(InputError, match="asks for .*'org/kernel', code that would be downloaded"):
        Engine(tmp_path, device="cpu")
    assert not fetched


def test_a_checkpoint_does_not_choose_code_of_the_hub(fetched, tmp_path):
    engine_of().save(tmp_path / "saved")
    change(tmp_path / "saved", lambda c: c["settings"].update(attn_implementation={"": KERNEL}))
    with pytest.raises(InputError, match="code that would be downloaded"):
        Engine.load(tmp_path / "saved", device="cpu")
    assert not fetched
    again = Engine.load(tmp_path / "saved", device="cpu", attn_implementation="sdpa")
    assert attention_of(again.config) == "sdpa"


def test_whoever_asks_for_code_of_the_hub_gets_it(fetched):
    with suppress(InputError):  # there is none
        Engine(tiny_config("llama"), device="cpu", attn_implementation=KERNEL)
    assert {call.args[0] for call in fetched} == {KERNEL}


def test_flash_attention_of_a_file_is_not_downloaded():
    """With `kernels` and without `flash_attn`, transformers takes it from the hub."""
    found = importlib.util.find_spec
    here = {"kernels": True, "flash_attn": None}
    config = tiny_config("llama")
    set_attention(config, "flash_attention_2")
    both = mock.patch("importlib.util.find_spec", lambda name: here.get(name) or found(name))
    with both, pytest.raises(InputError, match="'flash_attention_2', code that would be downl"):
        Engine(config, device="cpu")
