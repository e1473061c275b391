"""Refuses models that cannot be streamed, for their settings or what code has put into them."""

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from megatrain.compat.torch import (
    BACKWARD_HOOKS,
    FORWARD_HOOKS,
    buffers_of,
    has_global_hooks,
    has_gradient_hooks,
)
from megatrain.errors import Unsupported
from megatrain.model.fingerprint import Reader

_TABLE_SETTINGS = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}


def refuse_settings(config: PreTrainedConfig) -> None:
    """Refuse settings that change which layers run, or with which weights, unseen by the engine."""
    from megatrain.compat.transformers import attention_of, configs

    if "flex_attention" in {attention_of(part) for _, part in configs(config)}:
        raise Unsupported(
            "attn_implementation is flex_attention, whose block masks the engine cannot follow; "
            "take sdpa, or another one"
        )
    interval = getattr(config, "rescale_every", 0)  # of RWKV
    if 0 < interval <= config.get_text_config(decoder=True).num_hidden_layers:
        raise Unsupported(
            f"rescale_every is {interval} in the model's configuration: the forward then changes "
            "weights outside of training; set rescale_every to 0 (only fp16 needs another value)"
        )
    for name, value in layer_drops(config).items():
        if isinstance(value, float) and value > 0:
            raise Unsupported(
                f"{name} is {value} in the model's configuration: layers left out at random are "
                "not supported; set it to 0"
            )


def layer_drops(config: PreTrainedConfig) -> dict[str, Any]:
    """The shares of layers to skip by Python's random numbers, which are drawn even for 0."""
    settings = vars(config) | vars(config.get_text_config(decoder=True))
    return {name: value for name, value in settings.items() if "layerdrop" in name}


def refuse_rounding(
    types: Mapping[str, torch.dtype], gathered: Iterable[str], dtype: torch.dtype
) -> None:
    """Refuse to look up rows in `dtype` of tables that transformers keeps in float32.

    Args:
        types: of all parameters, as `from_pretrained` gives them in `dtype`.
        gathered: names of tables whose rows are looked up.
    """
    for name in gathered:
        if types.get(name, dtype).itemsize > dtype.itemsize:
            raise Unsupported(
                f"transformers computes with {name} in float32 whatever the model's dtype, and "
                "here the rows of tables would be bf16; set precision to fp32"
            )


def refuse_grad_modes(layer: nn.Module, path: str) -> None:
    """Refuse a layer's own code that asks if there are gradients: its forward runs without them."""
    kinds = {kind for module in layer.modules() for kind in type(module).__mro__}
    for kind in kinds:
        if kind.__module__.partition(".")[0] in ("torch", "transformers", "peft", "torchao"):
            continue
        for function in filter(callable, vars(kind).values()):
            names = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ())
            if asks := {"is_grad_enabled", "requires_grad"}.intersection(names):
                raise Unsupported(
                    f"in {path} the code of {kind.__name__} reads {min(asks)}: layers run without "
                    "gradients first and again with them; let it depend on self.training"
                )


def refuse_weights(model: nn.Module) -> None:
    """Refuse weights with properties that a copy without their memory would lose.

    Raises Unsupported: hooks of gradients, other types than torch's, fp64, memory that is shared.
    """
    for name, parameter in model.named_parameters():
        problem = None
        if parameter.dtype.itemsize > 4:
            problem = f"is {parameter.dtype}"
        elif type(parameter) is not nn.Parameter:
            problem = f"is a {type(parameter).__name__}"
        elif has_gradient_hooks(parameter):
            problem = "has a hook of its gradient"
        if problem is not None:
            remedy = "convert it to a plain nn.Parameter of at most 32 bits, without hooks"
            raise Unsupported(f"{name} {problem}; {remedy}")
    # A tensor with a weight's memory changes when plain training changes the weight.
    attributes = [
        (f"{path}.{name}".lstrip("."), value)
        for path, module in model.named_modules()
        for name, value in {**vars(module), **buffers_of(module)}.items()
        if isinstance(value, Tensor)
    ]
    tensors = {id(t): (n, t) for n, t in [*model.named_parameters(), *attributes]}
    spans = sorted(
        (start, end, name, isinstance(tensor, nn.Parameter))
        for name, tensor in tensors.values()
        for start, end in _span(tensor)
    )
    furthest, last, trained = 0, "", False
    for start, end, name, is_weight in spans:
        if start < furthest and (is_weight or trained):
            raise Unsupported(f"{name} has the memory of {last}; weights must not share memory")
        if end > furthest:
            furthest, last, trained = end, name, is_weight


