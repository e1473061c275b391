"""What a checkpoint or an export could not have of a model is refused when the engine is made."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, dynamic_module_utils

from megatrain import AdamW, Engine, InputError
from megatrain.compat.transformers import attention_of, experts_of, set_attention
from tests.checkpoint.cases import add_code, batches, engine_of
from tests.families.tiny import tiny_model
from tests.inside import sized, spec_of
from tests.parity.cases import llama
from tests.refusals import refused


class Scaled(LlamaForCausalLM):
    """A class of the user's own, under a name of its own."""

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits * 0.5
        return found


def of_class(name):
    def change(model):
        model.__class__ = type(name, (Scaled,), {})

    return change


class Adapted(nn.Linear):
    """A projection with a low-rank part, as adapters have."""

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, bias=False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x))


def adapted(model):
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj)


def own_configuration(model):
    attention = model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    set_attention(attention.config, "eager")


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a subclass": (of_class("Scaled"), "Scaled"),
    "a subclass of the same name": (of_class("LlamaForCausalLM"), "LlamaForCausalLM"),
    "an adapter": (adapted, r"layers\.1\.self_attn\.q_proj"),
    "fewer layers": (
        lambda m: setattr(m.model, "layers", m.model.layers[:2]), r"model\.layers\.2 "
    ),
    "a tied head": (
        lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight),
        r"lm_head\.weight is a parameter .* tied to",
    ),
    "a head that was untied": (
        lambda m: setattr(m.config, "tie_word_embeddings", True),
        r"lm_head\.weight is a parameter of shape .* tied to",
    ),
    "a head with a bias": (
        lambda m: setattr(m.lm_head, "bias", nn.Parameter(torch.ones(m.lm_head.out_features))),
        r"lm_head\.bias is a parameter",
    ),
    "an attribute": (
        lambda m: setattr(m.model.layers[2].self_attn, "scaling", 0.5),
        r"layers\.2\.self_attn\.scaling is 0\.5 in the model given, and 0\.",
    ),
    "another activation": (
        lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.Tanh()),
        r"layers\.0\.mlp\.act_fn is a .*Tanh",
    ),
    "a layer's configuration": (own_configuration, r"layers\.1\.self_attn\.config"),
    "a cast": (
        lambda m: m.to(torch.bfloat16), r"inv_freq has other values .*make or load it with `dtype=`"
    ),
    "other frequencies": (
        lambda m: m.model.rotary_emb.inv_freq.mul_(0.5), "inv_freq has other values"
    ),
    "a buffer of its own": (
        lambda m: m.lm_head.register_buffer("offset", torch.ones(3)),
        r"lm_head\.offset is a buffer",
    ),
}  # fmt: skip


def changed(what):
    model = llama()
    CHANGES[what][0](model)
    return model


@pytest.mark.parametrize("what", CHANGES)
def test_what_could_not_be_loaded_is_refused_at_once(what):
    with refused(CHANGES[what][1]):
        Engine(changed(what), optimizer=AdamW(), device="cpu")


