"""Whether a head mixes tokens: tried with a few random rows of its table.

A language-model head multiplies hidden states with a table that has a row for each token of the
vocabulary. Further steps of models (scaling, capping) act on each logit alone. So the model's own
forward with a shorter table gives the logits of some tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatrain.compat.torch import without_modes
from megatrain.model.zeros import zero_pages

_TOKENS, _ROWS = 3, 6  # of a trial
_MOST = 1 << 24  # values that a head is tried with


Head = Callable[[dict[str, Tensor], Tensor], Tensor]


def _names(shapes: dict[str, torch.Size], num_logits: int) -> tuple[str, ...]:
    """The table first, then its bias; empty if there is no table."""
    table = max(shapes, key=lambda name: shapes[name].numel(), default=None)
    if table is None or len(shapes[table]) != 2 or shapes[table][0] != num_logits:
        return ()
    return (table, *(n for n, shape in shapes.items() if n != table and shape == (num_logits,)))


def mixes_tokens(head: Head, shapes: dict[str, torch.Size], num_logits: int, width: int) -> bool:
    """True if a token's logits depend on other tokens, or on its place in the row.

    Tried with one hidden state that is NaN, then with random weights, of few rows of the table if
    the head can be computed with them.
    """
    names = _names(shapes, num_logits)
    few = {n: torch.Size((_ROWS, *s[1:])) if n in names else s for n, s in shapes.items()}
    with torch.no_grad(), without_modes():
        tried = [_knows_the_place(head, sizes, width) for sizes in (few, shapes)]
        # A table of 152,064 x 8,192 takes half a second each time.
        taken = shapes if tried[0] is None else few
        zeros = {name: zero_pages(shape) for name, shape in taken.items()}
        hidden = torch.zeros(2, _TOKENS, width)
        if bool(head(zeros, hidden).isnan().any()):  # it divides by a weight
            return any(tried) or tried == [None, None]
        hidden[0, 1] = torch.nan
        spoiled = head(zeros, hidden).isnan().any(-1)
        return any(tried) or not torch.equal(spoiled, hidden.isnan().any(-1))


def _knows_the_place(head: Head, shapes: dict[str, torch.Size], width: int) -> bool | None:
    """True if logits depend on the place in a row; None: such weights cannot be tried."""
    if sum(size.numel() for size in shapes.values()) > _MOST:
        return None
    weights, hidden = _random(shapes, width)
    late = slice(_TOKENS, None)
    same = _agree(lambda: (head(weights, hidden)[:, late], head(weights, hidden[:, late])))
    return None if same is None else not same


def _random(shapes: dict[str, torch.Size], width: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random weights, and random hidden states `[1, C, D]`."""
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(s, generator=generator) / width**0.5 for n, s in shapes.items()}
    return weights, torch.randn(1, 2 * _TOKENS, width, generator=generator)


def _agree(run: Callable[[], tuple[Tensor, Tensor]]) -> bool | None:
    """True if both ways of computing a head's logits agree; None: one fails."""
    try:
        one, other = run()
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return None
    return one.shape == other.shape and torch.allclose(one, other, 1e-4, 1e-5, equal_nan=True)
