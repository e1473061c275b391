"""One thing changed by a user's own code: trained as plain torch trains it, or refused by name.

Each change takes a model and changes one thing of one layer, or outside of the layers, in place.
"""

import functools
import random
import re
import types
from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import LlamaModel

from megatrain import AdamW, Engine, InputError, Placement, RunFailed
from megatrain.base.changed import changed as changing
from megatrain.model.probe import find_stacks
from megatrain.model.rebuilt import emptied
from tests.families.plain import EPS, LR, make_steps, plain_training, train_in_place
from tests.families.tiny import tiny_config, tiny_model
from tests.refusals import refused

FAMILIES = ["llama", "qwen3_moe", "gpt2", "mamba", "gemma3_text", "deepseek_v3", "bamba"]
LOSS_TOLERANCE, UPDATE_TOLERANCE = 1e-6, 1e-3
VISIBLE = 1e-5  # of the loss, that a change must make in plain training

# Tokens of the head's chunks are fewer than a row's, and everything is computed again.
PLACEMENT = Placement(head_tokens=5, layer_inputs="host")


def tilted(x, factor=1.5):
    """Multiplied by a factor on average, in a way that no norm undoes."""
    return x * (1 + (factor - 1) * torch.linspace(0.5, 1.5, x.shape[-1]))


def stack(model):
    return next(iter(find_stacks(model).values()))


def leaf(layer):
    """The layer's first part that has weights and no parts of its own."""
    return next(m for m in layer.modules() if not [*m.children()] and [*m.parameters()])


def part(model):
    return leaf(stack(model)[1])


def table(model):
    return model.get_input_embeddings()


def head(model):
    return model.get_output_embeddings()


def norm(model):
    """What comes last before the head."""
    inside = {m for layer in stack(model) for m in layer.modules()} | {table(model), head(model)}
    leaves = [m for m in model.modules() if not [*m.children()] and [*m.parameters()]]
    return [m for m in leaves if m not in inside][-1]


def extended(module, change):
    """Let a module's class give `change(module, output)`, by a class of its own."""
    base = type(module)

    def forward(self, *args, **kwargs):
        return change(self, base.forward(self, *args, **kwargs))

    module.__class__ = type(f"Extended{base.__name__}", (base,), {"forward": forward})


def extended_alike(modules, change):
    """As `extended`, each kind of module by one class."""
    classes: dict[type, type] = {}
    for module in modules:
        base = type(module)
        if base not in classes:
            extended(module, change)
            classes[base] = type(module)
        module.__class__ = classes[base]


def first(output, change):
    """What a module returns, its hidden states changed."""
    return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])


def state(read: Callable[[Any], Any], made: Callable[[float], Any]):
    """All layers' leaves give `read(leaf)` times as much; their `state` is `made(1.0)`, or 1.5."""

    def change(model):
        leaves = [leaf(layer) for layer in stack(model)]
        extended_alike(leaves, lambda self, output: tilted(output, read(self)))
        for index, each in enumerate(leaves):
            each.layer_idx, each.state = index, made(1.5 if index == 1 else 1.0)

    return change


def read(part):
    return part.state


def call(part):
    return part.state()


class Factor:
    def __init__(self, value):
        self.value = value

    def read(self):
        return self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class FactorList(list):
    def __init__(self, more):
        super().__init__([1.0])
        self.more = more


def function_attribute(value):
    def function():
        return function.value  # type: ignore[attr-defined]

    function.value = value  # type: ignore[attr-defined]
    return function


def buffer(model):
    leaves = [leaf(layer) for layer in stack(model)]
    extended_alike(leaves, lambda self, output: tilted(output, self.factor))
    for index, each in enumerate(leaves):
        each.register_buffer("factor", torch.full((1,), 1.5 if index == 1 else 1.0))


