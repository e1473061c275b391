"""A step that is too large for what should wait on the host computes it again instead."""

import logging
import re
from typing import Any

import pytest
import torch

from megatrain import Placement
from megatrain.autoplace import auto
from megatrain.base.units import MIB
from megatrain.device import CpuDevice
from megatrain.engine import assemble
from megatrain.engine.step import TrainingParts
from megatrain.placement import ActivationPolicy, Planned
from megatrain.telemetry.host import process_bytes
from tests.inside import answering
from tests.parity.cases import llama, make_batches, make_engine, masters, same
from tests.race.late import LateDevice
from tests.sweeps import few, swept

PLACEMENTS: dict[str, dict[str, Any]] = {
    "graphs": {"offload_activations": 2},
    "graphs and boundaries": {"offload_activations": 3, "layer_inputs": "host"},
    "graphs on both": {"offload_activations": 1, "save_activations": 1, "slots": 3},
    "attention": {"save_attention": "host", "offload_activations": 1, "layer_inputs": "host"},
}
PLENTY = 1 << 40


def steps():
    """A small one, twice a large one, and the small one again."""
    [small], [large] = make_batches(1), make_batches(1, ((4, 40), (3, 30)))
    return [small, large, large, small]


def rooms(monkeypatch, *left):
    """What the host has left when it is asked, one time after the other."""
    asked = iter(left)
    monkeypatch.setattr(assemble, "host_available_bytes", lambda limit: next(asked))


def policies_taken(monkeypatch):
    """The policies of each step to come."""
    taken, under = [], TrainingParts.under

    def note(parts, policies):
        taken.append(policies)
        return under(parts, policies)

    monkeypatch.setattr(TrainingParts, "under", note)
    return taken


@swept(together=1, choices=PLACEMENTS, device=[CpuDevice, LateDevice])
def test_what_is_given_up_changes_no_bit(choices, device, monkeypatch):
    plain = make_engine(llama(), placement=Placement(slots=1))
    wanted = [(plain.step(step).loss, masters(plain)) for step in steps()]
    # A small step first, which shows what steps take; then there is no room, or a little.
    rooms(monkeypatch, 0, 30_000, 30_000)
    engine = make_engine(llama(), placement=Placement(**choices), device=device())
    taken = policies_taken(monkeypatch)
    for step, (loss, expected) in zip(steps(), wanted, strict=True):
        assert engine.step(step).loss == loss
        assert same(masters(engine), expected)
    offloading = [any(policy.where == "host" for policy in policies) for policies in taken]
    assert offloading[:3] == [True, False, False]


@pytest.mark.parametrize(
    "choices", few([{"offload_activations": 3}, {"save_attention": "host"}]), ids=str
)
def test_what_was_given_up_waits_again_where_there_is_room(choices, monkeypatch, caplog):
    small, large, *_ = steps()
    rooms(monkeypatch, 60_000, 60_000, PLENTY)
    engine = make_engine(llama(), placement=Placement(**choices))
    held = []
    with caplog.at_level(logging.WARNING):
        for step in (small, large, large, small, large):
            engine.step(step)
            held.append(engine.memory()["host_kept_bytes"])
    assert held[0] == held[1] == held[2] == held[3] < held[4]
    [said] = [record.message for record in caplog.records if "no room" in record.message]
    assert re.fullmatch(
        f"The host has no room for what should wait there in a step of {4 * 40 + 3 * 30} tokens "
        r"\([0-9.]+ MiB more are wanted, [0-9.]+ MiB are left\): in steps that are too large it is "
        "computed again",
        said,
    )


@pytest.fixture
def planned(monkeypatch):
    """`auto` plans for steps of 125 tokens, in rows of 25."""
    names = ("host_kept_bytes", "host_rows_bytes", "host_boundaries_bytes")
    host_bytes = dict.fromkeys(names, 50_000)
    placement = Placement(offload_activations=2, save_activations=1)
    settled = auto.Settled(placement, 5, Planned(125, 5 * 25, host_bytes, graphs=True))
    answering(monkeypatch, auto, _chosen=settled)


@pytest.mark.parametrize(
    ("number", "left", "on_device", "on_host"),
    [
        (0, 70_000, 1, True),  # 46 tokens: 55,200, and 5 %
        (1, 330_000, 0, True),  # 250 tokens: 300,000, and 5 %
        (1, 300_000, 0, False),
    ],
)
def test_a_first_step_larger_than_planned_goes_without(
    planned, number, left, on_device, on_host, monkeypatch
):
    """A plan says what a step of so many tokens takes."""
    rooms(monkeypatch, left)
    engine = make_engine(llama(), placement="auto")
    taken = policies_taken(monkeypatch)
    engine.step(steps()[number])
    assert (engine.memory()["host_kept_bytes"] > 0) == on_host
    [policies] = taken
    assert policies.count(ActivationPolicy("graph", "device")) == on_device


def test_a_step_that_the_limit_refused_now_fits():
    """Graphs of the large step take 218 MiB, which the limit does not leave."""
    ids = torch.randint(100, (700, 60), generator=torch.Generator().manual_seed(0))
    small, large = ([{"input_ids": part, "labels": part}] for part in (ids[:20], ids))
    limit = process_bytes() + 80 * MIB
    engine = make_engine(llama(), placement=Placement(offload_activations=3), host_memory=limit)
    engine.step(small)
    taken = engine.memory()["host_kept_bytes"]
    assert 700 / 20 * taken > 200 * MIB
    engine.step(large)
    assert engine.memory()["host_kept_bytes"] == taken
