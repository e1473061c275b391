"""What the probe refuses: models that would train, but to something else; and what it finds."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from megatrain import AdamW, Engine
from megatrain.errors import RunFailed, Unsupported
from megatrain.model.build import loaded_types
from megatrain.model.capture import with_hidden
from megatrain.model.probe import spec
from megatrain.model.rebuilt import emptied
from tests.families.tiny import tiny_model


def tiny(**changes):
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **changes))


def before_layer(change):
    """A model whose hidden state is changed before its second layer."""

    class Between(LlamaDecoderLayer):
        def __call__(self, hidden, *args, **kwargs):
            return super().__call__(change(hidden), *args, **kwargs)

    model = tiny()
    model.model.layers[1].__class__ = Between
    return model


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


REFUSALS = {
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
    with pytest.raises(Unsupported, match=reason) as caught:
        spec(emptied(REFUSALS[reason]()))
    assert "\n" not in str(caught.value)


def test_a_table_that_is_read_as_a_whole_without_gradients_is_there_as_a_whole():
    model, ids = tiny(), torch.arange(6)[None]
    model.model.embed_tokens.__class__ = Centred
    assert spec(emptied(model)).gathered == []
    assert spec(emptied(tiny())).gathered == ["model.embed_tokens.weight"]
    with torch.no_grad():
        wanted = model(ids, labels=ids).loss.item()
    with Engine(model, precision="fp32", device="cpu", saveable=False) as engine:
        assert engine.evaluate([{"input_ids": ids, "labels": ids}]) == pytest.approx(wanted, 1e-6)


def test_states_that_the_configuration_asks_for_are_left_out():
    model, ids = tiny(output_hidden_states=True), torch.arange(6)[None]
    with torch.no_grad():
        wanted = model(ids, labels=ids).loss.item()
    with Engine(model, optimizer=AdamW(), precision="fp32", device="cpu") as engine:
        assert engine.step([{"input_ids": ids, "labels": ids}]).loss == pytest.approx(wanted, 1e-6)
        assert engine.config.output_hidden_states


def test_a_layer_left_out_later_is_noticed():
    ids = torch.arange(6)[None]
    with Engine(tiny(), optimizer=AdamW(), precision="fp32", device="cpu") as engine:
        engine.config.num_hidden_layers = 2
        with pytest.raises(RunFailed, match=r"left out model\.layers\.2"):
            engine.step([{"input_ids": ids, "labels": ids}])


def test_layers_that_differ_by_an_attribute_are_two_kinds():
    model = tiny()
    model.model.layers[1].self_attn.scaling *= 2
    kinds = [layer.kind for layer in spec(emptied(model)).layers]
    assert kinds[0] is kinds[2] is not kinds[1]


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


def test_a_tied_head_is_given_its_table_and_no_call_looks_for_ties(monkeypatch):
    """torch would go through all parameters, at each chunk of tokens of the head."""
    found = spec(emptied(tiny(tie_word_embeddings=True)))
    monkeypatch.setattr("torch.nn.utils.stateless._untie_named_tensors_map", None)
    [name] = found.head
    assert name == "model.embed_tokens.weight"
    rows, hidden = torch.randn(6, 8), torch.randn(1, 3, 8)
    inputs = found.capture.inputs({"input_ids": torch.zeros(1, 1, dtype=torch.long)})
    logits = found.capture.head({name: rows}, with_hidden(found.trunk, hidden), inputs)
    assert torch.equal(logits, F.linear(hidden, rows))


def pooled():
    """An encoder that scores what its trunk has pooled of a row."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**sizes, intermediate_size=8, num_labels=1))


@pytest.mark.parametrize("make", [lambda: tiny_model("prophetnet"), pooled])
def test_a_head_that_reads_other_states_of_the_trunk_is_refused(make):
    with pytest.raises(Unsupported, match="more than the last hidden states"):
        spec(emptied(make()))