# What a layer's forward reads that is neither a weight nor a number of its own. All are trained.
STATES: dict[str, Callable[[Any], Any]] = {
    "an attribute": state(read, lambda v: v),
    "an attribute of another type": state(
        lambda p: 1.5 if isinstance(p.state, bool) else 1.0, lambda v: True if v > 1 else 1
    ),
    "the sign of a zero": state(
        lambda p: 1.5 if str(p.state)[0] == "-" else 1.0, lambda v: -0.0 if v > 1 else 0.0
    ),
    "a list in a dictionary": state(lambda p: p.state["a"][1], lambda v: {"a": [0, v]}),
    "a list with attributes": state(lambda p: p.state.more, FactorList),
    "an object": state(lambda p: p.state.value, Factor),
    "an object with slots": state(lambda p: p.state.value, Slotted),
    "a method of another self": state(call, lambda v: Factor(v).read),
    "a closure": state(call, lambda v: lambda: v),
    "a default": state(call, lambda v: lambda value=v: value),
    "a default by name": state(call, lambda v: lambda *, value=v: value),
    "an attribute of a function": state(call, function_attribute),
    "a partial": state(call, lambda v: functools.partial(float, v)),
    "a partial activation": state(
        lambda p: p.state(torch.tensor(-1.0)),
        lambda v: functools.partial(F.leaky_relu, negative_slope=-v),
    ),
    "a tensor": state(read, lambda v: torch.full((1,), v)),
    "a buffer": buffer,
    "a number by getattr": state(
        lambda p: 1.5 if getattr(p, "layer_idx", None) == 1 else 1.0, lambda v: 0
    ),
    "a number by hasattr": state(
        lambda p: 1.0 + (p.layer_idx if hasattr(p, "layer_idx") else 0), lambda v: 0
    ),
    "a number in the dictionary": state(
        lambda p: 1.5 if p.__dict__.get("layer_idx") == 1 else 1.0, lambda v: 0
    ),
}


def own_config(model):
    state(lambda p: p.state.factor, lambda v: copy(model.config) if v > 1 else model.config)(model)
    model.config.factor = 1.0
    part(model).state.factor = 1.5


def own_forward(module, change=tilted):
    function = type(module).forward
    module.forward = types.MethodType(lambda self, *a, **k: change(function(self, *a, **k)), module)


def first_field(output):
    """What a trunk returns, its hidden states changed."""
    return type(output)(last_hidden_state=output.last_hidden_state * 1.5)


def borrowed(model):
    """A layer that adds what another's part makes."""
    part(model).other = [leaf(stack(model)[0])]
    extended(part(model), lambda self, output: output * (1 + self.other[0].weight.mean()))


def unregistered(model):
    part(model).other = [nn.Linear(1, 1)]
    extended(part(model), lambda self, output: output * (2 + self.other[0](torch.ones(1))))


def view(model):
    """A view of a weight, which training changes together with it."""
    part(model).register_buffer("view", part(model).weight.detach()[:1], persistent=False)
    extended(part(model), lambda self, output: output * (2 + self.view.mean()))


def tied_inside(model):
    leaves = [leaf(layer) for layer in stack(model)]
    for index, each in enumerate(leaves):
        other = each.weight if index == 1 else nn.Parameter(each.weight.detach().clone())
        each.register_parameter("other", other)
    extended_alike(leaves, lambda self, output: tilted(output, 2 + self.other.mean()))


def wide(model):
    part(model).double()
    extended(part(model), lambda self, output: output.float())


def counting(module, step):
    extended(module, lambda self, output: first(output, lambda h: h * (1 + 0.1 * step(self))))


def counter(module):
    def step(self):
        self.calls = getattr(self, "calls", 0) + 1
        return self.calls

    counting(module, step)


def count_in_object(module):
    def step(self):
        self.calls.value += 1
        return self.calls.value

    module.calls = Factor(0)
    counting(module, step)


