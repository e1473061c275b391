"""The harness that measures rivals: same work, a time limit, no row lost."""

import importlib
import json
import math
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from benchmarks.rivals import __main__ as command_line
from benchmarks.rivals import case as cases
from benchmarks.rivals import child, common, resident, rows, supervise
from benchmarks.rivals.case import Case, Task
from megatrain.errors import DoesNotFit
from megatrain.telemetry import host
from tests.forks import forked_module

CASE = Case("toy", 1, 4, 8, steps=3, device="cpu", device_memory_bytes=None)
LIMITED = Case(**{**asdict(CASE), "device_memory_bytes": 12 << 30})

FAKE = """
import json, os, signal, sys, time
kind, task_file, outcome_file = sys.argv[1:]
task = json.load(open(task_file))
def write(**outcome):
    json.dump(outcome, open(outcome_file, "w"))
write(version="1.2", environment={"gpu": None})
if kind == "hangs":
    time.sleep(60)
if kind == "has workers":
    if not os.fork():
        os.setsid()
        shared = b"1" * (100 << 20)
        any(os.fork() == 0 for _ in range(4))
        time.sleep(1)
        os._exit(0)
    os.wait()
if kind == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "crashes":
    os.kill(os.getpid(), signal.SIGSEGV)
if kind == "exits":
    print("what it said"); sys.exit(7)
if kind == "is refused":
    write(status="out of device memory", reason="it needs more")
elif kind == "is too large" and task["micro_batch"] > 2:
    write(status="out of device memory", reason="too large")
else:
    write(status="measured")
"""


def task(rival="resident", seconds=60.0, micro_batch=4):
    return Task(CASE, rival, {}, warmup=1, micro_batch=micro_batch, seconds=seconds)


def fake(kind):
    return [sys.executable, "-c", FAKE, kind]


def test_the_loss_is_that_of_transformers():
    torch.manual_seed(0)
    logits = torch.randn(3, 7, 11, dtype=torch.float64)
    labels = torch.randint(11, (3, 7))
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    loss = common.next_token_loss(ours, labels, vocab_size=11)
    expected = ForCausalLMLoss(theirs, labels, vocab_size=11)
    (2 * loss).backward()
    (2 * expected).backward()
    torch.testing.assert_close(loss, expected, check_dtype=False)
    torch.testing.assert_close(ours.grad, theirs.grad, check_dtype=False, atol=1e-7, rtol=1e-5)


def test_the_loss_takes_its_rows_in_parts(monkeypatch):
    logits, labels = torch.randn(3, 7, 11), torch.randint(11, (3, 7))
    whole = common.next_token_loss(logits, labels, vocab_size=11)
    monkeypatch.setattr(common, "LOSS_TOKENS", 4)
    torch.testing.assert_close(common.next_token_loss(logits, labels, vocab_size=11), whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("hangs", cases.NO_TIME, "not done after 1 s"),
        ("is killed", cases.NO_HOST_MEMORY, "killed by the system"),
        ("crashes", cases.FAILED, "ended by SIGSEGV"),
        ("exits", cases.FAILED, "exit code 7"),
    ],
)
def test_a_process_that_ends_badly_leaves_a_row(kind, status, reason, capsys):
    outcome = supervise.run(task(seconds=1.0 if kind == "hangs" else 60.0), fake(kind))
    assert (outcome["status"], outcome["reason"]) == (status, reason)
    assert outcome["version"] == "1.2"  # known although it was not done
    assert outcome["host_peak_bytes"] >= 0
    if kind == "exits":
        assert "what it said" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_memory_is_that_of_all_processes_of_a_row_each_page_once(monkeypatch):
    """Whatever others take or give back meanwhile."""
    monkeypatch.setattr(host, "CHILDREN_SECONDS", 0.1)
    alone = supervise.run(task(), fake("is measured"))["host_peak_bytes"]
    with_workers = supervise.run(task(), fake("has workers"))["host_peak_bytes"]
    assert alone < 50 << 20
    assert 100 << 20 <= with_workers < 200 << 20


