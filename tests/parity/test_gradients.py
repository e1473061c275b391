"""Gradients of one step against plain torch: the same bits where the sums have the same order."""

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

from tests.families.tiny import tiny_model
from tests.parity.cases import (
    assert_step,
    frozen,
    gradients,
    llama,
    make_batches,
    make_engine,
    masters,
    parameters,
    plain_gradients,
    qwen2,
    relative_error,
    same,
)
from tests.sweeps import few, swept

NEVER = 1e9  # a norm that clips nothing, while every gradient keeps a host gradient of its own

SHAPES = {
    "uneven": ((2, 12), (1, 7), (3, 5)),
    "one micro-batch": ((2, 9),),
    "one row": ((1, 11),),
    "one token beside others": ((1, 1), (2, 6), (1, 1)),
    "short beside long": ((1, 2), (3, 60), (4, 3)),
    "two tokens": ((1, 2),),
}


def check(model, step, *, exact=True, error=1e-6):
    loss, wanted = plain_gradients(model, step)
    engine = make_engine(model, clip=NEVER)
    result = engine.step(step)
    got = gradients(engine)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    norm = torch.stack([g.double().square().sum() for g in wanted.values()]).sum().sqrt()
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)  # summed in fp32
    if exact:
        assert same(got, wanted)
    else:
        assert got.keys() == wanted.keys()
        assert relative_error(got, wanted) < error


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_dense_models_bit_for_bit(shapes):
    [step] = make_batches(1, shapes)
    check(llama(), step)
    check(qwen2(), step)


@pytest.mark.parametrize("tied", [False, True])
def test_the_padding_row_learns_from_the_head_only(tied):
    model = llama(tie_word_embeddings=tied, pad_token_id=5)
    [step] = make_batches(1)
    for micro in step:
        micro["input_ids"][:, 1] = 5
    check(model, step, exact=not tied)
    engine = make_engine(model, clip=NEVER)
    engine.step(step)
    row = gradients(engine)["model.embed_tokens.weight"][5]
    assert bool(row.any()) == tied


def test_a_micro_batch_without_labels_adds_nothing():
    model, [step] = llama(), make_batches(1)
    step[1]["labels"][:] = -100
    check(model, step)


FROZEN = {
    "the embedding": lambda name: "embed_tokens" not in name,
    "the head": lambda name: "lm_head" not in name,
    "embedding and head": lambda name: "embed" not in name and "lm_head" not in name,
    "two of three layers": lambda name: ".0." not in name and ".2." not in name,
    "all but one layer": lambda name: ".1." in name,
    "all but the norms": lambda name: "norm" in name,
    "all but the last norm": lambda name: name == "model.norm.weight",
    "all but the embedding": lambda name: "embed_tokens" in name,
    "parts of every layer": lambda name: "q_proj" not in name and "mlp" not in name,
}


@swept(together=1, unless=FROZEN, tied={"untied": False, "tied": True})
def test_frozen_parameters_stay_and_the_others_learn_as_before(unless, tied):
    model = frozen(llama(tie_word_embeddings=tied), unless)
    [step] = make_batches(1)
    check(model, step, exact=not tied)
    engine = make_engine(model)
    engine.step(step)
    before, after = parameters(model), masters(engine)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("clip", [1.0, None])
def test_what_is_frozen_is_neither_measured_nor_updated(clip):
    [step] = make_batches(1)
    engine = make_engine(frozen(llama(), FROZEN["all but one layer"]), clip=clip)
    with engine.recording() as spans:
        engine.step(step)
    names = [span.name for span in spans]
    assert [n for n in names if n.startswith("update")] == ["update layer 1"]
    assert [n for n in names if n.startswith("measure")] == ["measure layer 1"]
    assert names.count("clear gradient sums") == 1
    assert not {"prologue backward", "clear rows"} & {*names}


def test_idle_experts_have_a_gradient_of_zero():
    model = tiny_model("mixtral")
    [step] = make_batches(1, ((1, 2), (1, 3)))  # fewer tokens than experts
    check(model, step, exact=False)
    engine = make_engine(model, clip=NEVER)
    engine.step(step)
    experts = [g for name, g in gradients(engine).items() if "experts" in name]
    idle = sum(int(not expert.any()) for tensor in experts for expert in tensor)
    assert idle > 0


class Grouped(LlamaModel):
    """A model whose layers lie in lists of two."""

    def forward(self, input_ids, **_):
        hidden_BTD = self.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1])[None]
        rotary = self.rotary_emb(hidden_BTD, positions)
        for pair in self.layers:
            for layer in pair:
                hidden_BTD = layer(hidden_BTD, position_embeddings=rotary)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_BTD))


def test_layers_in_lists_of_lists_bit_for_bit():
    model = llama(num_hidden_layers=4)
    layers, model.model.__class__ = model.model.layers, Grouped
    model.model.layers = torch.nn.ModuleList([layers[:2], layers[2:]])
    [step] = make_batches(1)
    wanted = plain_gradients(model, step)
    engine = make_engine(model, clip=NEVER, saveable=False)
    assert_step(engine, step, wanted, error=1e-30)
    assert "model.layers.1.0.mlp.up_proj.weight" in gradients(engine)


# Attention and states; one argument for all layers, an input of each layer's own, a second
# activation, four of them.
@pytest.mark.parametrize(
    "family",
    few(["jamba", "cpmant", "gemma4_text", "zaya", "deepseek_v4", "bamba"], *range(5)),
)
def test_states_and_activations_that_several_layers_read(family):
    model = tiny_model(family)
    for shapes in (((2, 12), (1, 8)), SHAPES["one token beside others"]):
        [step] = make_batches(1, shapes)
        # Rows that are alone have other strides, for which other kernels round otherwise.
        check(model, step, exact=False, error=1e-5)
