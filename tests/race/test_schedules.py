"""Every schedule is ordered by events alone, and each wait in it is needed."""

import functools

import pytest

from tests.race.schedule import schedules, trace


@functools.cache
def waits() -> frozenset[str]:
    """Names of all waits that any schedule uses."""
    return frozenset().union(*(trace(**schedule).waits for schedule in schedules()))


def test_every_schedule_runs_clean() -> None:
    for schedule in schedules():
        device = trace(**schedule)
        assert not device.races, (schedule, device.races[:3])
        assert len(device.operations) > 100


@pytest.mark.parametrize("why", sorted(waits()))
def test_removing_a_wait_is_noticed(why: str) -> None:
    noticed = any(trace(**schedule, without=frozenset({why})).races for schedule in schedules())
    assert noticed, f"nothing depends on the wait {why!r}: it is not needed, or not checked"
