"""How tests go over many things: a few here, the others exhaustively."""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

from megatrain import Placement
from tests.refusals import table


def placements(test: str) -> Any:
    """The placements of a test file, a list or by name."""
    found = table(__file__, "placements.yaml")[test]
    if isinstance(found, list):
        return [placement(choices) for choices in found]
    return {name: placement(choices) for name, choices in found.items()}


def placement(choices: Mapping[str, Any]) -> Placement:
    return Placement(**{n: tuple(c) if isinstance(c, list) else c for n, c in choices.items()})


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


def few(values: Iterable[Any], *usual: int) -> list[Any]:
    """Parameters, exhaustive but for those at the places `usual`, or else for the first one.

    A tuple has the values of several arguments.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if place in (usual or (0,)) else [pytest.mark.exhaustive],
        )
        for place, value in enumerate(values)
    ]


def on_gpu(*values: Any) -> list[Any]:
    """Parameters `value, "cuda"` of tests that run beside each other on the CPU and on a GPU."""
    return [pytest.param(value, "cuda", marks=pytest.mark.gpu) for value in values]


def swept(together: int = 2, **axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """`parametrize` with all combinations of the axes' values; a mapping's keys name its values.

    A few stay that have each value of an axis beside each of `together - 1` others, with 0 a single
    one; the rest is exhaustive.
    """
    sizes = [range(len(values)) for values in axes.values()]
    every = list(product(*sizes))
    shown = {each: set(combinations(enumerate(each), together)) for each in every}
    missing, few = set().union(*shown.values()), set()
    while missing:
        best = max(every, key=lambda each: len(shown[each] & missing))
        few.add(best)
        missing -= shown[best]
    named = [
        list(values.items()) if isinstance(values, Mapping) else [(each, each) for each in values]
        for values in axes.values()
    ]
    rows = [[named[axis][at] for axis, at in enumerate(each)] for each in every]
    return pytest.mark.parametrize(
        list(axes),
        [
            pytest.param(
                *(value for _, value in row),
                id="-".join(getattr(name, "__name__", str(name)) for name, _ in row),
                marks=[] if each in few else [pytest.mark.exhaustive],
            )
            for each, row in zip(every, rows, strict=True)
        ],
    )
