"""The head's projection, some rows of its table at a time.

A language-model head multiplies hidden states with a table that has a row for each token of the
vocabulary. What models do to logits besides (scale them, cap them) acts on each alone. So the
logits of some tokens are what the model's own forward gives with a shorter table. Whether that is
so is tried, on a few random rows.

Legend: C tokens, D width, R rows of the table.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_TOKENS, _ROWS, _FIRST = 3, 6, 2  # of a trial, and rows of the first of its two parts


@dataclass(frozen=True)
class Projection:
    """What the logits of a model are computed with.

    Attributes:
        names: of the parameters with one row (of the table) or element (of its bias) a token.
        num: how many rows they have.
        obstacle: what keeps it from being taken some rows at a time; empty if nothing does.
    """

    names: tuple[str, ...]
    num: int
    obstacle: str


Head = Callable[[dict[str, Tensor], Tensor], Tensor]


def find_projection(head: Head, shapes: dict[str, torch.Size], num_logits: int) -> Projection:
    """The projection of a head.

    Args:
        head: weights and hidden states `[1, C, D]` to logits `[1, C, R]`, by the model's own code.
        shapes: of all parameters that it computes with.
        num_logits: that it makes with them.
    """
    table = max(shapes, key=lambda name: shapes[name].numel(), default=None)
    num = num_logits
    if table is None or len(shapes[table]) != 2 or shapes[table][0] != num:
        return Projection((), num, "which has no table with a row for each logit")
    names = (table, *(n for n, shape in shapes.items() if n != table and shape == (num,)))
    others = [name for name in shapes if name not in names]
    if others:
        return Projection(names, num, f"which computes with {others[0]} before its table")
    with torch.no_grad(), _disable_current_modes():
        alone = _acts_on_rows_alone(head, names, shapes[table][1])
    return Projection(names, num, "" if alone else "whose logits depend on each other")


def _acts_on_rows_alone(head: Head, names: tuple[str, ...], width: int) -> bool:
    """Whether a few random rows give the same logits at once and in two parts."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    table, *biases = names
    rows = {table: random(_ROWS, width) / width**0.5} | {name: random(_ROWS) for name in biases}
    hidden = random(1, _TOKENS, width)
    try:
        whole, first, rest = (
            head({name: weight[part] for name, weight in rows.items()}, hidden)
            for part in (slice(None), slice(_FIRST), slice(_FIRST, None))
        )
        parts = torch.cat([first, rest], -1)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False
    return whole.shape == (1, _TOKENS, _ROWS) and torch.allclose(whole, parts, 1e-4, 1e-5)
