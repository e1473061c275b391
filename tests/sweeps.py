"""How tests go over many things: a few here, the others exhaustively."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def quick(names: Iterable[str], chosen: Container[str], **given: Any) -> list[Any]:
    """Parameters `name, *given`, exhaustive but for those that are chosen."""
    return [
        pytest.param(
            name,
            *given.values(),
            id="-".join([*given, name]),
            marks=[] if name in chosen else [pytest.mark.exhaustive],
        )
        for name in names
    ]
