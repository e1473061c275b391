"""Adafactor: of a matrix's second moment the means of its rows and columns; no first moment."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.errors import InputError
from megatrain.optim.rule import NO_DECAY, Plane, Rule, is_number, joined, master_of, parted
from megatrain.tile import Entry

# Elements of a matrix for each value that there is room for of its rows and columns.
_PER = 64

# Elements worked on at a time, on the host for each of torch's threads: what torch makes meanwhile
# stays in a core's cache.
_HOST_BLOCK, _DEVICE_BLOCK = 1 << 15, 1 << 22


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
    needs_matrices = True
    pace = 0.05  # of torch's operations on one core, beside AdamW's kernel

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
        lr, blocks = float(group["lr"]), _Blocks(weights, remainder, grad, grad_scale)
        moment = self._second_moment(states[0], weights.shape, blocks, step**self.beta2_decay)
        smallest = self._smallest**2

        def change(at: _At) -> Tensor:
            return moment(at).clamp_(min=smallest).rsqrt_().mul_(blocks.gradient(at))

        size = blocks.rms(blocks.master).clamp_(min=self.eps[1])
        size *= min(lr, step**-0.5) / (blocks.rms(change) / self.d).clamp_(min=1)
        for at_ in blocks.all:
            with blocks.changing(at_) as master:
                master.mul_(1 - lr * group["weight_decay"]).sub_(change(at_).mul_(size))

    @property
    def _smallest(self) -> float:
        return torch.finfo(torch.float32).eps if self.eps[0] is None else self.eps[0]

    def _second_moment(
        self, kept: Tensor, shape: torch.Size, blocks: "_Blocks", fresh: float
    ) -> Callable[["_At"], Tensor]:
        """Its estimate for a block, which may be written over, once `kept` has the new squares."""
        count, rows, columns = blocks.shape
        if min(rows, columns) == 1:  # the longer side's means are the squares themselves
            whole = kept[: count * rows * columns].view(blocks.shape)
            for at in blocks.all:
                whole[at].lerp_(blocks.gradient(at).square_(), fresh)
            if len(shape) < 2:
                return lambda at: whole[at].clone()
            of_rows, of_columns = whole.mean(-1, keepdim=True), whole.mean(-2, keepdim=True)
        else:
            of_rows = kept[: count * rows].view(count, rows, 1)
            of_columns = kept[count * rows :][: count * columns].view(count, 1, columns)
            new_rows, new_columns = torch.zeros_like(of_rows), torch.zeros_like(of_columns)
            for at in blocks.all:
                squares = blocks.gradient(at).square_()
                new_rows[at] = squares.mean(-1, keepdim=True)
                new_columns[at[0]] += squares.sum(-2, keepdim=True)
            of_rows.lerp_(new_rows, fresh)
            of_columns.lerp_(new_columns.div_(rows), fresh)
        shares = of_rows / of_rows.mean(-2, keepdim=True).clamp_(min=self._smallest)
        return lambda at: shares[at] * of_columns[at[0]]


_At = tuple[slice, slice]


class _Blocks:
    """A parameter as matrices [count, rows, columns], a few rows or whole matrices at a time."""

    def __init__(
        self, weights: Tensor, remainder: Tensor | None, grad: Tensor, grad_scale: float
    ) -> None:
        rows, columns = weights.shape[-2:] if weights.ndim > 1 else (1, weights.numel())
        self.shape = (weights.numel() // (rows * columns), rows, columns)
        self._weights, self._grad = weights.view(self.shape), grad.view(self.shape)
        self._split = None if remainder is None else remainder.view(self.shape)
        self._grad_scale = grad_scale
        on_host = weights.device.type == "cpu"
        size = _HOST_BLOCK * torch.get_num_threads() if on_host else _DEVICE_BLOCK
        matrices, some = max(1, size // (rows * columns)), max(1, size // columns)
        self.all: list[_At] = [
            (slice(number, number + matrices), slice(start, start + some))
            for number in range(0, self.shape[0], matrices)
            for start in range(0, rows, some)
        ]

    def gradient(self, at: _At) -> Tensor:
        return self._grad[at].float() * self._grad_scale

    def changing(self, at: _At) -> AbstractContextManager[Tensor]:
        """Its fp32 master, to be changed in place within the block."""
        return master_of(self._weights[at], None if self._split is None else self._split[at])

    def master(self, at: _At) -> Tensor:
        return joined(self._weights[at], None if self._split is None else self._split[at])

    def rms(self, of: Callable[[_At], Tensor]) -> Tensor:
        """The root of the mean square of all blocks, fp64."""
        norms = (torch.linalg.vector_norm(of(at)) for at in self.all)
        total = sum(norm.double().square() for norm in norms)
        return (torch.as_tensor(total) / self._weights.numel()).sqrt_()
