"""Layers that draw random numbers are kept without recomputation: it would draw others."""

import pytest
import torch
import torch._functorch.config

from megatrain import Placement
from megatrain.model.layer_template import draws
from tests.families.tiny import tiny_model
from tests.inside import compiled_by
from tests.parity.cases import llama, make_batches, make_engine
from tests.parity.test_dropout import gpt2, slope_error

KEPT = Placement(slots=1, compile=True, save_activations=3)


def budgets(model, monkeypatch):
    """Those that torch's partitioner would see when it compiles kept graphs."""
    seen = set()

    def compiled(function):
        def call(*args):
            if function.__name__.startswith("keep"):
                seen.add(torch._functorch.config.activation_memory_budget)
            return function(*args)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    make_engine(model, placement=KEPT).step(make_batches(1)[0])
    return seen


@pytest.mark.parametrize(
    ("model", "random"),
    [
        (gpt2, True),
        (lambda: llama(attention_dropout=0.3), True),
        (llama, False),
        (lambda: tiny_model("mixtral"), False),
        (lambda: tiny_model("mixtral", changes={"router_jitter_noise": 0.1}), True),
    ],
    ids=["gpt2", "attention dropout", "llama", "mixtral", "noise of a router"],
)
def test_only_layers_without_random_numbers_have_a_budget(model, random, monkeypatch):
    seen = budgets(model(), monkeypatch)
    assert seen == ({1.0} if random else {0.5})


def test_the_trial_leaves_random_numbers_as_they_were():
    before = torch.get_rng_state()
    assert draws(lambda: torch.rand(3), {})
    assert not draws(lambda: torch.nn.functional.dropout(torch.ones(3), 0.0), {})
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.exhaustive
def test_a_partitioned_graph_keeps_its_masks(monkeypatch):
    """With a budget, this gradient is wrong by 30 %."""
    compiled_by(monkeypatch, "aot_eager_decomp_partition")
    [step] = make_batches(1, ((2, 12),))
    assert slope_error(gpt2(), step, Placement(slots=1, compile=True, save_activations=2)) < 5e-3
