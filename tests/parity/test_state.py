"""What a model computes once or anew outside of its layers: as in plain torch, or refused."""

import copy

import pytest
import torch
from torch import nn
from transformers import Phi3Config, Phi3ForCausalLM

from megatrain.errors import InputError
from tests.families.plain import train_in_place
from tests.parity.cases import SIZES, llama, make_batches, make_engine, masters, noisy, same

SHORT = 16  # tokens up to which the frequencies of short rows hold


def longrope(long=2.0):
    """With factors of long rows from `long` on."""
    torch.manual_seed(0)
    frequencies = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "short_factor": [1.0 + i / 10 for i in range(frequencies)],
        "long_factor": [long + i for i in range(frequencies)],
        "original_max_position_embeddings": SHORT,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = Phi3Config(
        **SIZES, **tokens, original_max_position_embeddings=SHORT, rope_parameters=rope
    )
    return noisy(Phi3ForCausalLM(config))


LENGTHS = [
    pytest.param([(2, 12), (1, 9)], id="short"),
    pytest.param([(1, 30), (2, 40)], id="long"),
    pytest.param([(2, SHORT), (1, SHORT + 1), (3, 8), (1, 64), (1, 5)], id="both in turn"),
]


@pytest.mark.parametrize("shapes", LENGTHS)
def test_frequencies_follow_the_length_of_each_row(shapes):
    model, steps = longrope(), make_batches(2, shapes)
    with make_engine(model) as engine:
        losses = [engine.step(step).loss for step in steps]
        trained = masters(engine)
    plain = train_in_place(copy.deepcopy(model), steps)
    assert losses == pytest.approx(plain.losses, rel=1e-6)
    for name, start in model.named_parameters():
        error, way = trained[name] - plain.parameters[name], plain.parameters[name] - start
        assert error.norm() <= 1e-4 * way.norm(), name


def test_the_frequencies_of_long_rows_matter():
    """The test above can fail: with other long factors a long row has another loss."""
    [step] = make_batches(1, [(1, 30)])
    losses = []
    for model in (longrope(), longrope(long=1.0)):
        with make_engine(model) as engine:
            losses.append(engine.step(step).loss)
    assert abs(losses[0] - losses[1]) > 1e-4


class Caching(nn.Embedding):
    """Keeps something of its first batch for good."""

    def forward(self, ids):
        if not hasattr(self, "kept"):
            self.kept = self.of(ids)
        return super().forward(ids) * self.kept


def caching(of):
    model = llama()
    model.model.embed_tokens.__class__ = Caching
    model.model.embed_tokens.of = of
    return model


def test_what_is_made_once_whatever_the_batch_is_taken():
    [step] = make_batches(1)
    model = caching(lambda ids: torch.full((1,), 2.0))
    with make_engine(model, saveable=False) as engine:
        loss = engine.step(step).loss
    plain = train_in_place(model, [step])
    assert loss == pytest.approx(plain.losses[0], rel=1e-6)


@pytest.mark.parametrize(
    "of", [lambda ids: ids.float().mean(), lambda ids: 2.0], ids=["of the tokens", "no tensor"]
)
def test_what_is_made_of_the_first_batch_is_refused(of):
    with pytest.raises(InputError, match="its forward changes .*kept as it runs"):
        make_engine(caching(of))


def test_checkpointing_changes_no_bit():
    steps, results = make_batches(2), []
    for enable in (False, True):
        model = llama()
        if enable:
            model.gradient_checkpointing_enable()
        with make_engine(model) as engine:
            losses = [engine.step(step).loss for step in steps]
            results.append((losses, masters(engine)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])
