"""torch.compile, with log lines about what is being compiled."""

import logging
from collections.abc import Callable
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from megatrain.compat.torch import keep_tuning_off_the_host, let_triton_launch, pytree

_log = logging.getLogger(__name__)

_numbers = count()  # of what is compiled in this process


def compile_and_tell(function: Callable[..., Any], what: str, name: str = "") -> Callable[..., Any]:
    """`function` through torch.compile; says so at the first call, which may take a minute.

    Sizes of the first call keep their own graphs: once a function has been called with
    others, torch.compile makes graphs for any size and uses them for the first sizes, too.

    Args: `name` in torch's own messages and traces; the function's if none is given.
    """
    let_triton_launch()
    keep_tuning_off_the_host()
    code_name = f"{name or getattr(function, '__name__', what)}_{next(_numbers)}"
    usual, others = (torch.compile(_with_own_code(function, code_name)) for _ in range(2))
    first: dict[int, list[torch.Size]] = {}  # by the number of tensors: it differs with buffers

    def call(*args: Any, **kwargs: Any) -> Any:
        sizes = _sizes(args, kwargs)
        if not first:
            _log.info("compiling %s...", what)
        is_usual = first.setdefault(len(sizes), sizes) == sizes
        return (usual if is_usual else others)(*args, **kwargs)

    return call


def _sizes(*values: Any) -> list[torch.Size]:
    """Sizes of all floating-point tensors; integers count documents, which differ every time."""
    leaves = pytree.tree_leaves(values)
    return [x.shape for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _with_own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A copy of a function or a method under another name, with a new code object.

    torch.compile keeps compiled graphs by code object: kinds of layers that shared one would take
    each other's graphs and use up its limit on their number. It also remembers, by file, line and
    name, sizes that have varied, and compiles kernels for any size from then on
    (torch/_dynamo/pgo.py). Functions of the same name would share that memory: the second model
    of a process would get the slower kernels.
    """
    if isinstance(function, MethodType):
        return MethodType(_with_own_code(function.__func__, name), function.__self__)
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace(co_name=name)
    defaults, closure = function.__defaults__, function.__closure__
    copied = FunctionType(code, function.__globals__, name, defaults, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
