"""Parts of layers run over tiles of tokens: only those that may be, with the same gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatrain import Placement
from megatrain.model.token_chunks import ChunkedOverTokens, acts_on_tokens_alone
from tests.inside import spec_of
from tests.parity.cases import (
    SHAPES,
    gradients,
    llama,
    make_batches,
    make_engine,
    model_of,
    qwen2,
    relative_error,
)
from tests.sweeps import swept

TILED = Placement(slots=2, chunk_tokens=5)

# Parts that tiles may be made of; all others of a layer may not.
TAKEN: dict[str, set[str]] = {
    "llama": {"input_layernorm", "post_attention_layernorm", "mlp"},
    "gemma2": {
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "mlp",
    },
    "mixtral": {"input_layernorm", "post_attention_layernorm"},
    "mamba": {"norm"},
    "gpt2": {"ln_1", "ln_2", "mlp"},
}


def taken(engine):
    """Parts that were tried and taken, without those inside others."""
    found = set()
    for layer in spec_of(engine).layers:
        for name, part in layer.kind.module.named_modules():
            forward = part.__dict__.get("forward")
            if isinstance(forward, ChunkedOverTokens) and any(
                forward._acts_on_tokens_alone.values()
            ):
                found.add(name)
    return found


def assert_alike(whole, cut, step):
    """A step of both is the same but for rounding."""
    one, other = whole.step(step), cut.step(step)
    assert other.loss == pytest.approx(one.loss, rel=1e-6)
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert relative_error(gradients(cut), gradients(whole)) < 2e-5


@pytest.mark.parametrize("family", TAKEN)
def test_tiles_change_gradients_by_rounding_only(family):
    model, [step] = model_of(family), make_batches(1, SHAPES)
    cut = make_engine(model, clip=1e9, placement=TILED)
    assert_alike(make_engine(model, clip=1e9), cut, step)
    assert taken(cut) == TAKEN[family]


def test_biases_and_frozen_parts_in_tiles():
    model, [step] = qwen2(), make_batches(1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up_proj" not in name and "layernorm" not in name)
    cut = make_engine(model, clip=1e9, placement=TILED)
    assert_alike(make_engine(model, clip=1e9), cut, step)


@swept(together=1, family=["llama", "gemma2", "gpt2", "mamba"], tokens=[1, 5])
def test_a_final_norm_in_tiles_changes_gradients_by_rounding_only(family, tokens):
    """Its tiles are the head's; a table tied to the head is in the same tile."""
    model, [step] = model_of(family), make_batches(1, SHAPES)
    whole = make_engine(model, clip=1e9)
    cut = make_engine(model, clip=1e9, placement=Placement(head_tokens=tokens))
    batch = {"input_ids": step[0]["input_ids"]}
    assert torch.equal(cut.logits(batch), whole.logits(batch))
    assert cut.evaluate(step) == pytest.approx(whole.evaluate(step), rel=1e-6)
    assert_alike(whole, cut, step)


def test_a_final_norm_s_gradient_is_summed_in_fp32():
    """In bf16, token by token, 250 gradients would lose most of their digits in a sum."""
    [step], found = make_batches(1, ((5, 50),)), []
    for precision, tokens in (("fp32", 4096), ("bf16", 4096), ("bf16", 1)):
        options = {"precision": precision, "placement": Placement(head_tokens=tokens)}
        engine = make_engine(llama(), clip=1e9, **options)
        engine.step(step)
        found.append(gradients(engine)["model.norm.weight"].float())
    exact, whole, cut = found
    assert (cut - exact).norm() < 1.2 * (whole - exact).norm()


class Of(nn.Module):
    """A function of activations, with a convolution's weights."""

    def __init__(self, function):
        super().__init__()
        self.function, self.inner = function, nn.Conv1d(8, 8, 3, padding=2)

    def forward(self, x):
        return self.function(x, self.inner)


NOT_ALONE: dict[str, Callable[[Tensor, nn.Module], Tensor]] = {
    "the token before": lambda x, _: x + 0.1 * x.roll(1, dims=1),
    "the row's mean": lambda x, _: x - x.mean(1, keepdim=True),
    "other rows": lambda x, _: x * x.amax(0, keepdim=True),
    "the number of tokens": lambda x, _: x * (1 + x.shape[1]),
    "a choice": lambda x, _: x * x.argmax(-1, keepdim=True),
    "noise": lambda x, _: torch.dropout(x, 0.5, train=True),
    "a convolution": lambda x, c: c(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2),
    "a constant": lambda x, _: torch.zeros_like(x),
    "another shape": lambda x, _: x.flatten(1),
}


@pytest.mark.parametrize("function", NOT_ALONE.values(), ids=NOT_ALONE)
def test_what_looks_at_more_than_a_token_is_not_taken(function):
    assert not acts_on_tokens_alone(Of(function), torch.ones(1, 1, 8))


@pytest.mark.parametrize(
    "part", [nn.LayerNorm(8), nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 9), nn.GELU())]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_takes_every_token_alone_is_taken(part, dtype):
    assert acts_on_tokens_alone(part.to(dtype), torch.ones(1, 1, 8, dtype=dtype))
