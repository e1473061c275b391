"""Changes to one thing of one layer, or outside of the layers, that a user's own code may make.

Each takes a model and changes it in place. What layers of a stack do is made to depend on what is
changed by a `Scaled` part: their first leaf, its result multiplied by a factor.
"""

import functools
import random
import types
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import PreTrainedModel

from megatrain.model.probe import find_stacks

Change = Callable[[PreTrainedModel], Any]


def tilted(x: Tensor, factor: Any = 1.5) -> Tensor:
    """Multiplied by a factor on average, in a way that no norm undoes."""
    return x * (1 + (factor - 1) * torch.linspace(0.5, 1.5, x.shape[-1]))


def stack(model: PreTrainedModel) -> nn.ModuleList:
    return find_stacks(model)[0][1]


def leaf(layer: nn.Module) -> Any:
    """The layer's first part that has weights and no parts of its own."""
    return next(m for m in layer.modules() if not [*m.children()] and [*m.parameters()])


def norm(model: PreTrainedModel) -> Any:
    """What comes last before the head."""
    inside = {id(m) for layer in stack(model) for m in layer.modules()}
    edges = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    found = [
        m
        for m in model.modules()
        if not [*m.children()] and [*m.parameters()] and id(m) not in inside | edges
    ]
    return found[-1]


def first_field(output: Any) -> Any:
    """What a trunk returns, its hidden states changed."""
    return type(output)(last_hidden_state=output.last_hidden_state * 1.5)


def trunk(model: PreTrainedModel) -> Any:
    return model.base_model


def method(module: nn.Module, function: Callable[..., Any]) -> None:
    """Give a module a forward of its own: `function(module, *args)`."""
    module.forward = types.MethodType(function, module)


def extended(module: nn.Module, change: Callable[..., Any]) -> None:
    """Let a module's class give `change(module, output)`, by a class of its own."""
    base = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(self, base.forward(self, *args, **kwargs))

    module.__class__ = type(f"Extended{base.__name__}", (base,), {"forward": forward})


def first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a layer returns, its hidden states changed."""
    return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])


def scaled(read: Callable[[Any], Any], usual: Any, other: Any) -> Change:
    """All layers' leaves give `read(leaf)` times as much; `state` is `usual`, in one `other`.

    Both are functions that make the state.
    """

    def change(model: PreTrainedModel) -> None:
        classes: dict[type, type] = {}
        for index, layer in enumerate(stack(model)):
            part = leaf(layer)
            base = type(part)
            if base not in classes:

                def forward(self: Any, x: Tensor, base: Any = base) -> Tensor:
                    return tilted(base.forward(self, x), read(self))

                classes[base] = type(f"Scaled{base.__name__}", (base,), {"forward": forward})
            part.__class__ = classes[base]
            part.state = other(part) if index == 1 else usual(part)

    return change


def _factor(value: float) -> Callable[[Any], Any]:
    return lambda part: value


@dataclass
class Factor:
    """Settings of a user's own."""

    value: float

    def __call__(self) -> float:
        return self.value

    def read(self) -> float:
        return self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


class FactorList(list):
    """A list with more to it."""

    def __init__(self, more: float) -> None:
        super().__init__([1.0])
        self.more = more


def _closure(value: float) -> Callable[[], float]:
    return lambda: value


def _default(value: float) -> Callable[[], float]:
    def function(value: float = value) -> float:
        return value

    return function


def _keyword(value: float) -> Callable[[], float]:
    def function(*, value: float = value) -> float:
        return value

    return function


def _function_attribute(value: float) -> Callable[[], float]:
    def function() -> float:
        return function.value  # type: ignore[attr-defined]

    function.value = value  # type: ignore[attr-defined]
    return function


def _buffer(value: float) -> Callable[[Any], Any]:
    def make(part: Any) -> str:
        part.register_buffer("factor", torch.full((1,), value))
        return "factor"

    return make


def _numbered(model: PreTrainedModel, read: Callable[[Any], Any]) -> None:
    scaled(read, _factor(0), _factor(0))(model)
    for index, layer in enumerate(stack(model)):
        leaf(layer).layer_idx = index


