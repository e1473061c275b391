"""What the probe refuses and finds; a model is trained on its own loss, or refused by name."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from megatrain import AdamW, Engine, InputError
from megatrain.errors import Unsupported
from megatrain.model.build import empty_model, loaded_types
from megatrain.model.capture import ties
from megatrain.model.probe import spec
from megatrain.model.rebuilt import emptied
from tests.families.tiny import tiny_model, tiny_multimodal
from tests.parity.cases import SIZES, llama, make_batches, make_engine
from tests.refusals import refused


def tiny(**changes):
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **changes))


def before_layer(change):
    """A model whose hidden state is changed before its second layer."""

    class Between(LlamaDecoderLayer):
        def __call__(self, hidden, *args, **kwargs):
            return super().__call__(change(hidden), *args, **kwargs)

    return with_layer(Between)


def summed_table():
    """A tied model whose embedding uses all of its table."""
    model = tiny(tie_word_embeddings=True)
    model.model.embed_tokens.__class__ = Summed
    return model


class Summed(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + self.weight.sum()


class WithTable(nn.Module):
    """Adds the mean of the token table, through which no gradient flows, to what a module gives."""

    def __init__(self, module, embedding):
        super().__init__()
        self.module = module
        object.__setattr__(self, "embedding", embedding)  # which is no child

    def forward(self, given):
        return self.module(given) + self.embedding.weight.detach().mean()


def reading_its_table(path):
    model = tiny()
    parent, name = path.rsplit(".", 1) if "." in path else ("", path)
    made = WithTable(model.get_submodule(path), model.model.embed_tokens)
    setattr(model.get_submodule(parent), name, made)
    return model


class Centred(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) - self.weight.detach().mean(0)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def hooked(hidden):
    hidden.register_hook(lambda gradient: 2 * gradient)
    return hidden


class WithoutGradients(LlamaDecoderLayer):
    def __call__(self, *args, **kwargs):
        with torch.no_grad():
            return super().__call__(*args, **kwargs)


class Asking(LlamaDecoderLayer):
    def forward(self, hidden, *args, **kwargs):
        return super().forward(2 * hidden if torch.is_grad_enabled() else hidden, *args, **kwargs)


class Shifting(LlamaDecoderLayer):
    def forward(self, hidden, *args, **kwargs):
        return super().forward(hidden.add_(1), *args, **kwargs)


class Cast(LlamaDecoderLayer):
    def __call__(self, *args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return super().__call__(*args, **kwargs)


class Resting(LlamaForCausalLM):
    """Leaves a layer in evaluation mode, as for a part without dropout."""

    def train(self, mode=True):
        super().train(mode)
        self.model.layers[1].eval()
        return self


class Writing(LlamaForCausalLM):
    """Replaces tokens, or labels, in the batch itself."""

    written = "input_ids"

    def forward(self, input_ids=None, labels=None, **kwargs):
        given = {"input_ids": input_ids, "labels": labels}
        if given[self.written] is not None:
            given[self.written].masked_fill_(given[self.written] == 20, 21)
        return super().forward(**given, **kwargs)


class WritingLabels(Writing):
    written = "labels"


class Residual(LlamaModel):
    """Adds the embeddings to what its layers give, without a gradient."""

    def forward(self, input_ids=None, **kwargs):
        result = super().forward(input_ids, **kwargs)
        result.last_hidden_state = result.last_hidden_state + self.embed_tokens(input_ids).detach()
        return result


def residual():
    model = tiny()
    model.model.__class__ = Residual
    return model


def with_layer(kind):
    """A model whose second layer is of this class."""
    model = tiny()
    model.model.layers[1].__class__ = kind
    return model


def changing(change):
    """A model whose second layer changes a weight of its own."""

    class Normed(LlamaDecoderLayer):
        def forward(self, *args, **kwargs):
            change(self.mlp.up_proj.weight)
            return super().forward(*args, **kwargs)

    return with_layer(Normed)


def whole_omni():
    """A model that thinks and speaks; `generate` calls its parts, and nothing calls the whole."""
    parts = {"thinker_config": tiny_multimodal("qwen2_5_omni_thinker").config.to_dict()}
    config = Qwen2_5OmniConfig(**parts, enable_audio_output=False)
    return Qwen2_5OmniForConditionalGeneration(config)


REFUSALS = {
    "has no forward of its own; train one of its parts .thinker., saved as": whole_omni,
    "layers.1, its forward calls Reversed, a torch.autograd": lambda: before_layer(Reversed.apply),
    "hook of an activation's gradient between layers": lambda: before_layer(hooked),
    "layers.1 is called under torch.no_grad": lambda: with_layer(WithoutGradients),
    "forward of model.layers.1 changes its parameter mlp.up_proj": lambda: changing(
        lambda weight: weight.detach().div_(2)
    ),
    "of model.layers.1 changes its parameter mlp.up_proj.weight": lambda: changing(
        lambda weight: setattr(weight, "data", weight.data / 2)
    ),
    "in model.layers.1 the code of Asking reads is_grad_enabled": lambda: with_layer(Asking),
    "forward of model.layers.1 changes in place what it is given": lambda: with_layer(Shifting),
    "before model.layers.1, .* or begins autocast": lambda: with_layer(Cast),
    "before model.layers.1, its forward reads values of earlier": lambda: before_layer(
        lambda h: h if h.isfinite().all() else 0 * h
    ),
    "model.layers.1 is in another mode after the model's train": lambda: Resting(tiny().config),
    "its forward changes input_ids of a batch in place": lambda: Writing(tiny().config),
    "its forward changes labels of a batch in place": lambda: WritingLabels(tiny().config),
    "reads by .detach.. what precedes them; let layers pass it on": residual,
    "operations between layers": lambda: before_layer(lambda h: h * 2),
    "before model.layers.1": lambda: before_layer(lambda h: h.detach()),
    "embed_tokens.weight is used both before and after": summed_table,
    "what follows the layers reads the token embeddings again": lambda: reading_its_table(
        "model.norm"
    ),
    "reads the token embeddings again": lambda: reading_its_table("lm_head"),
    "output_router_logits": lambda: tiny(output_router_logits=True),
    "attn_implementation is flex_attention": lambda: tiny(attn_implementation="flex_attention"),
    "layerdrop is 0.5": lambda: tiny(layerdrop=0.5),
    "rescale_every is 2": lambda: tiny_model("rwkv", changes={"rescale_every": 2}),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_refusals(reason):
    with refused(reason, Unsupported):
        spec(emptied(REFUSALS[reason]()))


def test_a_table_that_is_read_as_a_whole_without_gradients_is_there_as_a_whole():
    model, ids = tiny(), torch.arange(6)[None]
    model.model.embed_tokens.__class__ = Centred
    assert spec(emptied(model)).gathered == []
    assert spec(emptied(tiny())).gathered == ["model.embed_tokens.weight"]
    with torch.no_grad():
        wanted = model(ids, labels=ids).loss.item()
    with Engine(model, precision="fp32", device="cpu", saveable=False) as engine:
        assert engine.evaluate([{"input_ids": ids, "labels": ids}]) == pytest.approx(wanted, 1e-6)


def test_parameters_that_a_part_makes_anew_are_no_ties():
    class Anew(nn.Linear):  # as PEFT's attention
        def named_parameters(self, *args, **kwargs):
            return iter([("weight", nn.Parameter(torch.ones(1)))])

    assert ties(nn.Sequential(Anew(1, 1))) == []


def test_states_that_the_configuration_asks_for_are_left_out():
    model, ids = tiny(output_hidden_states=True), torch.arange(6)[None]
    with torch.no_grad():
        wanted = model(ids, labels=ids).loss.item()
    with Engine(model, optimizer=AdamW(), precision="fp32", device="cpu") as engine:
        assert engine.step([{"input_ids": ids, "labels": ids}]).loss == pytest.approx(wanted, 1e-6)
        assert engine.config.output_hidden_states
    assert spec(empty_model(LlamaConfig(**SIZES, gradient_checkpointing=True))).layers
    with refused("cannot build a llama causal model: there is no 'glu'"):
        empty_model(LlamaConfig(**SIZES, hidden_act="glu"))


class Tabled(LlamaForCausalLM):
    """With a table that follows the model's type, and one that does not."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("decay", torch.ones(2), persistent=False)
        self.register_buffer("angles", torch.ones(2).float(), persistent=False)
        self.register_buffer("exact", torch.ones(2))

    _keep_in_fp32_modules_strict = ("exact",)