def test_the_micro_batch_is_halved_until_it_fits():
    outcome = supervise.run_fitting(task(micro_batch=8), fake("is too large"))
    assert outcome["status"] == cases.MEASURED
    assert outcome["micro_batch"] == 2
    assert [attempt["micro_batch"] for attempt in outcome["attempts"]] == [8, 4]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), cases.NO_DEVICE_MEMORY),
        (DoesNotFit("no device memory for slots: 2 GiB wanted"), cases.NO_DEVICE_MEMORY),
        (DoesNotFit("cannot pin 80 GiB of host memory"), cases.NO_HOST_MEMORY),
        (MemoryError("this run needs more RAM"), cases.NO_HOST_MEMORY),
        (RuntimeError("CUDA error: out of memory\nsearch for"), cases.NO_HOST_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't"), cases.NO_HOST_MEMORY),
        (ValueError("no such thing"), cases.FAILED),
    ],
)
def test_errors_are_told_apart(error, status):
    assert child.failure(error)["status"] == status


def test_a_reason_is_one_line_without_folders_of_the_machine():
    reason = child.failure(ImportError("\ncannot load /home/me/site-packages/it.so\nmore"))[
        "reason"
    ]
    assert reason == "ImportError: cannot load it.so"


def test_a_missing_package_is_a_row(monkeypatch):
    monkeypatch.setattr(child.importlib.util, "find_spec", lambda name: None)
    outcome = child.outcome_of(task("deepspeed"), ends_at=math.inf)
    assert outcome == {"status": cases.NO_PACKAGE, "reason": "deepspeed is not installed"}


def test_megatrain_has_a_row_like_the_others():
    outcome = child.outcome_of(task("megatrain"), ends_at=math.inf)
    assert outcome["status"] == cases.MEASURED, outcome
    assert len(outcome["step_seconds"]) == 1 + CASE.steps
    assert {"parameters", "losses", "device_peak_bytes", "settings"} <= set(outcome)
    assert outcome["settings"]["placement"]["slots"] == 1


@pytest.mark.parametrize("offload", [True, "auto"])
def test_trainstream_is_given_the_same_work(offload, monkeypatch):
    given = {}

    def wrap(model, optimizer, **options):
        given.update(options, dtype=model.dtype, optimizer=optimizer)
        return model, optimizer

    report = {"resident": False, "events": ["planned"], "more": 1}
    stand_in = SimpleNamespace(wrap=wrap, memory_report=lambda model: report)
    monkeypatch.setitem(sys.modules, "trainstream", stand_in)
    told = Task(CASE, "trainstream-auto", {"offload": offload}, 1, micro_batch=2, seconds=60)
    runner = importlib.import_module("benchmarks.rivals.streams").build(told)
    losses = [runner.step(common.random_tokens(CASE, 4096, 2, 0)) for _ in range(2)]
    assert losses[0] == pytest.approx(8.3, abs=0.2)  # ln 4096
    assert losses[1] != losses[0]
    assert (given["max_grad_norm"], given["accumulation_steps"], len(given["blocks"])) == (
        1.0,
        2,
        1,
    )
    # On the device masters and moments have the model's dtype; only in host memory are they fp32.
    assert given["dtype"] == (torch.bfloat16 if offload is True else torch.float32)
    assert given["optimizer"].defaults["betas"] == (0.9, 0.95)
    assert runner.report() == {"resident": False, "events": ["planned"]}


def test_measuring_ends_with_what_there_is_when_time_is_short():
    runner = common.Runner(10, lambda micro_batches: 1.0, {})
    long = Task.from_dict({**task().as_dict(), "case": {**asdict(CASE), "steps": 50}})
    measured = child.measure(long, runner, ends_at=-math.inf)
    assert len(measured["step_seconds"]) == long.warmup + child.LEAST_STEPS
    assert len(child.measure(long, runner, ends_at=math.inf)["step_seconds"]) == 51


