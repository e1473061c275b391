"""A step that is larger than planned, or than the limit, computes again what should wait."""

import pytest
import torch

from megatrain import Placement
from megatrain.autoplace import auto
from megatrain.base.units import MIB
from megatrain.engine.step import TrainingParts
from megatrain.placement import ActivationPolicy, Planned
from megatrain.telemetry.host import process_bytes
from tests.inside import answering
from tests.parity.cases import llama, make_batches, make_engine


def steps():
    """A small one, twice a large one, and the small one again."""
    [small], [large] = make_batches(1), make_batches(1, ((4, 40), (3, 30)))
    return [small, large, large, small]


def policies_taken(monkeypatch):
    """The policies of each step to come."""
    taken, under = [], TrainingParts.under

    def note(parts, policies):
        taken.append(policies)
        return under(parts, policies)

    monkeypatch.setattr(TrainingParts, "under", note)
    return taken


@pytest.fixture
def planned(monkeypatch):
    """`auto` plans for steps of 125 tokens, in rows of 25."""
    placement = Placement(offload_activations=2, save_activations=1)
    settled = auto.Settled(placement, 5, Planned(125, 5 * 25))
    answering(monkeypatch, auto, _chosen=settled)


@pytest.mark.parametrize(("number", "graphs"), [(0, 1), (1, 0)])
def test_a_first_step_larger_than_planned_goes_without(planned, number, graphs, monkeypatch):
    """46 tokens, and 250."""
    engine = make_engine(llama(), placement="auto")
    taken = policies_taken(monkeypatch)
    engine.step(steps()[number])
    assert (engine.memory()["host_kept_bytes"] > 0) == (graphs > 0)
    [policies] = taken
    assert policies.count(ActivationPolicy("graph", "device")) == graphs


def test_a_step_that_the_limit_refused_now_fits():
    """Graphs of the large step take 218 MiB, which the limit does not leave: it keeps none."""
    ids = torch.randint(100, (700, 60), generator=torch.Generator().manual_seed(0))
    small, large = ([{"input_ids": part, "labels": part}] for part in (ids[:20], ids))
    limit = process_bytes() + 80 * MIB
    engine = make_engine(llama(), placement=Placement(offload_activations=3), host_memory=limit)
    engine.step(small)
    taken = engine.memory()["host_kept_bytes"]
    assert 700 / 20 * taken > 200 * MIB
    engine.step(large)
    assert engine.memory()["host_kept_bytes"] == 0