def count_in_buffer(module):
    def step(self):
        self.calls += 1
        return self.calls

    module.register_buffer("calls", torch.zeros(1))
    counting(module, step)


def drawing_elsewhere(model):
    generator = torch.Generator().manual_seed(0)
    extended(part(model), lambda self, x: x * (1 + torch.rand(x.shape, generator=generator)))


@torch.compile(backend="eager")
def compiled(x):
    return x * (1 + x.tanh())


def tied_to_a_layer(model):
    shape = norm(model).weight.shape
    norm(model).weight = next(p for p in stack(model)[1].parameters() if p.shape == shape)


def skipping(model):
    random.seed(0)
    extended(part(model), lambda self, output: output * (1 + (random.random() < 0.5)))


def by_place(module):
    extended(module, lambda self, out: out * (1 + torch.arange(out.shape[1])[:, None] / 10))


def after(module):
    module.register_forward_hook(lambda m, args, output: first(output, tilted))


def before(module):
    module.register_forward_pre_hook(lambda m, args: (tilted(args[0]), *args[1:]))


def before_trunk(module):
    def hook(module, args, kwargs):
        return args, {**kwargs, "input_ids": kwargs["input_ids"] + 1}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def backward(module):
    module.register_full_backward_hook(
        lambda m, given, out: tuple(None if g is None else g * 1.5 for g in given)
    )


def of_every_module(model):
    norms = ("LlamaRMSNorm", "Qwen3MoeRMSNorm", "LayerNorm", "MambaRMSNorm", "Gemma3RMSNorm")
    inside = {*stack(model)[1].modules()}

    def hook(module, args, output):
        return output * 1.5 if type(module).__name__ in norms and module in inside else None

    nn.modules.module.register_module_forward_hook(hook)


def table_with(**settings):
    return lambda model: vars(table(model)).update(settings)


