"""The flat layout of a tile: one list of offsets, the same in every plane.

Trainable parameters come first, one contiguous run per optimizer group, frozen ones last; so the
gradient and the moments cover a prefix, and the update is one kernel call per group, as long as the
groups stay as they were. Of the frozen ones those come first whose source has more bits than bf16,
so that the rest of the masters is a prefix, too.

Parameters that layers compute with in fp32, whatever the type of the others, have all their bits in
the plane of weights: frozen ones as a packing, trained ones as copies of their masters, which come
after what is trained.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import groupby, product
from math import lcm, prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatrain.base.units import align
from megatrain.tile.formats import FP8, FP32, OPERANDS, WeightFormat, operands, write_operands


def _factors(
    entry: "Entry", stored: Tensor, fast: Callable[[Any], Any]
) -> tuple[Tensor, Tensor | None]:
    """A parameter's values; or its codes and scales, where it is kept in float8."""
    shape = entry.shape
    if entry.packed is FP8:
        codes, scales = FP8.codes_and_scales(stored, shape)
        return codes.view(torch.float8_e4m3fn).view(shape), scales
    if entry.packed is None:
        return stored.view(shape), None
    values = stored.new_empty(shape)
    entry.packed.unpack(stored, values, fast)
    return values, None


Group = TypeVar("Group")

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

    @property
    def in_every_step(self) -> bool:
        """True if each step computes with the parameters."""
        return self not in (TileKind.MEDIA, TileKind.UNUSED)


