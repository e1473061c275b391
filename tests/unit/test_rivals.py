"""The harness that measures rivals: same work, a time limit, no row lost."""

import json
import math
import sys
from dataclasses import asdict

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from benchmarks.rivals import __main__ as command_line
from benchmarks.rivals import case as cases
from benchmarks.rivals import child, common, rows, supervise
from benchmarks.rivals.case import Case, Task
from tests.forks import forked_module

CASE = Case("toy", 1, 4, 8, steps=3, device="cpu", device_memory_bytes=None)

FAKE = """
import json, os, signal, sys, time
kind, task_file, outcome_file = sys.argv[1:]
task = json.load(open(task_file))
def write(**outcome):
    json.dump(outcome, open(outcome_file, "w"))
write(version="1.2", environment={"gpu": None})
if kind == "is too large" and task["micro_batch"] > 2:
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


def test_the_micro_batch_is_halved_until_it_fits():
    outcome = supervise.run_fitting(task(micro_batch=8), fake("is too large"))
    assert outcome["status"] == cases.MEASURED
    assert outcome["micro_batch"] == 2
    assert [attempt["micro_batch"] for attempt in outcome["attempts"]] == [8, 4]


def test_megatrain_has_a_row_like_the_others():
    outcome = child.outcome_of(task("megatrain"), ends_at=math.inf)
    assert outcome["status"] == cases.MEASURED, outcome
    assert len(outcome["step_seconds"]) == 1 + CASE.steps
    assert {"parameters", "losses", "device_peak_bytes", "settings"} <= set(outcome)
    assert outcome["settings"]["placement"]["slots"] == 1


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
