"""The regression suite: it fails what is slow, and nothing because the machine is busy."""

import time

import pytest

from benchmarks import regression
from benchmarks.regression import Case, holds, kernel_cases, ratio
from megatrain import kernels
from megatrain.kernels import reference
from tests.inside import sized


class Clock:
    """Gives each side of a case the seconds that it is to take."""

    def __init__(self, monkeypatch, *ratios):
        self.ratios, self.now, self.calls = list(ratios), 0.0, 0
        monkeypatch.setattr(time, "process_time", lambda: self.now)
        self.case = Case("a case", self.ours, self.theirs, 0.9, 1.1)

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


def test_kernels_that_fall_back_are_seen(monkeypatch):
    sized(monkeypatch, regression, PARAMETERS=50_000)
    for name in ("update", "split", "join"):
        monkeypatch.setattr(kernels, name, getattr(reference, name))
    cases = [case for case in kernel_cases() if "reference" in case.name]
    assert len(cases) == 3
    for case in cases:
        assert ratio(case, 5) < case.floor
