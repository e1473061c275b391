"""Without an optimizer: logits and losses of plain transformers, from every kind of source."""

import copy
import re

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain import Engine, InputError
from megatrain.compat.transformers import attention_of
from tests.families.plain import token_loss, train_in_place
from tests.families.tiny import tiny_config, tiny_model
from tests.parity.cases import (
    SIZES,
    llama,
    make_batches,
    make_engine,
    masters,
    noisy,
    parameters,
    same,
)
from tests.parity.test_sequence_parallel import long_rotary
from tests.sweeps import few

# Soft-capped, scaled and divided logits, biases of the head, states, experts.
FAMILIES = ["llama", "gpt2", "gemma2", "cohere", "granite", "phi", "mamba", "mixtral"]


@pytest.mark.parametrize("family", few(FAMILIES, 0, 2, 6, 7))
def test_logits_and_loss_of_plain_transformers(family):
    model, [step] = tiny_model(family).eval(), make_batches(1)
    engine = Engine(model, precision="fp32", device="cpu")
    mask = torch.ones_like(step[0]["input_ids"])
    mask[0, :3] = 0
    total, count = 0.0, 0
    with torch.no_grad():
        for micro in step:
            wanted = model(input_ids=micro["input_ids"], use_cache=False).logits
            got = engine.logits({"input_ids": micro["input_ids"]})
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
            assert got.dtype == torch.float32
            total += float(token_loss(wanted.float(), micro["labels"]))
            count += int((micro["labels"][:, 1:] != -100).sum())
        inputs = {"input_ids": step[0]["input_ids"], "attention_mask": mask}
        masked = model(**inputs, use_cache=False).logits
    got = engine.logits({**inputs, "labels": step[0]["labels"]})
    torch.testing.assert_close(got[mask.bool()], masked[mask.bool()], rtol=1e-5, atol=1e-5)
    assert engine.evaluate(step) == pytest.approx(total / count, rel=1e-6)


def test_a_mask_reaches_layers_that_follow_the_stack():
    """A decoder of bytes after the stack of patches pads as the stack does."""
    model = tiny_model("blt").eval()
    engine = Engine(model, precision="fp32", device="cpu")
    inputs = {key: make_batches(1)[0][0]["input_ids"] for key in ("input_ids", "attention_mask")}
    inputs["attention_mask"] = (torch.arange(12) >= torch.tensor([[3], [0]])).long()
    with torch.no_grad():
        wanted = model(**inputs, use_cache=False).logits
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(engine.logits(inputs)[seen], wanted[seen], rtol=1e-5, atol=1e-5)


def test_the_model_given_stays_as_it_is():
    model = llama().eval()
    model.model.norm.weight.requires_grad_(False)
    kept, before = copy.deepcopy(model), parameters(model)
    engine = make_engine(model)
    engine.step(make_batches(1)[0])
    assert same(parameters(model), before)
    assert not model.training
    assert model.config.to_dict() == kept.config.to_dict()
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in kept.parameters()
    ]
    ids = make_batches(1)[0][0]["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, kept(ids).logits)


def test_attention_can_be_chosen_for_a_model_given():
    model, [step] = llama(), make_batches(1)
    eager = make_engine(model, attn_implementation="eager")
    assert attention_of(eager.config) == "eager"
    assert attention_of(model.config) == "sdpa"
    assert eager.step(step).loss == pytest.approx(make_engine(model).step(step).loss, rel=1e-6)
    with pytest.raises(InputError, match="attn_implementation: .*nope"):
        make_engine(model, attn_implementation="nope")


def test_a_model_whose_weights_are_on_the_meta_device_is_drawn():
    config = LlamaConfig(**SIZES)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.model.norm.weight.requires_grad_(False)
    engine = make_engine(model)
    assert same(masters(engine), masters(make_engine(config)))
    engine.step(make_batches(1)[0])
    assert torch.equal(masters(engine)["model.norm.weight"], torch.ones(SIZES["hidden_size"]))


def test_drawn_weights_depend_on_the_seed_alone():
    config = LlamaConfig(**SIZES)
    one, again, other = (masters(make_engine(config, seed=seed)) for seed in (3, 3, 4))
    assert same(one, again)
    constant = {name for name in one if torch.equal(one[name], other[name])}
    assert constant == {name for name in one if "norm" in name}
    assert same(one, masters(make_engine(config, seed=3, precision="bf16")))


# What is easily lost: two standard deviations, a scale by depth, a row of zeros, values that a
# parent sets in its children, constants that are no zeros.
DRAWN: dict[str, dict] = {
    "llama": {"pad_token_id": 5},
    "gpt2": {},
    "modernbert-decoder": {},
    "youtu": {},
    "mamba2": {"head_dim": 2, "num_heads": 32},  # 32 values of dt_bias, of which 4 may be unlucky
    "jamba": {},
    "qwen3_moe": {},
}


@pytest.mark.parametrize("family", ["openai-gpt", "apertus"])
def test_values_that_only_a_constructor_sets_are_not_drawn(family):
    with pytest.raises(
        InputError, match="_init_weights of a .* does not set .*; give the model's folder"
    ):
        make_engine(tiny_config(family))


@pytest.mark.parametrize("family", few(DRAWN, 0, 1, 3))
def test_drawn_weights_have_the_class_s_own_distribution(family):
    config = tiny_config(family, DRAWN[family])
    torch.manual_seed(0)
    wanted = parameters(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    got = masters(make_engine(config))
    assert got.keys() == wanted.keys()
    kinds: dict[str, list[str]] = {}
    for name, target in wanted.items():
        assert torch.equal(got[name] == 0, target == 0), name
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    for name, names in kinds.items():  # of all layers: a bias of one has too few values
        drawn, target = (torch.cat([made[n].flatten() for n in names]) for made in (got, wanted))
        if target.numel() < 2 or target.std() == 0:
            assert torch.equal(drawn, target), name
            continue
        doubt = 6 / target.numel() ** 0.5  # six standard errors, for a normal distribution
        assert float(drawn.std()) == pytest.approx(float(target.std()), rel=doubt), name
        assert float(drawn.mean() - target.mean()) == pytest.approx(
            0, abs=float(target.std()) * doubt
        ), name


# What a model computes once or anew outside of its layers: as in plain torch, or refused.


LENGTHS = {  # to 8 tokens the frequencies of short rows hold
    "short": [(2, 6), (1, 4)],
    "long": [(1, 30), (2, 40)],
    "both in turn": [(2, 8), (1, 9), (3, 4), (1, 64), (1, 5)],
}


@pytest.mark.parametrize("shapes", LENGTHS.values(), ids=LENGTHS)
def test_frequencies_follow_the_length_of_each_row(shapes):
    model, steps = noisy(long_rotary()), make_batches(2, shapes)
    with make_engine(model) as engine:
        losses = [engine.step(step).loss for step in steps]
        trained = masters(engine)
    plain = train_in_place(copy.deepcopy(model), steps)
    assert losses == pytest.approx(plain.losses, rel=1e-6)
    for name, start in model.named_parameters():
        error, way = trained[name] - plain.parameters[name], plain.parameters[name] - start
        assert error.norm() <= 1e-4 * way.norm(), name


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