def test_rivals_do_the_same_work(tmp_path, monkeypatch):
    """Each in its module's `main`, in a process that has imported torch already."""
    monkeypatch.setattr(supervise, "_run_limited", lambda command, *_: (forked_module(command), 1))
    command_line.main(
        [
            *["--shape", "toy", "--layers", "1", "--sequences", "4", "--sequence-length", "8"],
            *["--steps", "1", "--warmup", "1", "--device", "cpu", "--output", str(tmp_path)],
            *["--micro-batch", "fsdp2=2", "--rivals", "resident,fsdp2", "--run", "one"],
        ]
    )
    (table,) = rows.tables(tmp_path)
    resident, fsdp2 = table
    assert [row["status"] for row in table] == [cases.MEASURED] * 2, table
    # The same weights and tokens, however they are cut.
    assert resident["losses"][0] == pytest.approx(fsdp2["losses"][0], rel=1e-3)
    assert fsdp2["micro_batch"] == 2
    tokens, seconds = 4 * 8, fsdp2["median_seconds"]
    assert fsdp2["model_tflops"] == pytest.approx(6 * fsdp2["parameters"] * tokens / seconds / 1e12)
    assert rows.commands(table) == [
        "python -m benchmarks.rivals --shape toy --sequences 4 --sequence-length 8 --layers 1 "
        "--warmup 1 --steps 1 --micro-batch fsdp2=2 --output benchmarks/results"
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("trains", [False, True])
def test_what_rests_on_the_device_trains_if_it_shall(trains):
    """The same tokens three times: their loss falls where there is an optimizer."""
    runner = resident.build(replace(task(), options={"trains": trains}))
    tokens = common.random_tokens(CASE, 128, 4, 0)
    first, second, third = (runner.step(tokens) for _ in range(3))
    assert first > second > third if trains else first == second == third


@pytest.mark.exhaustive
def test_adapters_are_measured_beside_peft_alone(tmp_path, monkeypatch):
    """All of PEFT's rows train the same adapter on the same base."""
    monkeypatch.setattr(supervise, "_run_limited", lambda command, *_: (forked_module(command), 1))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)  # takes a minute
    command_line.main(
        [
            *["--shape", "toy", "--layers", "1", "--sequences", "4", "--sequence-length", "8"],
            *["--steps", "1", "--warmup", "1", "--device", "cpu", "--output", str(tmp_path)],
            *["--lora-r", "2", "--run", "one"],
        ]
    )
    (table,) = rows.tables(tmp_path)
    own, *peft = table
    assert [row["rival"].partition("-")[0] for row in table] == ["megatrain", *["peft"] * 3], table
    assert len({row["trained_parameters"] for row in table}) == 1
    assert 0 < own["trained_parameters"] < own["parameters"] / 10
    assert len({row["losses"][0] for row in peft}) == 1 < len(peft[0]["losses"])
    assert rows.commands(table)[0].endswith("--lora-r 2 --steps 1 --output benchmarks/results")


def row(rival, run, **others):
    gpu = {"name": "NVIDIA H200"}
    known = {"environment": {"gpu": gpu, "cores": 16}, "title": rival, "time": run, "run": run}
    known |= {"commit": "c0ffee"}
    return {
        "case": asdict(CASE),
        "rival": rival,
        "micro_batch": 4,
        "command": "c",
        **known,
        **others,
    }


MEASURED = {
    **{"status": cases.MEASURED, "median_seconds": 2.0, "min_seconds": 1.5, "max_seconds": 2.5},
    **{"model_tflops": 123.4, "device_peak_bytes": 3 << 30, "host_peak_bytes": 5 << 30},
}


def test_a_table_shows_rows_of_one_run_and_those_that_failed(tmp_path):
    rows.write(row("resident", "1", **MEASURED), tmp_path)
    rows.write(row("fsdp2", "2", status=cases.NO_TIME), tmp_path)
    file = rows.write(row("megatrain", "2", **MEASURED), tmp_path)
    assert file.name == "rivals-toy-1layers-4x8-h200-2-megatrain.json"
    assert json.loads(file.read_text())["run"] == "2"
    table, older = rows.tables(tmp_path)
    assert [row["rival"] for row in older] == ["resident"]
    assert rows.table(table)[2:] == [
        "| **megatrain** | 4 | 2.00 s (1.50 to 2.50) | **123** | 3.0 GiB | 5.0 GiB |",
        "| fsdp2 | 4 | out of time | | | |",
    ]


def test_a_budget_is_another_table():
    assert (CASE.name, LIMITED.name) == ("toy-1layers-4x8", "toy-1layers-4x8-12gib")


def test_only_megatrain_chooses_its_micro_batch():
    own, other = cases.rival("megatrain"), cases.rival("deepspeed")
    assert own.micro_batch(CASE) is own.micro_batch(LIMITED) is None
    assert other.micro_batch(LIMITED) == 4
    outcome = supervise.run_fitting(
        Task(LIMITED, "megatrain", {}, warmup=1, micro_batch=None, seconds=60), fake("is refused")
    )
    assert (outcome["status"], outcome["attempts"]) == (cases.NO_DEVICE_MEMORY, [])
    shown = rows.table([row("megatrain", "1", status=outcome["status"], micro_batch=None)])
    assert shown[-1] == "| **megatrain** | as it chooses | out of device memory | | | |"