def _in_state(made: Callable[[float], Any], read: Callable[[Any], Any]) -> Change:
    return scaled(lambda part: read(part.state), lambda part: made(1.0), lambda part: made(1.5))


def _called(made: Callable[[float], Any]) -> Change:
    return _in_state(made, lambda state: state())


# What a layer's forward reads that is neither a weight nor a number of its own.
STATES: dict[str, Change] = {
    "an attribute": _in_state(lambda v: v, lambda s: s),
    "an attribute of another type": scaled(
        lambda part: 1.5 if isinstance(part.state, bool) else 1.0, _factor(1), _factor(True)
    ),
    "the sign of a zero": scaled(
        lambda part: 1.5 if str(part.state)[0] == "-" else 1.0, _factor(0.0), _factor(-0.0)
    ),
    "a list in a dictionary": _in_state(lambda v: {"a": [0, v]}, lambda s: s["a"][1]),
    "a list with attributes": _in_state(FactorList, lambda s: s.more),
    "an object": _in_state(Factor, lambda s: s.value),
    "an object with slots": _in_state(Slotted, lambda s: s.value),
    "a callable object": _called(Factor),
    "a method of another self": _called(lambda v: Factor(v).read),
    "a closure": _called(_closure),
    "a default": _called(_default),
    "a default by name": _called(_keyword),
    "an attribute of a function": _called(_function_attribute),
    "a partial": _called(lambda v: functools.partial(float, v)),
    "a partial of a closure": _called(lambda v: functools.partial(_closure(v))),
    "a partial activation": scaled(
        lambda part: part.state(torch.tensor(-1.0)),
        lambda part: functools.partial(F.leaky_relu, negative_slope=-1.0),
        lambda part: functools.partial(F.leaky_relu, negative_slope=-1.5),
    ),
    "a tensor": _in_state(lambda v: torch.full((1,), v), lambda s: s),
    "a large tensor": _in_state(lambda v: torch.full((1 << 15,), v), lambda s: s[-1]),
    "a buffer": scaled(lambda part: part.factor, _buffer(1.0), _buffer(1.5)),
    "a number by getattr": lambda m: _numbered(
        m, lambda part: 1.5 if getattr(part, "layer_idx", None) == 1 else 1.0
    ),
    "a number by hasattr": lambda m: _numbered(
        m, lambda part: 1.0 + (part.layer_idx if hasattr(part, "layer_idx") else 0)
    ),
    "a number in the dictionary": lambda m: _numbered(
        m, lambda part: 1.5 if part.__dict__.get("layer_idx") == 1 else 1.0
    ),
}


def _own_config(model: PreTrainedModel) -> None:
    scaled(lambda part: part.state.factor, lambda p: model.config, lambda p: copy(model.config))(
        model
    )
    model.config.factor = 1.0
    leaf(stack(model)[1]).state.factor = 1.5


def _own_class(model: PreTrainedModel) -> None:
    extended(stack(model)[1], lambda self, output: first(output, tilted))


def _borrowed(model: PreTrainedModel) -> None:
    """A layer that adds what another's part makes."""
    layers = stack(model)
    other = [leaf(layers[0])]
    part = leaf(layers[1])
    part.other = other
    extended(part, lambda self, output: output * (1 + self.other[0].weight.mean()))


def _unregistered(model: PreTrainedModel) -> None:
    part = leaf(stack(model)[1])
    part.other = [nn.Linear(1, 1)]
    extended(part, lambda self, output: output * (2 + self.other[0](torch.ones(1))))


def _view(model: PreTrainedModel) -> None:
    """A view of a weight, which training changes together with it."""
    part = leaf(stack(model)[1])
    part.register_buffer("view", part.weight.detach()[:1], persistent=False)
    extended(part, lambda self, output: output * (2 + self.view.mean()))


