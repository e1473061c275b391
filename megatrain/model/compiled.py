"""torch.compile with news: what is being compiled, and how much has been."""

import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from megatrain.compat.torch import let_triton_launch

_log = logging.getLogger(__name__)


def compile_and_tell(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """`function` through torch.compile; says so at the first call, which may take a minute."""
    let_triton_launch()
    fast = torch.compile(function)
    announced = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal announced
        if not announced:
            announced = True
            _log.info("compiling %s...", what)
        return fast(*args, **kwargs)

    return call


def own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A copy of `function` with a code object of its own.

    torch.compile keeps what it has compiled with the code object: kinds and purposes that shared
    one would take each other's graphs, and use up its limit on how many there may be.
    """
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name)
