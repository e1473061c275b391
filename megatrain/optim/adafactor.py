"""Adafactor: of a matrix's second moment the means of its rows and columns; no first moment."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain import kernels
from megatrain.errors import InputError
from megatrain.kernels.factored import Factors, Sums, by_halves
from megatrain.kernels.states import TileRange, UpdateOptions, exact_sqrt
from megatrain.optim.rule import NO_DECAY, Part, Plane, Rule, is_number, parted
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
        lr, weight_decay: as torch.optim.Adafactor takes them; lr is the largest relative step.
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
    launches = 360  # 330 to 500, by the shape of a matrix

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

    def update(self, tile: TileRange, group: Mapping[str, Any], options: UpdateOptions) -> None:
        weights, step, passes = tile.weights, options.step, kernels.of_matrices(tile.weights)
        part = group.get("part", Part(tuple(weights.shape)))
        lr, shape, numel = float(group["lr"]), _as_matrices(part.shape), math.prod(part.shape)
        here = [*_rectangles(shape, part.start, part.start + weights.numel())]
        views = [each.all_of(tile) for each in here]
        sums = _Totals.zeros(shape, weights.device)
        for each, view in zip(here, views, strict=True):
            sums.add(each, passes.factored_sums(view, options))
        kept = _Kept(tile.states[0], part.start // (_PER if _has_factors(part.shape) else 1), shape)
        if part.sum is not None:
            _together(part.sum, (sums.rows, sums.columns, sums.masters, kept.values))
        shares, columns = self._second_moment(kept.values, sums, step**self.beta2_decay)
        kept.keep()
        if len(part.shape) < 2:
            shares = torch.ones_like(shares)
        most = 1 / self._smallest if self._smallest else math.inf
        factors = Factors(1 / exact_sqrt(shares), 1 / exact_sqrt(columns), most)
        own = [each.factors(factors) for each in here]
        size = _rms(sums.masters, numel).clamp_(min=self.eps[1]) * min(lr, step**-0.5)
        changes = torch.zeros_like(sums.masters)
        for view, by in zip(views, own, strict=True):
            changes += _added(passes.factored_changes(view, by, options))
        if part.sum is not None:
            part.sum(changes)
        size /= (_rms(changes, numel) / self.d).clamp_(min=1)
        how = {"decay": 1 - lr * group["weight_decay"], "size": size[0].float()}
        for view, by in zip(views, own, strict=True):
            passes.factored_move(view, by, options, **how)

    @property
    def _smallest(self) -> float:
        return torch.finfo(torch.float32).eps if self.eps[0] is None else self.eps[0]

    def _second_moment(self, kept: Tensor, sums: "_Totals", fresh: float) -> tuple[Tensor, Tensor]:
        """Update `kept`; return the means of rows, divided by their mean, and those of columns."""
        (count, rows), columns = sums.rows.shape, sums.columns.shape[-1]
        if rows == 1:  # the columns' means are the squares themselves
            of_columns = kept.view(count, columns)
            _blend(of_columns, sums.columns, fresh)
            of_rows = by_halves(of_columns)[:, None] / columns
        else:
            of_rows = kept[: count * rows].view(count, rows)
            of_columns = kept[count * rows :].view(count, columns)
            _blend(of_rows, sums.rows / columns, fresh)
            _blend(of_columns, sums.columns / rows, fresh)
        mean = by_halves(of_rows)[:, None] / rows
        return of_rows / mean.clamp_(min=self._smallest), of_columns


@dataclass(frozen=True)
class _Rectangle:
    """Elements `flat` of what is here of a parameter: some matrices, some rows, or part of one."""

    flat: slice
    matrices: slice
    rows: slice
    columns: slice

    def of(self, values: Tensor) -> Tensor:
        """This rectangle [count, rows, columns] of a parameter's values."""
        sides = (self.matrices, self.rows, self.columns)
        return values.view(-1)[self.flat].view([side.stop - side.start for side in sides])

    def all_of(self, tile: TileRange) -> TileRange:
        """This rectangle of each plane of a tile, without states."""
        rest = None if tile.remainder is None else self.of(tile.remainder)
        return TileRange(self.of(tile.weights), rest, (), self.of(tile.grad))

    def factors(self, whole: Factors) -> Factors:
        """The factors of this rectangle's rows and columns."""
        rows = whole.rows[self.matrices, self.rows].contiguous()
        return Factors(rows, whole.columns[self.matrices, self.columns].contiguous(), whole.most)


