"""The regression suite: it fails what is slow, and nothing because the machine is busy."""

import time

import pytest

from benchmarks import regression
from benchmarks.regression import Case, holds, ratio


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