@pytest.mark.parametrize("optimizer", [None, AdamW()])
@pytest.mark.parametrize("what", ["an attribute", "a cast", "a head with a bias"])
def test_what_is_not_to_be_saved_is_computed_and_not_saved(what, optimizer, tmp_path):
    model, batch = changed(what), batches(1)[0][0]
    options = {"precision": "fp32", "device": "cpu", "saveable": False}
    with Engine(model, optimizer=optimizer, **options) as engine:
        if what == "an attribute":
            ids = {name: value for name, value in batch.items() if name != "labels"}
            wanted = model(**ids).logits
            torch.testing.assert_close(engine.logits(batch), wanted, rtol=0, atol=1e-5)
        for save in (engine.save, engine.save_pretrained):
            with pytest.raises(InputError, match=CHANGES[what][1]):
                save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_what_was_set_in_the_configuration_is_no_difference():
    model = llama(num_hidden_layers=2, tie_word_embeddings=True, attention_dropout=0.1)
    model.eval()
    model.generation_config.max_length = 7
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.long), output_hidden_states=True)
    Engine(copy.deepcopy(model), optimizer=AdamW(), device="cpu").close()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_model_with_resized_tables_trains_and_comes_back(family, tmp_path):
    model = tiny_model(family)
    rows = model.config.vocab_size + 8
    model.resize_token_embeddings(rows)
    ids = torch.arange(rows - 6, rows)[None]
    step = [{"input_ids": ids, "labels": ids}]
    with torch.no_grad():
        wanted = model.eval()(ids, labels=ids).loss.item()
    with engine_of(model=model) as engine:
        assert engine.evaluate(step) == pytest.approx(wanted, rel=1e-5)
        engine.step(step)
        engine.save(tmp_path / "saved")
        engine.save_pretrained(tmp_path / "out")
        trained = engine.evaluate(step)
    with Engine.load(tmp_path / "saved", device="cpu") as again:
        assert again.evaluate(step) == trained
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert exported(ids, labels=ids).loss.item() == pytest.approx(trained, rel=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "got_ocr2"])
def test_the_chosen_attention_and_experts_come_back(family, tmp_path):
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    chosen = {"": "eager", "text_config": "sdpa"} if family == "got_ocr2" else "eager"
    model.set_attn_implementation(chosen)
    if family == "mixtral":
        model.set_experts_implementation("batched_mm")
    engine_of(model=model).save(tmp_path / "saved")
    again = Engine.load(tmp_path / "saved", device="cpu")
    inside = again.config.get_text_config(decoder=True)
    given = model.config.get_text_config()
    assert attention_of(inside) == attention_of(given)
    assert attention_of(again.config) == "eager"
    assert experts_of(inside) == experts_of(given)


def test_a_computed_buffer_comes_back_though_it_is_computed_otherwise(tmp_path, monkeypatch):
    """As by another version of transformers."""
    engine = engine_of()
    engine.save(tmp_path / "saved")
    name = "model.rotary_emb.inv_freq"
    wanted = spec_of(engine).capture.model.get_buffer(name).clone()
    build = AutoModelForCausalLM.from_config

    def other(*args, **kwargs):
        model = build(*args, **kwargs)
        model.get_buffer(name).mul_(1.5)
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", other)
    again = Engine.load(tmp_path / "saved", device="cpu")
    assert torch.equal(spec_of(again).capture.model.get_buffer(name), wanted)
    steps = batches(2)
    assert [again.step(s).loss for s in steps] == [engine.step(s).loss for s in steps]


def test_code_that_came_with_a_folder_goes_along_and_of_a_module_is_refused(tmp_path, monkeypatch):
    sized(monkeypatch, dynamic_module_utils, HF_MODULES_CACHE=str(tmp_path / "cache"))
    folder = tmp_path / "given"
    llama().save_pretrained(folder)
    add_code(folder)
    first, *rest = batches(3)
    engine = engine_of(model=folder, trust_remote_code=True)
    engine.step(first)
    engine.save(tmp_path / "saved")
    again = Engine.load(tmp_path / "saved", device="cpu", trust_remote_code=True)
    assert [again.step(s).loss for s in rest] == [engine.step(s).loss for s in rest]
    module = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with pytest.raises(InputError, match="OwnModel cannot be built .*folder that has its code"):
        engine_of(model=module)


def test_code_of_a_name_that_other_code_has_is_refused_where_it_would_be_mixed(
    tmp_path, monkeypatch
):
    sized(monkeypatch, dynamic_module_utils, HF_MODULES_CACHE=str(tmp_path / "cache"))
    # Newer versions of transformers, which have a function to hash the files, tell them apart.
    monkeypatch.setattr("megatrain.compat.transformers.remote_code", None)
    folders = {name: tmp_path / name / "brought" for name in ("one", "again", "other")}
    for name, folder in folders.items():
        llama().save_pretrained(folder)
        add_code(folder, "OTHER = True" if name == "other" else "")
    for name in ("one", "again"):
        engine_of(model=folders[name], trust_remote_code=True)
    with pytest.raises(InputError, match="other code than an earlier folder named brought"):
        engine_of(model=folders["other"], trust_remote_code=True)