@dataclass(frozen=True)
class Entry:
    """One parameter inside a tile: its Hugging Face name, shape, offset (elements) and group.

    Attributes:
        group: index of the optimizer's parameter group at first; None: frozen.
        wide: it is frozen, and its source has bits that bf16 does not hold.
        packed: how it is kept in the weights plane; None: as its values.
        multiplied: layers compute with its `OPERANDS`.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int | None
    wide: bool = False
    packed: WeightFormat | None = None
    multiplied: bool = False

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def stored(self) -> int:
        """Elements of a plane that the parameter takes."""
        return self.numel if self.packed is None else -(-self.packed.bytes_of(self.shape) // 2)

    @property
    def needs_unpacking(self) -> bool:
        """True if layers cannot compute with the parameter as it is kept."""
        return self.multiplied or self.packed not in (None, FP32, OPERANDS)

    def cut_in_rows(self) -> bool:
        """True if each row of the first dimension can be read, and unpacked, alone."""
        return not any(size % self.shape[0] for size in self._sections(1)[1:])

    def places_of(self, rows: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
        """`(start, stop)` in a plane of the bytes that no other row of the first dimension has.

        Args: `rows`: ascending; those that follow each other are in one range.
        """
        shared, *kinds = self._sections(itemsize)
        first, later = self.offset * itemsize + shared, {row + 1 for row in rows}
        starts = [row for row in rows if row not in later]
        stops = sorted(later.difference(rows))
        for num_bytes in kinds:
            of_row = num_bytes // self.shape[0]
            for start, stop in zip(starts, stops, strict=True):
                yield (first + start * of_row) // itemsize, -(-(first + stop * of_row) // itemsize)
            first += num_bytes

    def _sections(self, itemsize: int) -> tuple[int, ...]:
        plain = 0, self.numel * itemsize
        return plain if self.packed is None else self.packed.sections(self.shape)

    def memory(self, flat: Tensor) -> Tensor:
        """The elements that it takes of a flat plane of its tile."""
        return flat[self.offset : self.offset + self.stored]

    def view(self, flat: Tensor) -> Tensor:
        """This parameter in a flat plane of its tile."""
        values = self.memory(flat)
        if self.packed is FP32:
            values = values.view(torch.float32)
        return values[: self.numel].view(self.shape)


class TileLayout:
    """The places of a tile's parameters.

    Attributes:
        name: for messages, traces and files (`layer 3`, `embedding`, `head`).
        kind: what the tile, or the tile that this is a slice of, is.
        entries: the parameters in storage order.
        numel: length of the weights plane, in elements.
        trainable_numel: length of the gradient and moment planes; a prefix of `numel`.
        parts: `(start, stop)` of what is trained, of its copies in fp32, and of what is frozen
            with and without bits that bf16 does not hold; each `owned` parameter is one of its own.
        owned: stacks of experts; each rank's block of one is a number of whole experts, and its
            device holds no others.
        moved: how much further each part is than in the layout of one rank, if it is trained.
        copies: for each trained parameter that layers compute with in fp32, `(start, stop, at)` of
            its elements in each rank's block, and of the first copy, which is as long as two.
        ranks: into how many equal blocks each of these is cut.
    """

    def __init__(
        self,
        name: str,
        parameters: Iterable[tuple[str, torch.Size, int | None]],
        kind: TileKind = TileKind.LAYER,
        wide: Collection[str] = (),
        packed: Mapping[str, WeightFormat] | None = None,
        fp32: Collection[str] = (),
        multiplied: Collection[str] = (),
        *,
        ranks: int = 1,
        row: int = 1,
        owned: Collection[str] = (),
    ) -> None:
        """Args:
        parameters: as `(name, shape, group)`; group None means frozen.
        wide: names of those whose source has bits that bf16 does not hold.
        packed: how frozen ones are kept that are not kept as bf16, by name.
        fp32: names of those that layers compute with in fp32, whatever the type of the plane.
        multiplied: names of frozen ones that layers multiply by in float8.
        row: elements that no cut between ranks divides, counted from each part's beginning.
        """
        self.name, self.kind, self.ranks, self._row, self._fp32 = name, kind, ranks, row, fp32
        self.owned = frozenset(owned) if ranks > 1 else frozenset()
        self.copies: dict[str, list[tuple[int, int, int]]] = {}
        cut = ranks * lcm(ALIGNMENT, row) if ranks > 1 else ALIGNMENT
        entries: list[Entry] = []
        offset = 0
        formats = {**(packed or {}), **dict.fromkeys(fp32, FP32)}
        marked = [
            (n, shape, group, group is None and n in wide and n not in formats)
            for n, shape, group in parameters
        ]
        later = {name for name, packing in formats.items() if packing is not FP32}.union(multiplied)
        order = sorted(marked, key=lambda p: (p[2] is None, not p[3], p[0] in later, p[2] or 0))
        self.parts: list[tuple[int, int]] = []
        self.moved: list[int] = []
        self.trainable_numel = rank_offset = 0  # the place in the layout of one rank

        def part_of(p: Any) -> tuple[bool, bool, str]:
            return p[2] is None, p[3], p[0] if p[0] in self.owned else ""

        for (is_frozen, _, is_owned), members in groupby(order, key=part_of):
            if is_frozen and not any(entry.group is None for entry in entries):
                offset = self._place_copies(entries, offset, cut)
            start = offset
            self.moved.append(start - rank_offset)
            for parameter, shape, group, is_wide in members:
                packing = formats.get(parameter) if group is None else None
                traits = is_wide, packing, is_frozen and parameter in multiplied
                entries.append(Entry(parameter, tuple(shape), offset, group, *traits))
                offset = align(offset + entries[-1].stored, ALIGNMENT)
            rank_offset += offset - start
            offset = start + align(offset - start, ALIGNMENT if is_owned else cut)
            self.parts.append((start, offset))
            if not is_frozen:
                self.trainable_numel = offset
        if all(entry.group is not None for entry in entries):
            offset = self._place_copies(entries, offset, cut)
        self.entries, self.numel = tuple(entries), offset
        self.by_name = {entry.name: entry for entry in entries}

    def _place_copies(self, trained: Sequence[Entry], start: int, cut: int) -> int:
        """Lay out each rank's copies of its blocks from `start` on; returns their end."""
        longest = 0
        places: list[tuple[str, int, int, int, int]] = []
        for rank in range(self.ranks):
            copy_start, blocks = 0, [*self.blocks(rank)]
            copied = [entry for entry in trained if entry.name in self._fp32]
            for entry, (begin, size) in product(copied, blocks):
                first = max(entry.offset, begin)
                stop = min(entry.offset + entry.numel, begin + size)
                if first < stop:
                    places.append((entry.name, first, stop, rank, copy_start))
                    copy_start = align(copy_start + 2 * (stop - first), ALIGNMENT)
            longest = max(longest, copy_start)
        length = align(longest, cut // self.ranks)
        for name, first, stop, rank, copy_start in places:
            pieces = self.copies.setdefault(name, [])
            pieces.append((first, stop, start + rank * length + copy_start))
        if length:
            self.parts.append((start, start + self.ranks * length))
            self.moved.append(0)
        return start + self.ranks * length

    def computed(self, flat: Tensor) -> dict[str, Tensor]:
        """The weights that layers compute with, in the memory that `unpack` writes."""
        views = self.unpacked.views(flat)
        for entry in self.multiplied:
            del views[entry.name]
            path = entry.name.removesuffix("weight")
            of_entry = operands(entry.memory(flat), entry.shape).items()
            views |= {f"{path}{name}": values for name, values in of_entry}
        return views

    def values(self, flat: Tensor) -> dict[str, Tensor]:
        """Every parameter's values in the memory that `unpack` writes; copies of operands."""
        views = self.unpacked.views(flat)
        for entry in self.multiplied:
            views[entry.name] = flat.new_empty(entry.shape)
            FP8.unpack(entry.memory(flat), views[entry.name])
        return views

    @cached_property
    def multiplied(self) -> list[Entry]:
        """The parameters that layers multiply by in float8, where `unpack` writes them."""
        return [self.unpacked.by_name[entry.name] for entry in self.entries if entry.multiplied]

    @cached_property
    def needs_unpacking(self) -> bool:
        """True if layers cannot compute with some parameters as they are kept."""
        return any(entry.needs_unpacking for entry in self.entries)

    @cached_property
    def unpacked(self) -> "TileLayout":
        """The places of parameters once they are unpacked; of what is not packed the same."""
        if not self.needs_unpacking:
            return self
        parameters = [(e.name, torch.Size(e.shape), e.group) for e in self.entries]
        wide = [e.name for e in self.entries if e.wide]
        packed = {e.name: OPERANDS for e in self.entries if e.multiplied}
        given = self.name, parameters, self.kind, wide, packed, self._fp32
        return TileLayout(*given, ranks=self.ranks, row=self._row, owned=self.owned)

    @cached_property
    def local(self) -> "TileLayout":
        """The places on a rank's device, which has its own experts of the `owned` parameters."""
        if not self.owned:
            return self

        def shape(e: Entry) -> torch.Size:
            is_owned = e.name in self.owned
            return torch.Size((e.shape[0] // self.ranks, *e.shape[1:]) if is_owned else e.shape)

        parameters = [(e.name, shape(e), e.group) for e in self.entries]
        packed = {e.name: e.packed for e in self.entries if e.packed not in (None, FP32)}
        traits = [e.name for e in self.entries if e.wide], packed, self._fp32
        given = self.name, parameters, self.kind, *traits, [e.name for e in self.multiplied]
        return TileLayout(*given, ranks=self.ranks, row=self._row, owned=self.owned)

    @cached_property
    def gathered(self) -> list[tuple[int, int]]:
        """The parts, on the device, that have a block of each rank."""
        owned_starts = {entry.offset for entry in self.local.entries if entry.name in self.owned}
        return [part for part in self.local.parts if part[0] not in owned_starts]

    def local_blocks(self, rank: int) -> Iterator[tuple[int, int]]:
        """As `blocks`, with the block's place on the device."""
        for (_, size), part in zip(self.blocks(rank), self.local.parts, strict=True):
            yield part[0] + (rank * size if part in self.gathered else 0), size

    def unpack(
        self,
        stored: Tensor,
        out: Tensor,
        fast: Callable[[Any], Any],
        stacks: Collection[str] = (),
        rows: Sequence[int] | None = None,
    ) -> None:
        """Write the parameters of the weights plane `stored` to `out`, laid out as `unpacked`.

        Args:
            fast: gives what a packing's `expand`, or `write_operands`, is compiled to.
            stacks: those to leave out; with `rows` the only ones to write, and only these rows.
        """
        plain = next((entry.offset for entry in self.entries if entry.needs_unpacking), self.numel)
        if rows is None:
            out[:plain].copy_(stored[:plain])
        for entry in self.entries:
            left_out = entry.name in stacks if rows is None else entry.name not in stacks
            if left_out or (rows is None and entry.offset < plain):
                continue
            memory, to = entry.memory(stored), self.unpacked.by_name[entry.name]
            if entry.multiplied:
                written = operands(to.memory(out), to.shape)
                fast(write_operands)(*_factors(entry, memory, fast), *written.values())
            elif entry.packed is None:
                for row in (slice(None),) if rows is None else rows:
                    to.view(out)[row].copy_(entry.view(stored)[row])
            else:
                entry.packed.unpack(memory, to.view(out), fast, rows)

    def blocks(self, rank: int) -> Iterator[tuple[int, int]]:
        """A rank's block of each part: its first element, and how many it has."""
        for start, stop in self.parts:
            size = (stop - start) // self.ranks
            yield start + rank * size, size

    def runs(self, group_of: Mapping[str, Group]) -> list[tuple[Group, int, int]]:
        """`(group, start, stop)` of each contiguous run of trainable parameters of one group."""
        runs: list[tuple[Group, int, int]] = []
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
        """Every parameter of the tile, as layers compute with it, in its full-length weights."""
        views = {entry.name: entry.view(flat) for entry in self.entries}
        for name, pieces in self.copies.items():
            parts = [flat[offset : offset + 2 * (stop - start)] for start, stop, offset in pieces]
            copy = parts[0] if len(parts) == 1 else torch.cat(parts)
            views[name] = copy.view(torch.float32).view(self.by_name[name].shape)
        return views
