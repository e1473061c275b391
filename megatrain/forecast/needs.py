"""What lives as long as an engine.

The engine's own parts are made on a device that only counts what they ask for. To that comes what
is certain besides: the largest gradient before it is summed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from megatrain.device import Buffer, TraceDevice
from megatrain.engine.assemble import Assembly
from megatrain.engine.portion import Portion, least_split
from megatrain.engine.step import Parts, TrainingParts
from megatrain.model.outline import PROBE_SHAPE, Outline
from megatrain.model.program import Program
from megatrain.optim import StreamedOptimizer
from megatrain.placement import Placement
from megatrain.store import Store, Tile
from megatrain.tile import TileLayout

# Under this name counts the working set of the smallest step.
UNSUMMED = "gradients before they are summed"


@dataclass
class Needs:
    """Bytes by what they are for, on the device and in host memory."""

    device: Counter[str] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)


class _Counting(TraceDevice):
    """Notes what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.needs = Needs()

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        self.needs.device[_what(name)] += numel * dtype.itemsize
        return super().empty(name, numel, dtype)

    def host(self, name: str, numel: int, dtype: torch.dtype, *, pinned: bool) -> Buffer:
        self.needs.host[_what(name)] += numel * dtype.itemsize
        return super().host(name, numel, dtype, pinned=pinned)


def _what(name: str) -> str:
    return " ".join(word for word in name.split() if not word.isdigit())


@dataclass(frozen=True)
class Question:
    """What is to be trained, or only run, and how.

    Attributes:
        tokens: of a step; None where they are not known, then what grows with them is left out.
        distinct: of these, that differ; None: they may all.
    """

    outline: Outline
    layouts: Sequence[TileLayout]
    dtype: torch.dtype
    optimizer: StreamedOptimizer | None
    max_grad_norm: float | None
    tokens: int | None
    distinct: int | None = None

    def needs(self, placement: Placement) -> Needs:
        """All long-lived memory, and the largest gradient on its way to its sum."""
        device = _Counting()
        train = self.optimizer is not None
        resident = placement.resident
        store = Store(device, self.layouts, self.dtype, train=train, resident=resident)
        program = cast(Program, SimpleNamespace(outline=self.outline))
        eager = replace(placement, compile=False, tile_tokens=None)
        assembly = Assembly(device, program, store, self.dtype, eager)
        parts: Parts = (
            assembly.inference()
            if self.optimizer is None
            else assembly.training(self.optimizer, self.max_grad_norm)
        )
        if self.tokens is not None:
            # The rooms are replaced by larger ones: the first are given back.
            device.needs.device["work room"] = 0
            parts.embedding.reserve(self.tokens if self.distinct is None else self.distinct)
        if isinstance(parts, TrainingParts):
            device.needs.device[UNSUMMED] += self._unsummed_bytes(assembly.visited)
            boundaries = self._boundary_bytes()
            where = device.needs.host if placement.boundaries == "host" else device.needs.device
            where["boundaries"] += boundaries
        return device.needs

    def _unsummed_bytes(self, visited: Sequence[Tile | Portion]) -> int:
        """The largest gradient of one backward, in the compute type; of the head, one parameter's.

        Beside it, what the backward of a few tokens works with is next to nothing.
        """
        whole = [t.layout.trainable_numel for t in visited if t.name != "head"]
        heads = [t.layout.trainable for t in visited if t.name == "head"]
        single = [prod(entry.shape) for entries in heads for entry in entries]
        return max([*whole, *single], default=0) * self.dtype.itemsize

    def least_split(self) -> int | None:
        """The least `split_bytes`; None: nothing is larger."""
        least = least_split(self.outline, self.layouts, self.dtype.itemsize)
        split = ("layer", "head")
        largest = max(layout.numel for layout in self.layouts if layout.name.startswith(split))
        return least if least < largest * self.dtype.itemsize else None

    def _boundary_bytes(self) -> int:
        """What enters the layers, of a whole step."""
        positions = prod(PROBE_SHAPE)
        layers = self.outline.layers
        made = [
            layer.kind.example[ref.leaf].numel() // positions
            for layer, refs in zip(layers, self.outline.outputs, strict=True)
            for ref in refs
            if isinstance(layer.kind.example[ref.leaf], Tensor)
        ]
        return sum(made) * self.dtype.itemsize * (self.tokens or 0)
