"""Every schedule is ordered by events alone, and each wait in it is needed."""

import functools
from collections import Counter
from dataclasses import fields
from itertools import islice
from unittest import mock

import pytest

from megatrain import Placement
from megatrain.device.base import COPY_IN, GATHER, HOSTS, REDUCE
from megatrain.model.micro_batch import Batch
from tests.race.schedule import (
    STEPS,
    Alike,
    Told,
    generating,
    schedules,
    shared_schedules,
    trace,
)
from tests.refusals import table
from tests.sweeps import few, placement

PARTS = 12  # of all schedules; the first, which has every wait, is in the plain run


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


PLAIN: dict = {"placement": Placement(slots=2), "max_grad_norm": 1.0, "tied": False}


def test_weights_that_stay_cross_the_bus_once_a_version():
    """An evaluation after each step brings the new version, which the next step finds there."""
    device = trace(**PLAIN | {"placement": Placement(keep_weights=9, passes=3)})
    arrivals = Counter(name for stream, name in device.operations if stream == COPY_IN)
    kept = {name: count for name, count in arrivals.items() if name.endswith("kept weights")}
    assert len(kept) == 6 and set(kept.values()) == {STEPS + 1}


NEEDED = table(__file__, "needed.yaml")


def asked(*, hosts=1, **beside):
    """The arguments of `trace` that a row of the table stands for."""
    beside |= {"placement": placement(beside["placement"])} if "placement" in beside else {}
    return beside | ({"ranks": Alike(*beside["ranks"], hosts=hosts)} if "ranks" in beside else {})


@pytest.mark.parametrize("name", NEEDED)
def test_each_wait_of_their_way_is_needed(name):
    beside, racing = asked(**NEEDED[name]["beside"]), NEEDED[name]["racing"]
    assert not trace(**PLAIN | beside).races
    for why in NEEDED[name]["waits"]:
        races = trace(**PLAIN | beside, without=frozenset({why})).races
        assert any(text in race for race in races for text in racing), why


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_each_wait_of_chosen_experts_is_needed(base):
    assert not generating(base).races
    for why in ("rows chosen", "rows arrived", "slot free", "weights arrived"):
        assert any("slot" in race for race in generating(base, why).races), why


def collectives(size=3, hosts=1):
    """Of some schedules what each rank puts on; they have other numbers of micro-batches."""
    for schedule in islice(shared_schedules(), 0, None, 5):
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


def test_all_hosts_put_on_the_same_collectives_in_the_same_order():
    for first, *others in collectives(4, hosts=2):
        assert {stream for stream, _ in first} == {GATHER, REDUCE, HOSTS}
        assert others == [first] * 3


@pytest.mark.parametrize("tied", [False, True])
def test_what_the_next_forward_begins_with_is_updated_first(tied):
    """A table tied to the head is the last tile of a step and the first one of the next."""
    device = trace(Placement(slots=3), 1.0, tied)
    updates = [name for _, name in device.operations if name.startswith("update ")]
    first = updates[: len(updates) // STEPS]
    layers = [f"update layer {i}" for i in range(5)]
    table, head = ("update head", []) if tied else ("update embedding", ["update head"])
    assert first == [table, *layers, *head]
