"""torch.compile with news: what is being compiled, and how much has been."""

import logging
from collections.abc import Callable
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch

from megatrain.compat.torch import let_triton_launch

_log = logging.getLogger(__name__)

_numbers = count()  # of what is compiled in this process


def compile_and_tell(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """`function` through torch.compile; says so at the first call, which may take a minute."""
    let_triton_launch()
    fast = torch.compile(_with_own_code(function))
    announced = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal announced
        if not announced:
            announced = True
            _log.info("compiling %s...", what)
        return fast(*args, **kwargs)

    return call


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function or a method, with a code object and a name of its own.

    torch.compile keeps what it has compiled with the code object: kinds and purposes that shared
    one would take each other's graphs, and use up its limit on how many there may be. By file,
    line and name it keeps which sizes have changed, and no longer compiles for those that are
    given (torch/_dynamo/pgo.py): the second model of a process would have kernels for any size.
    """
    if isinstance(function, MethodType):
        return MethodType(_with_own_code(function.__func__), function.__self__)
    if not isinstance(function, FunctionType):
        return function
    name = f"{function.__name__}_{next(_numbers)}"
    code = function.__code__.replace(co_name=name)
    defaults, closure = function.__defaults__, function.__closure__
    own = FunctionType(code, function.__globals__, name, defaults, closure)
    own.__kwdefaults__ = function.__kwdefaults__
    return own