def _tied_inside(model: PreTrainedModel) -> None:
    for index, layer in enumerate(stack(model)):
        part = leaf(layer)
        other = part.weight if index == 1 else nn.Parameter(part.weight.detach().clone())
        part.register_parameter("other", other)
        extended(part, lambda self, output: tilted(output, 2 + self.other.mean()))
    cls = type(leaf(stack(model)[0]))
    for layer in stack(model):
        leaf(layer).__class__ = cls


def _tied_between(model: PreTrainedModel) -> None:
    leaf(stack(model)[1]).weight = leaf(stack(model)[0]).weight


def _wide(model: PreTrainedModel) -> None:
    part = leaf(stack(model)[1])
    part.double()
    extended(part, lambda self, output: output.float())


def _counting(module: nn.Module, step: Callable[[Any], float]) -> None:
    extended(module, lambda self, output: first(output, lambda h: h * step(self)))


def _step_attribute(self: Any) -> float:
    self.calls = getattr(self, "calls", 0) + 1
    return 1 + 0.1 * self.calls


def _step_object(self: Any) -> float:
    self.calls.value += 1
    return 1 + 0.1 * self.calls.value


def _step_buffer(self: Any) -> Any:
    self.calls += 1
    return 1 + 0.1 * self.calls


def _count_object(module: nn.Module) -> None:
    module.calls = Factor(0)
    _counting(module, _step_object)


def _count_buffer(module: nn.Module) -> None:
    module.register_buffer("calls", torch.zeros(1))
    _counting(module, _step_buffer)


def _count_list(module: nn.Module) -> None:
    calls: list[int] = []

    def step() -> float:
        calls.append(1)
        return 1 + 0.1 * len(calls)

    module.calls = step
    _counting(module, lambda self: self.calls())


def _skipping(model: PreTrainedModel) -> None:
    random.seed(0)
    part = leaf(stack(model)[1])
    extended(part, lambda self, output: output * (1 + (random.random() < 0.5)))


def after(module: nn.Module) -> None:
    module.register_forward_hook(lambda m, args, output: first(output, tilted))


def before(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda m, args: (tilted(args[0]), *args[1:]))


def backward(module: nn.Module) -> None:
    module.register_full_backward_hook(
        lambda m, given, out: tuple(None if g is None else g * 1.5 for g in given)
    )


def _gradient(parameter: nn.Parameter) -> None:
    parameter.register_hook(lambda gradient: gradient * 1.5)


def _accumulated(parameter: nn.Parameter) -> None:
    def hook(parameter: Tensor) -> None:
        parameter.grad.mul_(1.5)

    parameter.register_post_accumulate_grad_hook(hook)


LAYERS: dict[str, Change] = {
    "a class of its own": _own_class,
    "a forward of its own": lambda m: method(
        leaf(stack(m)[1]), lambda self, x: tilted(type(self).forward(self, x))
    ),
    "another layer's part in a list": _borrowed,
    "a part that is not registered": _unregistered,
    "a view of a weight": _view,
    "a weight used twice": _tied_inside,
    "a weight of another layer": _tied_between,
    "a part in fp64": _wide,
    "a configuration of its own": _own_config,
    "a hook after a layer": lambda m: after(stack(m)[1]),
    "a hook before a part": lambda m: before(leaf(stack(m)[1])),
    "a backward hook": lambda m: backward(stack(m)[1]),
    "a hook of a weight's gradient": lambda m: _gradient(leaf(stack(m)[1]).weight),
    "a hook of a gradient that is there": lambda m: _accumulated(leaf(stack(m)[1]).weight),
    "weight_norm": lambda m: parametrizations.weight_norm(leaf(stack(m)[1])),
    "spectral_norm": lambda m: parametrizations.spectral_norm(leaf(stack(m)[1])),
    "a counter": lambda m: _counting(leaf(stack(m)[1]), _step_attribute),
    "a counter in an object": lambda m: _count_object(leaf(stack(m)[1])),
    "a counter in a buffer": lambda m: _count_buffer(leaf(stack(m)[1])),
    "a counter in a closure": lambda m: _count_list(leaf(stack(m)[1])),
    "Python's random numbers": _skipping,
}


