"""What a layer takes, and what it hands on: no tensors, only numbers."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatrain.forecast.op_counter import Work

# How much faster products are in float8, casts included: 7B on an H200 took 5.59 s instead of 7.40.
_FLOAT8_SPEED = 1.48


@dataclass(frozen=True)
class Shape:
    """Sizes and dtype of an activation."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize

    def of_rows(self, rows: int, measured: int) -> "Shape":
        """The shape for another number of rows than was measured."""
        first, *others = self.sizes
        return Shape((first * rows // measured, *others), self.dtype)

    def of_tokens(self, rows: int, tokens: int) -> "Shape":
        """The shape `[rows, tokens, ...]`, of an activation that has these two dimensions."""
        return Shape((rows, tokens, *self.sizes[2:]), self.dtype)

    def empty(self, device: str) -> Tensor:
        return torch.empty(self.sizes, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class LayerWork:
    """What one micro-batch takes in a layer.

    Attributes:
        forward: nothing is kept.
        again: the forward of the backward sweep, which keeps what the backward needs.
        backward: what was kept counts in its peak.
        keeping, kept_backward: the same two of a layer that keeps its graph between the sweeps.
        repeating: the backward of a graph that holds nothing, made by `forward` (then nothing is
            run `again`); None: layers do not make such graphs.
        outputs: by output leaf.
    """

    forward: Work
    again: Work
    backward: Work
    keeping: Work
    kept_backward: Work
    repeating: Work | None
    outputs: dict[int, Shape]

    @property
    def in_float8(self) -> "LayerWork":
        """This work where products are taken in float8."""
        faster: dict[str, Any] = {
            name: each._replace(product_flops=int(each.product_flops / _FLOAT8_SPEED))
            for name, each in vars(self).items()
            if isinstance(each, Work)
        }
        return replace(self, **faster)

    @property
    def computed_twice(self) -> list[Work]:
        """All works of a layer of which nothing is kept."""
        if self.repeating is not None:
            return [self.forward, self.repeating]
        return [self.forward, self.again, self.backward]
