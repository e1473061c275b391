"""Every schedule is ordered by events alone, and each wait in it is needed."""

import functools
from collections import Counter
from dataclasses import fields
from itertools import islice
from unittest import mock

import pytest

from megatrain import Placement
from megatrain.device.base import COPY_IN, GATHER, HOSTS, REDUCE
from megatrain.engine.batch import Batch
from tests.race.schedule import STEPS, Alike, Told, schedules, shared_schedules, trace
from tests.sweeps import few

PARTS = 6  # of all schedules; the first, which has every wait, is in the plain run


@functools.cache
def traced(part):
    """Schedules with the names of their waits, their races and how many operations they have."""
    devices = [
        (each, trace(**each)) for each in islice(schedules(), (part + 1) % PARTS, None, PARTS)
    ]
    return [(each, set(d.waits), d.races, len(d.operations)) for each, d in devices]


def waits_of(parts):
    return set().union(*(waits for part in parts for _, waits, _, _ in traced(part)))


@pytest.mark.parametrize("part", few(range(PARTS)))
def test_every_schedule_runs_clean(part):
    for schedule, _, races, operations in traced(part):
        assert not races, (schedule, races[:3])
        assert operations > 100


def test_every_choice_of_a_placement_is_tried():
    """But for what orders no work, and what a device that computes nothing cannot do."""
    plain, tried = Placement(), [schedule["placement"] for schedule in schedules()]
    left = {f.name for f in fields(Placement)}
    left -= {n for n in left for each in tried if getattr(each, n) != getattr(plain, n)}
    assert left == {"head_tokens", "chunk_tokens", "compile", "update_threads", "save_bytes"}


@pytest.mark.parametrize("parts", few([[0], range(1, PARTS)]))
def test_removing_a_wait_is_noticed(parts):
    """In one of the schedules that have it."""
    names = waits_of(parts)
    assert names and names == waits_of([0])
    idle = [
        why
        for why in sorted(names)
        if not any(
            trace(**schedule, without=frozenset({why})).races
            for part in parts
            for schedule, waits, _, _ in traced(part)
            if why in waits
        )
    ]
    assert not idle, f"nothing depends on the waits {idle}: they are not needed, or not checked"


def test_weights_that_stay_cross_the_bus_once_a_version_and_need_each_wait():
    """An evaluation after each step brings the new version, which the next step finds there."""
    placement = Placement(keep_weights=9, passes=3)
    schedule: dict = {"placement": placement, "max_grad_norm": 1.0, "tied": False}
    device = trace(**schedule)
    arrivals = Counter(name for stream, name in device.operations if stream == COPY_IN)
    kept = {name: count for name, count in arrivals.items() if name.endswith("kept weights")}
    assert len(kept) == 6 and set(kept.values()) == {STEPS + 1}
    for why in ("version due", "weights arrived", "slot free"):
        races = trace(**schedule, without=frozenset({why})).races
        assert any("kept weights" in race or "weights ->" in race for race in races), why


def collectives(size=3, hosts=1):
    """Of some schedules what each rank puts on; they have other numbers of micro-batches."""
    for schedule in islice(shared_schedules(), 0, None, 3):
        said: dict = {}
        for _ in range(2):  # the first time they only say what they have
            each = [
                trace(
                    **schedule | {"ranks": Told(rank, size, hosts=hosts, said=said), "rows": rows}
                ).operations
                for rank, rows in enumerate([(1,), (2, 1, 3, 1), (1, 2), (2, 2, 1)][:size])
            ]
        yield [[op for op in every if op[0] in (GATHER, REDUCE, HOSTS)] for every in each]


def test_all_ranks_put_on_the_same_collectives_in_the_same_order():
    """Over both streams: all waits are for what was put on before, so no rank waits in a circle."""
    for first, *others in collectives():
        assert len(first) > 20 and {stream for stream, _ in first} == {GATHER, REDUCE}
        assert others == [first] * 2
    taken = Batch.passes
    own = mock.patch.object(
        Batch, "passes", lambda batch, count: taken(batch, min(count, len(batch.micro)))
    )
    with own:  # a rank takes as many passes as it has micro-batches for
        assert any(others != [first] * 2 for first, *others in collectives())


def test_sums_of_several_hosts_need_each_wait_of_their_way():
    """Also where a host has one rank alone; the order is that of all ranks."""
    schedule: dict = {"placement": Placement(slots=2), "max_grad_norm": 1.0, "tied": True}
    for size, names in ((4, ("sums ready", "sums of this host")), (2, ("sums of this host",))):
        schedule |= {"ranks": Alike(1, size, hosts=2)}
        assert not trace(**schedule).races
        for why in (*names, "sums of all ranks"):
            races = trace(**schedule, without=frozenset({why})).races
            assert any("of all hosts on hosts" in race or "sum layer" in race for race in races), (
                why
            )
    for first, *others in collectives(4, hosts=2):
        assert {stream for stream, _ in first} == {GATHER, REDUCE, HOSTS}
        assert others == [first] * 3


def test_directions_of_ranks_need_each_wait_of_their_way():
    waits = "shard arrived", "blocks of all ranks", "directions' state arrived"
    for rule, limit, needed in (("muon", None, waits), ("muon clipped", 1.0, waits[:2])):
        schedule: dict = {"placement": Placement(slots=2), "max_grad_norm": limit, "tied": False}
        schedule |= {"rule": rule, "ranks": Alike(1, 3)}
        assert not trace(**schedule).races
        for why in needed:
            races = trace(**schedule, without=frozenset({why})).races
            assert any("direct layer" in r or "average" in r for r in races), (rule, why)


def test_blocks_of_ranks_on_a_disk_need_each_wait_of_their_way():
    placement = Placement(slots=2, disk_moments=9, disk_remainder=9, disk_weights=9)
    schedule: dict = {"placement": placement, "max_grad_norm": 1.0, "tied": False}
    schedule |= {"ranks": Alike(1, 3), "saves": (0, 1)}
    assert not trace(**schedule).races
    gathers = ("shard arrived", "weights arrived", "slot free for the disk", "disk weights due")
    updates = ("disk planes arrived", "disk planes updated", "disk lane free")
    for why in (*gathers, *updates, "version to save from the disk"):
        races = trace(**schedule, without=frozenset({why})).races
        assert any("slot" in race or "disk lane" in race or "layer" in race for race in races), why


def test_planes_compared_before_a_save_need_their_way_from_the_disk():
    placement = Placement(slots=2, disk_moments=9, disk_weights=2, resident=("layer 2",))
    schedule: dict = {"placement": placement, "max_grad_norm": 1.0, "tied": False}
    schedule |= {"saves": (0, 1), "compared": True}
    assert not trace(**schedule).races
    races = trace(**schedule, without=frozenset({"disk version to check"})).races
    assert any("check " in race for race in races)