def test_buffers_have_the_type_that_transformers_gives_them():
    model: PreTrainedModel = Tabled(tiny().config)
    types = loaded_types(model, torch.bfloat16)
    assert types["decay"] == types["lm_head.weight"] == torch.bfloat16
    assert types["angles"] == types["exact"] == torch.float32
    assert {*loaded_types(model, torch.float32).values()} == {torch.float32}


def pooled(num_labels):
    """An encoder that scores what its trunk has pooled of a row."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 8, "num_labels": num_labels}
    return BertForSequenceClassification(BertConfig(**sizes))


@pytest.mark.parametrize(
    "make", [lambda: tiny_model("prophetnet"), partial(pooled, 1), partial(pooled, 3)]
)
def test_a_head_that_reads_other_states_of_the_trunk_is_refused(make):
    with pytest.raises(Unsupported, match="more than the last hidden states"):
        spec(emptied(make()))


def test_layers_of_several_kinds_may_read_values():
    model = tiny_model("jetmoe")  # its layers count the tokens of each expert
    model.model.layers[0].requires_grad_(False)
    assert len({id(layer.kind) for layer in spec(emptied(model)).layers}) == 2


# A model is trained on its own loss, or refused by name.

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


def with_part_of_the_usual():
    model = llama()
    model.loss_function = partial(ForCausalLMLoss, ignore_index=5)
    return model


class Weighted(LlamaForCausalLM):
    """Weighs tokens that no short trial has, by its forward alone."""

    def forward(self, *args, labels=None, **kwargs):
        shown = None if labels is None else labels.masked_fill(labels > 100, -100)
        return super().forward(*args, labels=shown, **kwargs)


class Masking(LlamaForCausalLM):
    """Leaves a token of the configuration out, as code of a folder may."""

    def forward(self, *args, labels=None, **kwargs):
        shown = None if labels is None else labels.masked_fill(labels == 77, -100)
        return super().forward(*args, labels=shown, **kwargs)

    forward.__module__ = "transformers_modules.folder"


def bringing(change):
    """A model whose class is of a folder's code, its loss that of labels which `change` makes."""

    class Brought(LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            result = super().forward(input_ids, **kwargs)
            if labels is not None:
                targets = change(labels, input_ids)[:, 1:].flatten()
                logits = result.logits[:, :-1].flatten(0, 1)
                result.loss = nn.functional.cross_entropy(logits, targets)
            return result

        forward.__module__ = "transformers_modules.folder"

    return of(Brought)


class SmoothedInTraining(LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **kwargs):
        result = super().forward(input_ids, **kwargs)
        if labels is not None:
            smoothing = 0.1 if result.logits.requires_grad else 0.0
            logits, targets = result.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            result.loss = nn.functional.cross_entropy(logits, targets, label_smoothing=smoothing)
        return result


def without_some(labels, ids):
    labels = labels.clone()
    labels[labels == 77] = -100
    return labels


def if_there_are_some(labels, ids):
    return labels if labels.max() < 100 else labels - 1


def where_labelled(labels, ids):
    there = labels != -100
    return torch.nn.functional.pad(labels, (0, 1)).to(labels.device)[:, :-1].where(there, -100)


class Tempered(LlamaForCausalLM):
    """A forward of its own, on the usual loss."""

    def forward(self, *args, labels=None, **kwargs):
        result = super().forward(*args, **kwargs)
        result.logits = result.logits * 0.5
        if labels is not None:
            result.loss = self.loss_function(result.logits, labels, self.config.vocab_size)
        return result


def with_head(count):
    """A model with so many logits for a vocabulary of 128."""
    model = llama()
    model.lm_head = nn.Linear(model.config.hidden_size, count, bias=False)
    return model


OTHER_LOSSES = {
    "z-loss": (lambda: of(WithZLoss), "is not the mean cross entropy"),
    "weights": (lambda: of(Weighted), "computed from values .*by gt"),
    "without images' places": (
        lambda: Masking(LlamaConfig(**SIZES, image_token_index=77)),
        "loss in Masking's forward is not the mean cross entropy",
    ),
    "smoothed": (lambda: of(SmoothedInTraining), "is not the mean cross entropy"),
    "without a token": (lambda: bringing(without_some), "computed from values .*by eq"),
    "of many": (lambda: bringing(if_there_are_some), "computed from values .*by max"),
    "of inputs": (
        lambda: bringing(lambda labels, ids: labels.masked_fill(ids == 77, -100)),
        "computed from values .*by input_ids",
    ),
    "the usual, partly": (with_part_of_the_usual, "defines a loss_function"),
    "a z-loss of the configuration": (
        lambda: tiny_model("bamba", changes={"z_loss_coefficient": 0.1}),
        "loss in .*'s forward is not the mean cross entropy",
    ),
    "not tried": (lambda: of(WithPenalty), "loss in WithPenalty's forward cannot be computed"),
    "masked": (lambda: BertForMaskedLM(BertConfig(**BERT)), "at its own place.*CausalLM"),
    "a head of few": (lambda: with_head(5), "5 numbers.*CausalLM"),
}


@pytest.mark.parametrize(("make", "said"), OTHER_LOSSES.values(), ids=OTHER_LOSSES)
def test_another_loss_or_head_is_refused(make, said):
    for saveable in (True, False):
        with pytest.raises(InputError, match=said):
            make_engine(make(), saveable=saveable)


ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.0}
AS_THEY_ARE = {
    "no loss of its own": lambda: of(WithoutLoss),
    "a forward of its own": lambda: of(Tempered),
    "code of a folder": lambda: bringing(where_labelled),
    "more logits than tokens": lambda: with_head(160),  # of a table that is padded for speed
    "a router's loss of no weight": lambda: tiny_model("mixtral", changes=ROUTERS),
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