def checkpointed_the_old_way(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def looked_at(model):
    """transformers puts hooks on a model that is asked for its hidden states."""
    with torch.no_grad():
        model(torch.arange(4)[None], output_hidden_states=True)


# Of what the model is changed by, and what the refusal says of a llama; None: it is trained.
CHANGES: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    **{name: (change, None) for name, change in STATES.items()},
    "a class of its own": (
        lambda m: extended(stack(m)[1], lambda self, output: first(output, tilted)), None,
    ),
    "a forward of its own": (
        lambda m: own_forward(part(m)),
        "q_proj has a forward of its own, which is not supported: remove it",
    ),
    "another layer's part in a list": (
        borrowed, "model.layers.1 holds model.layers.0.self_attn.q_proj",
    ),
    "a part that is not registered": (unregistered, "q_proj.other holds a weight"),
    "a view of a weight": (view, "q_proj.weight has the memory of .*q_proj.view"),
    "a weight used twice": (tied_inside, None),
    "a weight of another layer": (
        lambda m: setattr(part(m), "weight", leaf(stack(m)[0]).weight), "is the same parameter as",
    ),
    "a layer twice": (
        lambda m: stack(m).__setitem__(2, stack(m)[1]), "a layer is in model.layers twice",
    ),
    "a norm with a layer's weight": (tied_to_a_layer, "model.norm.weight is the same parameter as"),
    "another name of the norm": (lambda m: setattr(m, "other", norm(m)), None),
    "a compiled function in a layer": (
        lambda m: extended(part(m), lambda self, output: compiled(output)), None,
    ),
    "a compiled function of the embedding": (
        lambda m: extended(table(m), lambda self, output: compiled(output)), None,
    ),
    "a generator of its own": (drawing_elsewhere, "random numbers from a generator of its own"),
    "a part in fp64": (wide, "q_proj.weight is torch.float64"),
    "a configuration of its own": (own_config, None),
    "a hook after a layer": (lambda m: after(stack(m)[1]), r"model\.layers\.1 has a hook"),
    "a hook before a part": (lambda m: before(part(m)), "q_proj has a hook"),
    "a backward hook": (lambda m: backward(stack(m)[1]), r"model\.layers\.1 has a hook"),
    "a hook of a weight's gradient": (
        lambda m: part(m).weight.register_hook(lambda gradient: gradient * 1.5),
        "q_proj.weight has a hook of its gradient",
    ),
    "a hook of a gradient that is there": (
        lambda m: part(m).weight.register_post_accumulate_grad_hook(lambda w: w.grad.mul_(1.5)),
        "q_proj.weight has a hook of its gradient",
    ),
    "weight_norm": (lambda m: parametrizations.weight_norm(part(m)), None),
    "spectral_norm": (
        lambda m: parametrizations.spectral_norm(part(m)),
        "changes its buffer self_attn.q_proj.parametrizations.weight.0._u",
    ),
    "a counter": (lambda m: counter(part(m)), "changes model.layers.1.self_attn.q_proj.calls"),
    "a counter in an object": (
        lambda m: count_in_object(part(m)), "changes model.layers.1.self_attn.q_proj.calls",
    ),
    "a counter in a buffer": (
        lambda m: count_in_buffer(part(m)), "changes its buffer self_attn.q_proj.calls",
    ),
    "Python's random numbers": (skipping, "random numbers from Python's"),
    "a hook of every module": (of_every_module, "a hook of every module"),
    "a hook after the head": (
        lambda m: after(head(m)), "lm_head has a hook, .* let a subclass of Linear do what it does",
    ),
    "a hook before the trunk": (lambda m: before_trunk(m.base_model), "model has a hook"),
    "a forward of the trunk's own": (
        lambda m: own_forward(m.base_model, first_field), "model has a forward of its own",
    ),
    "a counter in the embedding": (
        lambda m: counter(table(m)), "changes model.embed_tokens.calls",
    ),
    "a buffer that the norm counts in": (
        lambda m: count_in_buffer(norm(m)), "changes model.norm.calls",
    ),
    "a buffer that the head counts in": (
        lambda m: count_in_buffer(head(m)), "logits from other tokens",
    ),
    "a head that mixes tokens": (
        lambda m: extended(head(m), lambda self, out: out + 0.5 * out.roll(1, 1)),
        "logits from other tokens",
    ),
    "a head that counts positions": (lambda m: by_place(head(m)), "or from its place"),
    "a norm that counts positions": (lambda m: by_place(norm(m)), None),
    "an embedding with max_norm": (table_with(max_norm=0.5), "max_norm=0.5"),
    "an embedding with scale_grad_by_freq": (
        table_with(scale_grad_by_freq=True), "scale_grad_by_freq=True",
    ),
    "an embedding with sparse gradients": (table_with(sparse=True), "sparse=True"),
    "weight_norm of the head": (lambda m: parametrizations.weight_norm(head(m)), None),
    "gradient checkpointing": (lambda m: m.gradient_checkpointing_enable(), None),
    "gradient checkpointing of old": (checkpointed_the_old_way, None),
    "hidden states looked at before": (looked_at, None),
}  # fmt: skip

# Of these plain training gives the same as without: they must not show.
NEUTRAL = {
    "gradient checkpointing",
    "gradient checkpointing of old",
    "hidden states looked at before",
    "another name of the norm",
}

# With all that is refused; the rest is exhaustive. Each was trained to other numbers once. The
# structure is found out with zeros, of which a norm of weights makes NaN.
QUICK = {("llama", name) for name, (_, refusal) in CHANGES.items() if refusal}
QUICK |= {("gpt2", "weight_norm"), ("llama", "an attribute of another type")}
QUICK |= {("llama", "a method of another self"), ("llama", "a number by getattr")}
QUICK |= {("llama", "a norm that counts positions"), ("llama", "gradient checkpointing")}
QUICK |= {("llama", "another name of the norm"), ("llama", "a compiled function of the embedding")}


