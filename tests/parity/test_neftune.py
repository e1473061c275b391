"""Noise on embeddings: that of plain training with the same numbers, whatever the placement."""

import math

import pytest
import torch

from megatrain import InputError, Placement
from megatrain.base.seeds import derived_seed
from megatrain.model.capture import PROLOGUE
from megatrain.model.trained import add_noise
from tests.families.plain import shares
from tests.parity.cases import (
    gradients,
    llama,
    make_batches,
    make_engine,
    masters,
    relative_error,
    same,
)

ALPHA = 40.0  # so large that losses without it are others


def noisy(model, step, seed=0):
    """Plain torch that adds to its embeddings what an engine of this seed does in a step."""
    seen = []

    def add(module, given, made):
        torch.manual_seed(derived_seed(derived_seed(seed, step), PROLOGUE, len(seen)))
        seen.append(made)
        most = ALPHA / math.sqrt(made.shape[1] * made.shape[2])
        return made + torch.zeros_like(made).uniform_(-most, most)

    model.get_input_embeddings().register_forward_hook(add)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_those_of_plain_training_with_the_same_noise(tied):
    [step] = make_batches(1)
    engine = make_engine(llama(tie_word_embeddings=tied), clip=1e9)
    engine.add_neftune(ALPHA)
    result = engine.step(step)
    plain = noisy(llama(tie_word_embeddings=tied), 0).train()
    total = 0.0
    for loss in shares(plain, step):
        loss.backward()
        total += loss.item()
    assert result.loss == pytest.approx(total, rel=1e-6)
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    assert relative_error(gradients(engine), wanted) < 2e-6
    quiet = make_engine(llama(tie_word_embeddings=tied)).step(step)
    assert quiet.loss != pytest.approx(total, rel=1e-3)


def test_no_placement_changes_it_and_evaluations_are_without():
    steps, found = make_batches(2), []
    placements = [
        Placement(slots=1),
        Placement(slots=3, layer_inputs="host"),
        Placement(save_activations=2, resident=("embedding",)),
    ]
    for placement in placements:
        engine, quiet = (make_engine(llama(), placement=placement) for _ in range(2))
        engine.add_neftune(ALPHA)
        assert engine.evaluate(steps[0]) == quiet.evaluate(steps[0])
        for step in steps:
            engine.step(step)
        found.append(masters(engine))
    assert all(same(found[0], other) for other in found[1:])


def test_a_model_without_a_token_embedding_is_refused():
    model = llama()
    model.get_input_embeddings = lambda: None
    with pytest.raises(InputError, match="names no token embedding"):
        add_noise(model, ALPHA)
