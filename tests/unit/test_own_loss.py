"""A model is trained on its own loss, or refused by name."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.loss.loss_utils import ForCausalLMLoss

from megatrain import InputError
from tests.families.tiny import tiny_model
from tests.parity.cases import SIZES, llama, make_batches, make_engine

BERT = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}


class WithZLoss(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        if result.loss is not None:
            result.loss = result.loss + 1e-4 * result.logits.logsumexp(-1).square().mean()
        return result


class WithoutLoss(LlamaForCausalLM):
    def forward(self, input_ids, position_ids=None):
        return super().forward(input_ids, position_ids=position_ids, use_cache=False)


class WithPenalty(LlamaForCausalLM):
    """Adds what only its layers know."""

    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        if result.loss is not None:
            result.loss = result.loss + self.model.layers[0].mlp.up_proj.weight.square().mean()
        return result


def of(kind):
    return kind(llama().config)


def with_function(function):
    model = llama()
    model.loss_function = function
    return model


def above_64_twice(logits, labels, **kwargs):
    targets = labels[:, 1:].flatten()
    each = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="none")
    return (each * (1 + (targets > 64).float())).sum() / (targets != -100).sum()


class Weighted(LlamaForCausalLM):
    """Weighs tokens that no short trial has, by its forward alone."""

    def forward(self, *args, labels=None, **kwargs):
        shown = None if labels is None else labels.masked_fill(labels > 100, -100)
        return super().forward(*args, labels=shown, **kwargs)


class Tempered(LlamaForCausalLM):
    """A forward of its own, on the usual loss."""

    def forward(self, *args, labels=None, **kwargs):
        result = super().forward(*args, **kwargs)
        result.logits = result.logits * 0.5
        if labels is not None:
            result.loss = self.loss_function(result.logits, labels, self.config.vocab_size)
        return result


OTHER_LOSSES = {
    "z-loss": (lambda: of(WithZLoss), "loss not what its loss_function makes"),
    "weights": (lambda: of(Weighted), "loss not what its loss_function makes"),
    "a function": (lambda: with_function(above_64_twice), "has a loss_function of its own"),
    "the usual, partly": (
        lambda: with_function(partial(ForCausalLMLoss, ignore_index=5)),
        "has a loss_function of its own",
    ),
    "a z-loss of the configuration": (
        lambda: tiny_model("bamba", changes={"z_loss_coefficient": 0.1}),
        "loss in .*'s forward is not the mean cross entropy",
    ),
}


@pytest.mark.parametrize("saveable", [True, False])
@pytest.mark.parametrize(("make", "said"), OTHER_LOSSES.values(), ids=OTHER_LOSSES)
def test_another_loss_is_refused(make, said, saveable):
    with pytest.raises(InputError, match=said):
        make_engine(make(), saveable=saveable)


def test_a_loss_that_cannot_be_tried_is_refused():
    with pytest.raises(InputError, match="loss in WithPenalty's forward cannot be computed"):
        make_engine(of(WithPenalty))


HEADS = {
    "masked": (lambda: BertForMaskedLM(BertConfig(**BERT)), "each token at its own place"),
    "tokens": (lambda: BertForTokenClassification(BertConfig(**BERT, num_labels=5)), "5 numbers"),
    "rows": (
        lambda: LlamaForSequenceClassification(llama(pad_token_id=0).config),
        "2 scores of a row",
    ),
}


@pytest.mark.parametrize(("make", "reason"), HEADS.values(), ids=HEADS)
def test_heads_of_no_causal_language_model_are_refused(make, reason):
    with pytest.raises(InputError, match=f"{reason}.*CausalLM"):
        make_engine(make())


def padded_head():
    """160 logits for a vocabulary of 128, as of tables that are padded for speed."""
    model = llama()
    model.lm_head = nn.Linear(model.config.hidden_size, 160, bias=False)
    return model


def mixtral():
    routers = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.0}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **routers))


AS_THEY_ARE = {
    "no loss of its own": lambda: of(WithoutLoss),
    "a forward of its own": lambda: of(Tempered),
    "more logits than tokens": padded_head,
    "a router's loss of no weight": mixtral,
}


@pytest.mark.parametrize("make", AS_THEY_ARE.values(), ids=AS_THEY_ARE)
def test_cross_entropy_of_the_next_token(make):
    model = make().eval()
    [[micro, *_]] = make_batches(1)
    logits = model(input_ids=micro["input_ids"]).logits
    wanted = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), micro["labels"][:, 1:].flatten()
    )
    engine = make_engine(model, saveable=False)
    assert engine.label_shift == 1
    assert engine.evaluate([micro]) == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("family", ["bart", "xlnet", "cpmant", "whisper", "llama", "bert"])
def test_the_loss_is_that_of_the_models_own_forward(family):
    """Decoders made for pairs of texts do not shift labels: whoever trains them has done so."""
    model = tiny_model(family).eval()
    [[micro, *_]] = make_batches(1)
    with torch.no_grad():
        wanted = model(**micro, use_cache=False).loss.item()
    with make_engine(model) as engine:
        assert engine.evaluate([micro]) == pytest.approx(wanted, rel=1e-6)
        assert engine.step([micro]).loss == pytest.approx(wanted, rel=1e-6)