@pytest.fixture(autouse=True)
def no_global_hooks():
    yield
    nn.modules.module._global_forward_hooks.clear()


def changed(family, name):
    model = tiny_model(family)
    CHANGES[name][0](model)
    return model


@functools.cache
def usual(family):
    """The losses of plain training without a change."""
    model = tiny_model(family)
    return plain_training(model, make_steps(model.config)[:2]).losses


def engine_of(model):
    settings = AdamW(lr=LR, eps=EPS)
    options = {"precision": "fp32", "device": "cpu", "placement": PLACEMENT, "saveable": False}
    return Engine(model, optimizer=settings, **options)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.exhaustive])
        for case in ((family, name) for family in FAMILIES for name in CHANGES)
    ],
)
def test_a_change_is_trained_or_refused_by_name(family, name):
    """Never to other numbers; and each change does change plain training."""
    model, words = changed(family, name), CHANGES[name][1]
    try:
        engine = engine_of(model)
    except InputError as refusal:
        assert "\n" not in str(refusal)
        assert family != "llama" or (words and re.search(words, str(refusal))), refusal
        return
    assert words is None or family != "llama"
    steps = make_steps(model.config)[:2]
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with engine:
        losses, masters = [engine.step(step).loss for step in steps], dict(engine.named_masters())
    plain = train_in_place(changed(family, name), steps)
    assert losses == pytest.approx(plain.losses, rel=LOSS_TOLERANCE)
    assert masters.keys() == plain.parameters.keys()
    for key, wanted in plain.parameters.items():
        error = float((masters[key].double() - wanted.double()).norm())
        assert error <= UPDATE_TOLERANCE * float((wanted - start[key]).norm()), key
    moved = max(abs(a - b) / b for a, b in zip(plain.losses, usual(family), strict=True))
    # Of a norm's weight it changes next to nothing.
    if name != "weight_norm" or family == "llama":
        assert (moved > VISIBLE) == (name not in NEUTRAL), moved


def test_a_model_without_values_of_its_buffers_is_refused():
    with torch.device("meta"):
        model = type(tiny_model("llama"))(tiny_config("llama"))
    with refused("buffers of the model given are on the meta device"):
        emptied(model)


def test_layers_that_evaluations_alone_call_end_them():
    class Fewer(LlamaModel):
        def forward(self, *args, **kwargs):
            with changing([self.config], num_hidden_layers=3 - self.training):
                return super().forward(*args, **kwargs)

    model, ids = tiny_model("llama"), torch.arange(9)[None]
    model.model.__class__ = Fewer
    with engine_of(model) as engine, pytest.raises(RunFailed, match="calls more layers than at"):
        engine.evaluate([{"input_ids": ids, "labels": ids}])


def test_a_table_of_fewer_rows_than_tokens_is_refused():
    class WithFew(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) + self.few(ids % 7)

    model = tiny_model("llama")
    model.model.embed_tokens.few = nn.Embedding(7, model.config.hidden_size)
    model.model.embed_tokens.__class__ = WithFew
    ids = torch.arange(9)[None]
    with (
        engine_of(model) as engine,
        refused("embed_tokens.few.weight has 7 rows, and the batch has token 8"),
    ):
        engine.step([{"input_ids": ids, "labels": ids}])


def test_a_number_that_is_read_later_breaks_the_step_off():
    """The structure is found out on short rows; nothing may be guessed after that."""

    def read(part, output):
        return output * (1 + part.layer_idx) if output.shape[1] > 8 else output

    model = tiny_model("llama")
    parts = [layer.mlp.down_proj for layer in model.model.layers]
    extended_alike(parts, read)
    for each in parts:
        each.layer_idx = 1
    ids = torch.arange(9)[None]
    with (
        engine_of(model) as engine,
        pytest.raises(RunFailed, match="reads its layer_idx, which it did not"),
    ):
        engine.step([{"input_ids": ids, "labels": ids}])
