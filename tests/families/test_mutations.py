"""One thing changed by a user's own code: trained as plain torch trains it, or refused by name."""

import pytest
import torch
from torch import nn

from megatrain import AdamW, Engine, Placement
from megatrain.errors import InputError, RunFailed
from megatrain.model.rebuilt import emptied
from tests.families.mutations import (
    LAYERS,
    MUTATIONS,
    NEUTRAL,
    OUTSIDE,
    STATES,
    extended,
)
from tests.families.plain import EPS, LR, make_steps, plain_training, train_in_place
from tests.families.tiny import tiny_config, tiny_model
from tests.sweeps import few

FAMILIES = ["llama", "qwen3_moe", "gpt2", "mamba", "gemma3_text", "deepseek_v3", "bamba"]
LOSS_TOLERANCE, UPDATE_TOLERANCE = 1e-6, 1e-3
VISIBLE = 1e-5  # of the loss, that a change must make in plain training

# Tokens of the head's chunks are fewer than a row's, and everything is computed again.
PLACEMENT = Placement(head_tokens=5, layer_inputs="host")

# What a message must say, of a llama.
REFUSED = {
    "a forward of its own": "q_proj has a forward of its own, which is not supported: remove it",
    "a hook after a layer": r"model\.layers\.1 has a hook",
    "a hook before a part": "q_proj has a hook",
    "a backward hook": r"model\.layers\.1 has a hook",
    "a hook after the head": "lm_head has a hook, .* let a subclass of Linear do what it does",
    "a hook before the trunk": "model has a hook",
    "a forward of the trunk's own": "model has a forward of its own",
    "another layer's part in a list": "model.layers.1 holds model.layers.0.self_attn.q_proj",
    "a part that is not registered": "q_proj.other holds a weight",
    "a view of a weight": "q_proj.weight has the memory of .*q_proj.view",
    "a weight of another layer": "is the same parameter as",
    "a part in fp64": "q_proj.weight is torch.float64",
    "a hook of a weight's gradient": "q_proj.weight has a hook of its gradient",
    "a hook of a gradient that is there": "q_proj.weight has a hook of its gradient",
    "spectral_norm": "changes its buffer self_attn.q_proj.parametrizations.weight.0._u",
    "a counter": "changes model.layers.1.self_attn.q_proj.calls",
    "a counter in an object": "changes model.layers.1.self_attn.q_proj.calls",
    "a counter in a buffer": "changes its buffer self_attn.q_proj.calls",
    "a counter in a closure": "changes model.layers.1.self_attn.q_proj.calls",
    "Python's random numbers": "random numbers from Python's",
    "a hook of every module": "a hook of every module",
    "a hook of the table's gradient": "embed_tokens.weight has a hook of its gradient",
    "a counter in the embedding": "changes model.embed_tokens.calls",
    "a buffer that the embedding counts in": "changes model.embed_tokens.calls",
    "a buffer that the norm counts in": "changes model.norm.calls",
    "a buffer that the head counts in": "logits from other tokens",
    "an object that the norm counts in": "changes model.norm.calls",
    "a closure that the head counts in": "logits from other tokens",
    "a running mean in the norm": "changes model.norm.mean",
    "a head that mixes tokens": "logits from other tokens",
    "a head that counts positions": "or from its place",
    "an embedding with max_norm": "max_norm=0.5",
    "an embedding with scale_grad_by_freq": "scale_grad_by_freq=True",
    "an embedding with sparse gradients": "sparse=True",
    "spectral_norm of the head": "changes lm_head.parametrizations.weight.0._u",
}

# Each was trained to other numbers once, or broke off with an error of torch's.
QUICK = [
    "an attribute of another type",
    "the sign of a zero",
    "a list with attributes",
    "a method of another self",
    "a default by name",
    "an attribute of a function",
    "a number by getattr",
    "a number in the dictionary",
    "a weight used twice",
    "a norm that counts positions",
    "weight_norm of the head",
    "gradient checkpointing of old",
]


@pytest.fixture(autouse=True)
def no_global_hooks():
    yield
    nn.modules.module._global_forward_hooks.clear()


def changed(family, name):
    model = tiny_model(family)
    MUTATIONS[name](model)
    return model


