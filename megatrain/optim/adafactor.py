"""Adafactor: of a matrix's second moment the means of its rows and columns; no first moment."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain import kernels
from megatrain.errors import InputError
from megatrain.kernels.factored import Factors, Sums, by_halves
from megatrain.kernels.states import exact_sqrt
from megatrain.optim.rule import NO_DECAY, Plane, Rule, is_number, parted
from megatrain.tile import Entry

# Elements of a matrix for each value that there is room for of its rows and columns.
_PER = 64


def _has_factors(shape: Sequence[int]) -> bool:
    """Whether rows and columns need no more room than `_PER` leaves; large matrices do not."""
    return len(shape) > 1 and _PER * (shape[-2] + shape[-1]) <= shape[-2] * shape[-1]


def _of_large_matrices(entry: Entry) -> bool:
    return _has_factors(entry.shape)


def _of_others(entry: Entry) -> bool:
    return not _has_factors(entry.shape)


@dataclass(frozen=True)
class Adafactor(Rule):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235) as torch.optim.Adafactor defines it.

    The last two dimensions are a matrix's. A matrix that is small or narrow has as much room as a
    vector, whose second moment is kept whole; its arithmetic is the same.

    Attributes:
        beta2_decay: the second moment takes `step ** beta2_decay` of each new square.
        eps: what squares of gradients, and the root mean square of a parameter, are at least;
            None: as torch has it, of float32.
        d: the root mean square of an update, before the learning rate, is this at most.
        no_decay: patterns of names that do not decay, besides the parameters of nn.LayerNorm.
    """

    name = "adafactor"
    settings = ("lr", "weight_decay")
    further = ("beta2_decay", "d")
    needs_matrices = needs_whole = True
    pace = 0.25  # it goes over a parameter three times

    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    no_decay: Sequence[str] = NO_DECAY

    def __post_init__(self) -> None:
        super().__post_init__()
        pair = self.eps if isinstance(self.eps, tuple | list) else ()
        if len(pair) != 2 or not all(is_number(e) and e >= 0 for e in (pair[0] or 0, pair[1])):
            raise InputError(f"Adafactor eps is {self.eps!r}; it must be None or a number, and one")
        if not is_number(self.beta2_decay) or not self.beta2_decay <= 0:
            raise InputError(f"Adafactor beta2_decay is {self.beta2_decay!r}; it must be 0 at most")
        if not is_number(self.d) or not 1 <= self.d < math.inf:
            raise InputError(f"Adafactor d is {self.d!r}; it must be a number, 1 at least")
        object.__setattr__(self, "eps", tuple(self.eps))

    @property
    def state_planes(self) -> tuple[Plane, ...]:
        return (
            Plane("second moment", torch.float32, only=_of_others),
            Plane("rows and columns", torch.float32, per=_PER, only=_of_large_matrices),
        )

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """As `Rule.groups`, first what has a second moment of its own: that plane ends with it."""
        return parted(super().groups(model), lambda name, shape: _has_factors(shape))

    def update(
        self,
        weights: Tensor,
        remainder: Tensor | None,
        states: Sequence[Tensor],
        grad: Tensor,
        group: Mapping[str, Any],
        *,
        at: int,
        step: int,
        grad_scale: float,
        threads: int,
    ) -> None:
        lr, shape, numel = float(group["lr"]), _as_matrices(weights.shape), weights.numel()
        rest = None if remainder is None else remainder.view(shape)
        masters, gradients = (weights.view(shape), rest), grad.view(shape)
        how: dict[str, Any] = {"grad_scale": grad_scale, "threads": threads}
        sums = kernels.factored_sums(*masters, gradients, **how)
        shares, columns = self._second_moment(states[0], sums, step**self.beta2_decay)
        if weights.ndim < 2:
            shares = torch.ones_like(shares)
        most = 1 / self._smallest if self._smallest else math.inf
        factors = Factors(1 / exact_sqrt(shares), 1 / exact_sqrt(columns), most)
        size = _rms(sums.masters, numel).clamp_(min=self.eps[1]) * min(lr, step**-0.5)
        changes = kernels.factored_changes(gradients, factors, **how)
        size /= (_rms(changes, numel) / self.d).clamp_(min=1)
        how |= {"decay": 1 - lr * group["weight_decay"], "size": size.float()}
        kernels.factored_move(*masters, gradients, factors, **how)

    @property
    def _smallest(self) -> float:
        return torch.finfo(torch.float32).eps if self.eps[0] is None else self.eps[0]

    def _second_moment(self, kept: Tensor, sums: Sums, fresh: float) -> tuple[Tensor, Tensor]:
        """Its means of rows, as shares of their own mean, and of columns, once `kept` has both."""
        (count, rows), columns = sums.rows.shape, sums.columns.shape[-1]
        if rows == 1:  # the columns' means are the squares themselves
            of_columns = kept[: count * columns].view(count, columns)
            _blend(of_columns, sums.columns[:, 0], fresh)
            of_rows = by_halves(of_columns)[:, None] / columns
        else:
            of_rows = kept[: count * rows].view(count, rows)
            of_columns = kept[count * rows :][: count * columns].view(count, columns)
            _blend(of_rows, sums.rows / columns, fresh)
            _blend(of_columns, by_halves(sums.columns, 1) / rows, fresh)
        mean = by_halves(of_rows)[:, None] / rows
        return of_rows / mean.clamp_(min=self._smallest), of_columns


def _as_matrices(shape: torch.Size) -> tuple[int, int, int]:
    """Count, rows and columns; a single column, or a vector, is a row."""
    rows, columns = shape[-2:] if len(shape) > 1 else (1, shape.numel())
    count = shape.numel() // (rows * columns)
    return (count, 1, rows) if columns == 1 else (count, rows, columns)


def _blend(kept: Tensor, new: Tensor, fresh: float) -> None:
    kept.mul_(1 - fresh).add_(new * fresh)


def _rms(sums: Tensor, numel: int) -> Tensor:
    """The root of the mean of squares of which there are these sums, fp64."""
    return (by_halves(sums.view(-1).double()) / numel).sqrt_()