def _span(tensor: Tensor) -> Iterator[tuple[int, int]]:
    if tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in sizes)
        yield tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def refuse_behaviour(model: nn.Module) -> None:
    """Refuse actions of modules that would happen at other times, more than once, or never."""
    if has_global_hooks():
        raise Unsupported("a hook of every module is registered with torch; remove it")
    refuse_hooks(model)
    reader = Reader(model)
    for path, module in model.named_modules():
        where = path or type(model).__name__
        for name, _ in reader.attributes(module):
            if reader.strays:
                raise Unsupported(
                    f"{where}.{name} holds a weight {list(reader.strays[0].shape)} that is not a "
                    "parameter there; register it"
                )


def refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks of modules, and forwards that are not of their classes; ours may be there."""
    for path, module in model.named_modules():
        of_module = (vars(module).get(name) or {} for name in (*FORWARD_HOOKS, *BACKWARD_HOOKS))
        hooks = [hook for registered in of_module for hook in registered.values()]
        # transformers notes hidden states by some, and lets embeddings require gradients
        hooked = not all(_is_of(hook, "transformers") for hook in hooks)
        if hooked or not _is_of(vars(module).get("forward", refuse_hooks), "megatrain"):
            raise Unsupported(
                f"{path or type(model).__name__} has a {'hook' if hooked else 'forward of its own'}"
                f", which is not supported: remove it, or let a subclass of "
                f"{type(module).__name__} do what it does"
            )


def _is_of(function: Any, package: str) -> bool:
    return str(getattr(function, "__module__", "")).startswith(f"{package}.")


def refuse_lookup(*args: Any, **kwargs: Any) -> None:
    """Refuse a call of `F.embedding`, as a table's module makes it, with such settings."""
    arguments = inspect.signature(torch.nn.functional.embedding).bind(*args, **kwargs).arguments
    for name, usual in _TABLE_SETTINGS.items():
        if arguments.get(name, usual) != usual:
            raise Unsupported(f"its forward looks up a table with {name}={arguments[name]}")


@dataclass(frozen=True)
class Change:
    """An attribute or a buffer that a forward has changed."""

    module: nn.Module
    name: str
    path: str

    def refusal(self) -> Unsupported:
        return Unsupported(
            f"its forward changes {self.path} as it runs; a model that keeps state of its own is "
            "not supported"
        )


class Watch:
    """Notices a forward that changes attributes or buffers of its own modules.

    Such a model computes something else after a batch than before it; layers that run again in
    the backward, and for every micro-batch in turn, would not see what plain training sees.
    """

    def __init__(self, module: nn.Module, path: str, but: Collection[nn.Module] = ()) -> None:
        """Args: `but`: modules to ignore, which do not run."""
        self.module, self.path = module, path
        self._but = {id(part) for left in but for part in left.modules()}
        self.before = dict(self._state())

    def changes(self) -> list[Change]:
        """Attributes and buffers that are new or differ from the start."""
        modules = dict(self.module.named_modules())
        return [
            Change(modules[path], name, ".".join(filter(None, (self.path, path, name))))
            for (path, name), value in self._state()
            if self.before.get((path, name)) != value
        ]

    def _state(self) -> Iterator[tuple[tuple[str, str], Any]]:
        reader = Reader(self.module, by_identity=True)
        for path, module in self.module.named_modules():
            if id(module) in self._but:
                continue
            for name, value in reader.attributes(module):
                yield (path, name), value
            for name, buffer in buffers_of(module).items():
                yield (path, name), reader.of(buffer)