def _rectangles(shape: tuple[int, int, int], start: int, stop: int) -> Iterator[_Rectangle]:
    """What a range of matrices of a shape [count, rows, columns] is made of; all: a single one."""
    _, rows, columns = shape
    at = start
    while at < stop:
        matrix, inside = divmod(at, rows * columns)
        row, column = divmod(inside, columns)
        sides = [slice(matrix, matrix + 1), slice(row, row + 1), slice(column, columns)]
        if column or stop - at < columns:
            end = min(stop, at + columns - column)
            sides[2] = slice(column, column + end - at)
        elif row or stop - at < rows * columns:
            some = min(rows - row, (stop - at) // columns)
            end, sides[1] = at + some * columns, slice(row, row + some)
        else:
            some = (stop - at) // (rows * columns)
            end = at + some * rows * columns
            sides[:2] = slice(matrix, matrix + some), slice(0, rows)
        yield _Rectangle(slice(at - start, end - start), *sides)
        at = end


@dataclass(frozen=True)
class _Totals:
    """Sums of squares of a whole parameter.

    Attributes:
        rows, columns: [count, rows] and [count, columns], float32, of gradients.
        masters: [1], float64.
    """

    rows: Tensor
    columns: Tensor
    masters: Tensor

    @classmethod
    def zeros(cls, shape: tuple[int, int, int], device: torch.device) -> "_Totals":
        count, rows, columns = shape
        of_rows = torch.zeros(count, rows, device=device)
        of_columns = torch.zeros(count, columns, device=device)
        return cls(of_rows, of_columns, torch.zeros(1, dtype=torch.float64, device=device))

    def add(self, each: _Rectangle, sums: Sums) -> None:
        """Add the sums of one rectangle."""
        self.rows[each.matrices, each.rows] += sums.rows
        self.columns[each.matrices, each.columns] += by_halves(sums.columns, 1)
        self.masters.add_(_added(sums.masters))


class _Kept:
    """Rows' and columns' means of a whole parameter, of which a rank may keep some.

    Attributes:
        values: all of them; zeros for what other ranks keep.
    """

    def __init__(self, plane: Tensor, start: int, shape: tuple[int, int, int]) -> None:
        """Args: `plane`: what is here of the parameter's state, from its value `start` on."""
        count, rows, columns = shape
        size = count * (columns if rows == 1 else rows + columns)
        here = slice(start, min(size, start + len(plane)))
        self._own = plane[: max(0, here.stop - start)]
        self.values, self._here = self._own, here
        if len(self._own) < size:
            self.values = plane.new_zeros(size)
            self.values[here] = self._own

    def keep(self) -> None:
        """Put the values back where they are kept."""
        if self.values is not self._own:
            self._own.copy_(self.values[self._here])


def _together(add: Callable[[Tensor], None], parts: Sequence[Tensor]) -> None:
    """Sum tensors over all ranks at once, in place; what others have zeros for keeps its bits."""
    every = torch.cat([part.double().view(-1) for part in parts])
    add(every)
    for part, found in zip(parts, every.split([part.numel() for part in parts]), strict=True):
        part.copy_(found.view(part.shape))


def _as_matrices(shape: Sequence[int]) -> tuple[int, int, int]:
    """Count, rows and columns; a single column, or a vector, is a row."""
    numel = math.prod(shape)
    rows, columns = shape[-2:] if len(shape) > 1 else (1, numel)
    count = numel // (rows * columns)
    return (count, 1, rows) if columns == 1 else (count, rows, columns)


def _blend(kept: Tensor, new: Tensor, fresh: float) -> None:
    kept.mul_(1 - fresh).add_(new * fresh)


def _added(sums: Tensor) -> Tensor:
    """One number of all, fp64."""
    return by_halves(sums.view(-1).double())


def _rms(total: Tensor, numel: int) -> Tensor:
    """The root of the mean of squares of which this is the sum, fp64."""
    return (total / numel).sqrt_()
