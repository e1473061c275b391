"""Every schedule is ordered by events alone, and each wait in it is needed."""

import functools

from tests.race.schedule import schedules, trace


@functools.cache
def traced() -> list[tuple[dict, set[str], list, int]]:
    """Each schedule with the names of its waits, its races and how many operations it has."""
    devices = [(schedule, trace(**schedule)) for schedule in schedules()]
    return [(each, set(d.waits), d.races, len(d.operations)) for each, d in devices]


def test_every_schedule_runs_clean() -> None:
    for schedule, _, races, operations in traced():
        assert not races, (schedule, races[:3])
        assert operations > 100


def test_removing_a_wait_is_noticed() -> None:
    """In one of the schedules that have it."""
    names = set().union(*(waits for _, waits, _, _ in traced()))
    assert names
    idle = [
        why
        for why in sorted(names)
        if not any(
            trace(**schedule, without=frozenset({why})).races
            for schedule, waits, _, _ in traced()
            if why in waits
        )
    ]
    assert not idle, f"nothing depends on the waits {idle}: they are not needed, or not checked"
