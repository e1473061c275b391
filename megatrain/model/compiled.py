"""torch.compile with news: what is being compiled, and how much has been."""

import logging
from collections.abc import Callable
from typing import Any

import torch

_log = logging.getLogger(__name__)


def compile_and_tell(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """`function` through torch.compile; says so at the first call, which may take a minute."""
    fast = torch.compile(function)
    announced = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal announced
        if not announced:
            announced = True
            _log.info("compiling %s...", what)
        return fast(*args, **kwargs)

    return call


def num_compilations() -> int:
    """Graphs that torch.compile has made in this process; one made anew counts again."""
    import torch._dynamo.utils  # takes a second where nothing has been compiled

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
