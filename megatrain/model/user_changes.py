"""Refuses what a user's own code has put into a model and cannot be streamed."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.compat.torch import (
    BACKWARD_HOOKS,
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
    reader = Reader(model)
    for path, module in model.named_modules():
        where = path or type(model).__name__
        if any(vars(module).get(name) for name in BACKWARD_HOOKS):
            raise Unsupported(
                f"{where} has a backward hook, which would not be run as in plain training; "
                "remove it"
            )
        for name, usual in _TABLE_SETTINGS.items() if isinstance(module, nn.Embedding) else ():
            if (value := getattr(module, name, usual)) != usual:
                raise Unsupported(
                    f"{where} is an embedding with {name}={value}, which is not supported"
                )
        for name, _ in reader.attributes(module):
            if reader.strays:
                raise Unsupported(
                    f"{where}.{name} holds a weight {list(reader.strays[0].shape)} that is not a "
                    "parameter there; register it, or let a forward of its own be a method: "
                    "types.MethodType(function, module)"
                )


def refuse_lookup(*args: Any, **kwargs: Any) -> None:
    """Refuse a call of `F.embedding` with settings that an embedding may not have either."""
    arguments = inspect.signature(torch.nn.functional.embedding).bind(*args, **kwargs).arguments
    for name, usual in _TABLE_SETTINGS.items():
        if arguments.get(name, usual) != usual:
            raise Unsupported(f"its forward looks up a table with {name}={arguments[name]}")
