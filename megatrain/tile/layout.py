"""The flat layout of a tile: one list of offsets, the same in every plane.

Trainable parameters come first, one contiguous run per optimizer group, frozen ones last; so the
gradient and the moments cover a prefix, and the update is one kernel call per group, as long as the
groups stay as they were. Of the frozen ones those come first whose source has more bits than bf16,
so that the rest of the masters is a prefix, too.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import groupby
from math import lcm, prod

import torch
from torch import Tensor

from megatrain.base.units import align
from megatrain.tile.packed import Expand, WeightFormat

# Elements. 128 bf16 values are 256 bytes: every parameter starts on a boundary that the widest
# device loads and the host's cache lines both like.
ALIGNMENT = 128

# Of a tile: what numbers the elements of all tiles, whatever their sizes.
MOST_ELEMENTS = 1 << 40


class TileKind(Enum):
    """The kinds of a tile's parameters; the value is for people."""

    EMBEDDING = "embedding"
    PROLOGUE = "prologue"
    LAYER = "layer"
    HEAD = "head"
    MEDIA = "media"  # encoders of images and sounds, which steps on text alone leave out
    UNUSED = "unused"  # nothing reads them


@dataclass(frozen=True)
class Entry:
    """One parameter inside a tile: its Hugging Face name, shape, offset (elements) and group.

    Attributes:
        group: index of the optimizer's parameter group at first; None: frozen.
        wide: it is frozen, and its source has bits that bf16 does not hold.
        packed: how it is kept in the weights plane; None: as its values.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int | None
    wide: bool = False
    packed: WeightFormat | None = None

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def stored(self) -> int:
        """Elements of a plane that the parameter takes."""
        return self.numel if self.packed is None else -(-self.packed.bytes_of(self.shape) // 2)

    def view(self, flat: Tensor) -> Tensor:
        """This parameter in a flat plane of its tile."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


class TileLayout:
    """The places of a tile's parameters.

    Attributes:
        name: for messages, traces and files (`layer 3`, `embedding`, `head`).
        kind: what the tile, or the tile that this is a slice of, is.
        entries: the parameters in storage order.
        numel: length of the weights plane, in elements.
        trainable_numel: length of the gradient and moment planes; a prefix of `numel`.
        parts: `(start, stop)` of what is trained, and of what is frozen with and without bits that
            bf16 does not hold.
        ranks: into how many equal blocks each of these is cut.
    """

    def __init__(
        self,
        name: str,
        parameters: Iterable[tuple[str, torch.Size, int | None]],
        kind: TileKind = TileKind.LAYER,
        wide: Collection[str] = (),
        packed: Mapping[str, WeightFormat] | None = None,
        *,
        ranks: int = 1,
        row: int = 1,
    ) -> None:
        """Args:
        parameters: as `(name, shape, group)`; group None means frozen.
        wide: names of those whose source has bits that bf16 does not hold.
        packed: how frozen ones are kept that are not kept as bf16, by name.
        row: elements that no cut between ranks divides, counted from each part's beginning.
        """
        self.name, self.kind, self.ranks, self._row = name, kind, ranks, row
        cut = ranks * lcm(ALIGNMENT, row) if ranks > 1 else ALIGNMENT
        entries: list[Entry] = []
        offset = 0
        how = packed or {}
        marked = [
            (n, shape, group, group is None and n in wide and n not in how)
            for n, shape, group in parameters
        ]
        order = sorted(marked, key=lambda p: (p[2] is None, not p[3], p[0] in how, p[2] or 0))
        self.parts: list[tuple[int, int]] = []
        for _, members in groupby(order, key=lambda p: (p[2] is None, p[3])):
            start = offset
            for parameter, shape, group, is_wide in members:
                packing = how.get(parameter) if group is None else None
                entries.append(Entry(parameter, tuple(shape), offset, group, is_wide, packing))
                offset = align(offset + entries[-1].stored, ALIGNMENT)
            offset = align(offset, cut)
            self.parts.append((start, offset))
        self.entries, self.numel = tuple(entries), offset
        self.trainable_numel = self.parts[0][1] if self.trainable else 0
        self.by_name = {entry.name: entry for entry in entries}

    @cached_property
    def is_packed(self) -> bool:
        """True if any parameter is kept otherwise than as its values."""
        return any(entry.packed is not None for entry in self.entries)

    @cached_property
    def unpacked(self) -> "TileLayout":
        """The places of parameters once they are unpacked; of what is not packed the same."""
        if not self.is_packed:
            return self
        parameters = [(e.name, torch.Size(e.shape), e.group) for e in self.entries]
        wide = [e.name for e in self.entries if e.wide]
        return TileLayout(self.name, parameters, self.kind, wide, ranks=self.ranks, row=self._row)

    def unpack(self, stored: Tensor, out: Tensor, fast: Callable[[Expand], Expand]) -> None:
        """Write the parameters of the weights plane `stored` to `out`, laid out as `unpacked`.

        `fast` gives what a packing's `expand` is compiled to.
        """
        packed = [entry for entry in self.entries if entry.packed]
        plain = packed[0].offset if packed else self.numel
        out[:plain].copy_(stored[:plain])
        for entry in packed:
            assert entry.packed is not None
            values = self.unpacked.by_name[entry.name].view(out)
            entry.packed.unpack(stored[entry.offset : entry.offset + entry.stored], values, fast)

    def blocks(self, rank: int) -> Iterator[tuple[int, int]]:
        """A rank's block of each part: its first element, and how many it has."""
        for start, stop in self.parts:
            size = (stop - start) // self.ranks
            yield start + rank * size, size

    def whole_parts(self, stop: int) -> int:
        """The end of the part that has element `stop - 1`, with several ranks; else `stop`."""
        if self.ranks == 1:
            return stop
        return min((end for _, end in self.parts if end >= stop), default=0) if stop else 0

    def runs(self, group_of: Mapping[str, int]) -> list[tuple[int, int, int]]:
        """`(group, start, stop)` of each contiguous run of trainable parameters of one group."""
        runs: list[tuple[int, int, int]] = []
        for entry in self.trainable:
            group, start = group_of[entry.name], entry.offset
            stop = align(entry.offset + entry.numel, ALIGNMENT)
            if runs and runs[-1][0] == group:
                start = runs.pop()[1]
            runs.append((group, start, stop))
        return runs

    @property
    def num_parameters(self) -> int:
        """Parameters, padding not counted."""
        return sum(entry.numel for entry in self.entries)

    @property
    def num_trained(self) -> int:
        """Parameters that have a gradient."""
        return sum(entry.numel for entry in self.trainable)

    @cached_property
    def trainable(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.group is not None)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Every parameter of the tile as a view of one of its full-length planes."""
        return {entry.name: entry.view(flat) for entry in self.entries}