def streamed(model, steps):
    settings = AdamW(lr=LR, eps=EPS)
    options = {"precision": "fp32", "device": "cpu", "placement": PLACEMENT, "saveable": False}
    with Engine(model, optimizer=settings, **options) as engine:
        return [engine.step(step).loss for step in steps], dict(engine.named_masters())


def check(family, name, steps, model):
    """Train a changed model both ways; the caller sees to refusals."""
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, masters = streamed(model, steps)
    plain = train_in_place(changed(family, name), steps)
    assert losses == pytest.approx(plain.losses, rel=LOSS_TOLERANCE)
    assert masters.keys() == plain.parameters.keys()
    for key, wanted in plain.parameters.items():
        error = float((masters[key].double() - wanted.double()).norm())
        assert error <= UPDATE_TOLERANCE * float((wanted - start[key]).norm()), key
    return plain


@pytest.mark.parametrize("name", few(QUICK, *range(0, len(QUICK), 3)))
def test_a_change_is_trained(name):
    model = changed("llama", name)
    check("llama", name, make_steps(model.config)[:2], model)


def test_weights_that_are_divided_by_are_trained():
    """The structure is found out with zeros, of which a norm of weights makes NaN."""
    check(
        "gpt2",
        "weight_norm",
        make_steps(tiny_model("gpt2").config)[:1],
        changed("gpt2", "weight_norm"),
    )


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_is_refused_by_name(name):
    with pytest.raises(InputError, match=REFUSED[name]) as caught:
        Engine(
            changed("llama", name),
            optimizer=AdamW(),
            precision="fp32",
            device="cpu",
            saveable=False,
        )
    assert "\n" not in str(caught.value)


ON_META = {
    "an attribute": lambda m: setattr(m.model.layers[1].self_attn, "scaling", 2.0),
    "a class": lambda m: extended(m.model.layers[1], lambda self, output: output),
    "a head": lambda m: setattr(m, "lm_head", nn.Linear(32, 200, bias=False, device="meta")),
}


@pytest.mark.parametrize("change", ON_META.values(), ids=ON_META)
def test_a_changed_model_without_memory_is_refused(change):
    """It is made anew of its configuration, which knows nothing of the change."""
    with torch.device("meta"):
        model = type(tiny_model("llama"))(tiny_config("llama"))
    emptied(model)
    change(model)
    with pytest.raises(InputError, match="not as LlamaForCausalLM makes it") as caught:
        emptied(model)
    assert "\n" not in str(caught.value)


def test_a_number_that_is_read_later_breaks_the_step_off():
    """The structure is found out on short rows; nothing may be guessed after that."""
    model = tiny_model("llama")

    def read(part, output):
        return output * (1 + part.layer_idx) if output.shape[1] > 8 else output

    for layer in model.model.layers:
        extended(layer.mlp.down_proj, read)
        layer.mlp.down_proj.layer_idx = 1
    cls = type(model.model.layers[0].mlp.down_proj)
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = cls
    ids = torch.arange(9)[None]
    with (
        Engine(model, optimizer=AdamW(), precision="fp32", device="cpu", saveable=False) as engine,
        pytest.raises(RunFailed, match="reads its layer_idx, which it did not"),
    ):
        engine.step([{"input_ids": ids, "labels": ids}])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_change_of_every_family(family, name):
    """Right or refused, never other numbers; and each change does change plain training."""
    steps, model = make_steps(tiny_model(family).config), changed(family, name)
    try:
        plain = check(family, name, steps, model)
    except InputError as refusal:
        assert "\n" not in str(refusal)
        assert family != "llama" or name in REFUSED
        return
    assert name not in REFUSED or family != "llama"
    usual = plain_training(tiny_model(family), steps)
    moved = max(abs(a - b) / b for a, b in zip(plain.losses, usual.losses, strict=True))
    # Of a norm's weight it changes next to nothing.
    if name != "weight_norm" or family == "llama":
        assert (moved > VISIBLE) == (name not in NEUTRAL), moved


def test_names():
    assert {*STATES, *LAYERS, *OUTSIDE} >= {*REFUSED, *QUICK, *NEUTRAL}