def _mixing_head(model: PreTrainedModel) -> None:
    extended(model.get_output_embeddings(), lambda self, out: out + 0.5 * out.roll(1, 1))


def _placed_head(model: PreTrainedModel) -> None:
    extended(
        model.get_output_embeddings(),
        lambda self, out: out * (1 + torch.arange(out.shape[1])[:, None] / 10),
    )


def _mixing_norm(model: PreTrainedModel) -> None:
    extended(norm(model), lambda self, out: out.cumsum(1))


def _placed_norm(model: PreTrainedModel) -> None:
    extended(norm(model), lambda self, out: out * (1 + torch.arange(out.shape[1])[:, None] / 10))


def _running_mean(model: PreTrainedModel) -> None:
    part = norm(model)
    part.register_buffer("mean", torch.zeros(1))

    def forward(self: Any, out: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * out.detach().mean())
        return out - self.mean

    extended(part, forward)


def _table(**settings: Any) -> Change:
    def change(model: PreTrainedModel) -> None:
        table = model.get_input_embeddings()
        for name, value in settings.items():
            setattr(table, name, value)

    return change


def _every_module(model: PreTrainedModel) -> Any:
    """Returns what ends it."""
    ids = {id(module) for module in stack(model)[1].modules()}

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 1.5 if type(module).__name__ in NORMS and id(module) in ids else None

    return nn.modules.module.register_module_forward_hook(hook)


NORMS = ("LlamaRMSNorm", "Qwen3MoeRMSNorm", "LayerNorm", "MambaRMSNorm", "Gemma3RMSNorm")


def _kept(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable()


def _kept_the_old_way(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def _looked_at(model: PreTrainedModel) -> None:
    """transformers puts hooks on a model that is asked for its hidden states."""
    with torch.no_grad():
        model(torch.arange(4)[None], output_hidden_states=True)


OUTSIDE: dict[str, Change] = {
    "a hook of every module": _every_module,
    "a hook after the head": lambda m: after(m.get_output_embeddings()),
    "a hook before the trunk": lambda m: trunk(m).register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "input_ids": kwargs["input_ids"] + 1}),
        with_kwargs=True,
    ),
    "a hook of the table's gradient": lambda m: _gradient(m.get_input_embeddings().weight),
    "a forward of the trunk's own": lambda m: method(
        trunk(m),
        lambda self, *args, **rest: first_field(type(self).forward(self, *args, **rest)),
    ),
    "a counter in the embedding": lambda m: _counting(m.get_input_embeddings(), _step_attribute),
    "a buffer that the embedding counts in": lambda m: _count_buffer(m.get_input_embeddings()),
    "a buffer that the norm counts in": lambda m: _count_buffer(norm(m)),
    "a buffer that the head counts in": lambda m: _count_buffer(m.get_output_embeddings()),
    "an object that the norm counts in": lambda m: _count_object(norm(m)),
    "a closure that the head counts in": lambda m: _count_list(m.get_output_embeddings()),
    "a running mean in the norm": _running_mean,
    "a head that mixes tokens": _mixing_head,
    "a head that counts positions": _placed_head,
    "a norm that mixes tokens": _mixing_norm,
    "a norm that counts positions": _placed_norm,
    "an embedding with max_norm": _table(max_norm=0.5),
    "an embedding with scale_grad_by_freq": _table(scale_grad_by_freq=True),
    "an embedding with sparse gradients": _table(sparse=True),
    "weight_norm of the head": lambda m: parametrizations.weight_norm(m.get_output_embeddings()),
    "spectral_norm of the head": lambda m: parametrizations.spectral_norm(
        m.get_output_embeddings()
    ),
    "gradient checkpointing": _kept,
    "gradient checkpointing of old": _kept_the_old_way,
    "hidden states looked at before": _looked_at,
}

MUTATIONS: dict[str, Change] = {**STATES, **LAYERS, **OUTSIDE}

# Of these plain training gives the same as without: they must not show.
NEUTRAL = {
    "gradient checkpointing",
    "gradient checkpointing of old",
    "hidden states looked at before",
}
