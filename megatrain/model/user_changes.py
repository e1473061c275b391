"""Refuses what a user's own code has put into a model and cannot be streamed."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.compat.torch import (
    BACKWARD_HOOKS,
    FORWARD_HOOKS,
    buffers_of,
    has_global_hooks,
    has_gradient_hooks,
)
from megatrain.model.fingerprint import Reader
from megatrain.model.unsupported import Unsupported

_TABLE_SETTINGS = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}


def refuse_weights(model: nn.Module) -> None:
    """Refuse weights that a copy without their memory would lose something of.

    Raises:
        Unsupported: hooks of gradients, other types than torch's, fp64, memory that is shared.
    """
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            raise Unsupported(
                f"{name} has a hook of its gradient, which would not be run; remove it"
            )
        if type(parameter) is not nn.Parameter:
            raise Unsupported(
                f"{name} is a {type(parameter).__name__}; only plain nn.Parameter are supported"
            )
        if parameter.dtype.itemsize > 4:
            raise Unsupported(
                f"{name} is {parameter.dtype}, but masters are fp32; convert the model first"
            )
    # A tensor with a weight's memory changes when plain training changes the weight.
    others = [
        (f"{path}.{name}".lstrip("."), value)
        for path, module in model.named_modules()
        for name, value in {**vars(module), **buffers_of(module)}.items()
        if isinstance(value, Tensor)
    ]
    tensors = {id(t): (n, t) for n, t in [*model.named_parameters(), *others]}
    spans = sorted(
        (start, end, name, isinstance(tensor, nn.Parameter))
        for name, tensor in tensors.values()
        for start, end in _span(tensor)
    )
    furthest, last, trained = 0, "", False
    for start, end, name, is_weight in spans:
        if start < furthest and (is_weight or trained):
            raise Unsupported(
                f"{name} has the memory of {last}; weights that share memory with other tensors "
                "are not supported"
            )
        if end > furthest:
            furthest, last, trained = end, name, is_weight


def _span(tensor: Tensor) -> Iterator[tuple[int, int]]:
    if tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in sizes)
        yield tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def refuse_behaviour(model: nn.Module) -> None:
    """Refuse what modules do that would be done at another time, more than once, or not at all.

    Raises:
        Unsupported: names the module.
    """
    if has_global_hooks():
        raise Unsupported("a hook of every module is registered with torch; remove it")
    refuse_hooks(model)
    reader = Reader(model)
    for path, module in model.named_modules():
        where = path or type(model).__name__
        for name, usual in _TABLE_SETTINGS.items() if isinstance(module, nn.Embedding) else ():
            if (value := getattr(module, name, usual)) != usual:
                raise Unsupported(
                    f"{where} is an embedding with {name}={value}, which is not supported"
                )
        for name, _ in reader.attributes(module):
            if reader.strays:
                raise Unsupported(
                    f"{where}.{name} holds a weight {list(reader.strays[0].shape)} that is not a "
                    "parameter there; register it"
                )


def refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks of modules, and forwards that are not of their classes; ours may be there.

    Raises:
        Unsupported: names the module.
    """
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
    """Refuse a call of `F.embedding` with settings that an embedding may not have either."""
    arguments = inspect.signature(torch.nn.functional.embedding).bind(*args, **kwargs).arguments
    for name, usual in _TABLE_SETTINGS.items():
        if arguments.get(name, usual) != usual:
            raise Unsupported(f"its forward looks up a table with {name}={arguments[name]}")
