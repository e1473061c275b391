"""The harness that measures rivals, and the regression suite."""

import time

import pytest

from benchmarks import regression
from benchmarks.regression import Case as SpeedCase
from benchmarks.regression import holds, ratio
from benchmarks.rivals import __main__ as command_line
from benchmarks.rivals import case as cases
from benchmarks.rivals import rows, supervise
from tests.forks import forked_module


def test_rivals_do_the_same_work(tmp_path, monkeypatch):
    """Each in its module's `main`, in a process that has imported torch already."""
    monkeypatch.setattr(supervise, "_run_limited", lambda command, *_: (forked_module(command), 1))
    command_line.main(
        [
            *["--shape", "toy", "--layers", "1", "--sequences", "4", "--sequence-length", "8"],
            *["--steps", "1", "--warmup", "1", "--device", "cpu", "--output", str(tmp_path)],
            *["--micro-batch", "fsdp2=2", "--rivals", "resident,megatrain,fsdp2", "--run", "one"],
        ]
    )
    (table,) = rows.tables(tmp_path)
    found = {row["rival"]: row for row in table}
    resident, fsdp2 = found["resident"], found["fsdp2"]
    assert [row["status"] for row in table] == [cases.MEASURED] * 3, table
    assert found["megatrain"]["losses"][0] == pytest.approx(resident["losses"][0], rel=1e-2)
    # The same weights and tokens, however they are cut.
    assert resident["losses"][0] == pytest.approx(fsdp2["losses"][0], rel=1e-3)
    assert fsdp2["micro_batch"] == 2
    tokens, seconds = 4 * 8, fsdp2["median_seconds"]
    assert fsdp2["model_tflops"] == pytest.approx(6 * fsdp2["parameters"] * tokens / seconds / 1e12)
    assert rows.commands(table) == [
        "python -m benchmarks.rivals --shape toy --sequences 4 --sequence-length 8 --layers 1 "
        "--warmup 1 --steps 1 --micro-batch fsdp2=2 --output benchmarks/results"
    ]


# The regression suite: it fails what is slow, and nothing because the machine is busy.


class Clock:
    """Gives each side of a case the seconds that it is to take."""

    def __init__(self, monkeypatch, *ratios):
        self.ratios, self.now, self.calls = list(ratios), 0.0, 0
        monkeypatch.setattr(time, "process_time", lambda: self.now)
        self.case = SpeedCase("a case", self.ours, self.theirs, 0.9, 1.1)

    def ours(self):
        self.now += 1.0

    def theirs(self):
        self.now += self.ratios[min(self.calls, len(self.ratios) - 1)]
        self.calls += 1


def test_a_ratio_is_theirs_over_ours_and_the_median_of_its_rounds(monkeypatch):
    # The first round warms up. One that was disturbed changes nothing.
    assert ratio(Clock(monkeypatch, 9.0, 1.1, 1.2, 50.0).case, 3) == pytest.approx(1.2)


def test_what_is_slow_is_slow_at_every_try(monkeypatch, capsys):
    clock = Clock(monkeypatch, 0.5)
    assert not holds(clock.case)
    assert "TOO SLOW" in capsys.readouterr().out
    assert clock.calls > regression.ROUNDS * regression.ATTEMPTS
