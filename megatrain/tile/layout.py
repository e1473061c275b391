"""The flat layout of a tile: one list of offsets, the same in every plane.

Trainable parameters come first, one contiguous run for each optimizer group (an update is one
kernel call for each run), frozen ones last: gradient and states cover a prefix. Frozen parameters
whose source has more bits than bf16 come before the others, so the remainder covers a prefix.

Parameters that layers compute with in fp32 have all bits in the weights plane: frozen ones in the
format `FP32`, trained ones as copies of their masters behind all trained parameters.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import groupby, product
from math import lcm, prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatrain.base.units import align
from megatrain.tile.formats import FP8, FP32, OPERANDS, WeightFormat, operands, write_operands

Group = TypeVar("Group")

# Elements: 128 bf16 values are 256 bytes, so every parameter starts on a boundary that suits the
# widest loads of devices and the host's cache lines.
ALIGNMENT = 128

# No tile has more elements, so `tile index * MOST_ELEMENTS + element` numbers all elements.
MOST_ELEMENTS = 1 << 40


class TileKind(Enum):
    """The unit of the model whose parameters a tile holds."""

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
    """One parameter inside a tile: its Hugging Face name, shape, offset (elements) and group."""

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int | None  # index of its parameter group when the optimizer was made; None: frozen
    wide: bool = False  # True if it is frozen, and its source has bits that bf16 does not hold
    packed: WeightFormat | None = None  # its format in the weights plane; None: plain values
    is_operand: bool = False  # True if layers compute with its `OPERANDS` in float8
    copied: bool = False  # True if it is trained, and layers compute with fp32 copies of its master

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def stored(self) -> int:
        """Elements of a plane that the parameter takes."""
        return self.numel if self.packed is None else -(-self.packed.bytes_of(self.shape) // 2)

    @property
    def needs_unpacking(self) -> bool:
        """True if layers cannot compute with the parameter in its format of the weights plane."""
        return self.is_operand or self.packed not in (None, FP32, OPERANDS)

    def cut_in_rows(self) -> bool:
        """True if each row of the first dimension can be copied and unpacked alone."""
        _, *row_sections = self._sections(1)
        return not any(num_bytes % self.shape[0] for num_bytes in row_sections)

    def places_of(self, rows: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
        """Yield `(start, stop)` in the weights plane of bytes that belong to `rows` alone.

        Args: `rows`: of the first dimension, ascending; adjacent rows share a range.
        """
        shared_bytes, *row_sections = self._sections(itemsize)
        first_byte = self.offset * itemsize + shared_bytes
        next_rows = {row + 1 for row in rows}
        starts, stops = [r for r in rows if r not in next_rows], sorted(next_rows.difference(rows))
        for num_bytes in row_sections:
            row_bytes = num_bytes // self.shape[0]
            for start, stop in zip(starts, stops, strict=True):
                stop_byte = first_byte + stop * row_bytes
                yield (first_byte + start * row_bytes) // itemsize, -(-stop_byte // itemsize)
            first_byte += num_bytes

    def _sections(self, itemsize: int) -> tuple[int, ...]:
        """The parameter's bytes as in `WeightFormat.sections`; `itemsize`: of a plain value."""
        plain = 0, self.numel * itemsize
        return plain if self.packed is None else self.packed.sections(self.shape)

    def memory(self, flat: Tensor) -> Tensor:
        """The elements that the parameter takes in a flat plane of its tile."""
        return flat[self.offset : self.offset + self.stored]

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's values in a flat plane of its tile, in its shape."""
        values = self.memory(flat)
        if self.packed is FP32:
            values = values.view(torch.float32)
        return values[: self.numel].view(self.shape)


@dataclass(frozen=True)
class Span:
    """`numel` consecutive elements of a tile that one rank keeps.

    Attributes: the first element's place in the rank's planes (`start`), in the tile (`at`) and in
    the tile's slot (`slot`). In the layout of one rank the span begins at `at - moved`.
    """

    start: int
    at: int
    numel: int
    slot: int = 0
    moved: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.numel


def _order(entry: Entry) -> tuple[bool, bool, bool, int]:
    """The key by which a tile's parameters are sorted."""
    is_packed = entry.is_operand or entry.packed not in (None, FP32)
    return entry.group is None, not entry.wide, is_packed, entry.group or 0


class TileLayout:
    """The places of a tile's parameters.

    Attributes:
        name: such as `layer 3`, `embedding` or `head`, for messages, traces and files.
        kind: the unit whose parameters the tile holds.
        entries: the parameters in storage order; trainable: those that have a gradient.
        numel: length of the weights plane, in elements.
        trainable_numel: length of the gradient and state planes; a prefix of `numel`.
        parts: `(start, stop)` of the trained parameters, of their copies in fp32, and of the frozen
            ones with and without bits that bf16 does not hold. Each `owned` parameter is a part.
        owned: stacks of experts of which each rank keeps whole experts, and its device no others.
        moved: for each part, by how many elements it starts later than in the layout of one rank.
        copies: `(start, stop, at)` for each rank's block of each trained parameter that layers
            compute with in fp32: the block's elements, and the start of their copy, twice as long.
        ranks: the number of equal blocks into which each part is cut.
        needs_unpacking: True if a parameter rests in a format that layers cannot compute with.
    """

    def __init__(
        self,
        name: str,
        parameters: Iterable[Entry],
        kind: TileKind = TileKind.LAYER,
        *,
        ranks: int = 1,
        row: int = 1,
        owned: Collection[str] = (),
    ) -> None:
        """Args:
        parameters: in any order; the layout sorts them and gives them new offsets.
        row: elements of a row, which cuts between ranks keep whole in each part.
        """
        self.name, self.kind = name, kind
        self.ranks, self._row = ranks, row
        self.owned = frozenset(owned) if ranks > 1 else frozenset()
        self.copies: dict[str, list[tuple[int, int, int]]] = {}
        part_alignment = ranks * lcm(ALIGNMENT, row) if ranks > 1 else ALIGNMENT
        entries: list[Entry] = []
        self.parts: list[tuple[int, int]] = []
        self.moved: list[int] = []
        offset = self.trainable_numel = one_rank_offset = 0  # the offset in the layout of one rank
        in_order = sorted(parameters, key=_order)
        for (is_frozen, _, owned_name), members in groupby(in_order, key=self._part_key):
            if is_frozen and not any(entry.group is None for entry in entries):
                offset = self._place_copies(entries, offset, part_alignment)
            start = offset
            self.moved.append(start - one_rank_offset)
            for entry in members:
                entries.append(replace(entry, offset=offset))
                offset = align(offset + entry.stored, ALIGNMENT)
            one_rank_offset += offset - start
            offset = start + align(offset - start, ALIGNMENT if owned_name else part_alignment)
            self.parts.append((start, offset))
            if not is_frozen:
                self.trainable_numel = offset
        if all(entry.group is not None for entry in entries):
            offset = self._place_copies(entries, offset, part_alignment)
        self.entries, self.numel = tuple(entries), offset
        self.by_name = {entry.name: entry for entry in entries}
        self.trainable = tuple(entry for entry in entries if entry.group is not None)
        self.num_parameters = sum(entry.numel for entry in entries)  # padding not counted
        self.needs_unpacking = any(entry.needs_unpacking for entry in entries)

    def _part_key(self, entry: Entry) -> tuple[bool, bool, str]:
        """The key that all parameters of a part of the tile share."""
        return entry.group is None, entry.wide, entry.name if entry.name in self.owned else ""

    def _with(self, entries: Iterable[Entry]) -> "TileLayout":
        """The layout of these parameters, otherwise like this one."""
        return TileLayout(
            self.name, entries, self.kind, ranks=self.ranks, row=self._row, owned=self.owned
        )

    def _place_copies(self, trained: Sequence[Entry], start: int, part_alignment: int) -> int:
        """Lay out the ranks' fp32 copies of their blocks from `start` on; return the end."""
        longest = 0
        places: list[tuple[str, int, int, int, int]] = []
        for rank in range(self.ranks):
            copy_start, blocks = 0, [*self.blocks(rank)]
            copied = [entry for entry in trained if entry.copied]
            for entry, (block_start, block_size) in product(copied, blocks):
                first = max(entry.offset, block_start)
                stop = min(entry.offset + entry.numel, block_start + block_size)
                if first < stop:
                    places.append((entry.name, first, stop, rank, copy_start))
                    copy_start = align(copy_start + 2 * (stop - first), ALIGNMENT)
            longest = max(longest, copy_start)
        length = align(longest, part_alignment // self.ranks)
        for name, first, stop, rank, copy_start in places:
            pieces = self.copies.setdefault(name, [])
            pieces.append((first, stop, start + rank * length + copy_start))
        if length:
            self.parts.append((start, start + self.ranks * length))
            self.moved.append(0)
        return start + self.ranks * length

    def computed(self, flat: Tensor) -> dict[str, Tensor]:
        """The weights as layers compute with them, in memory that `unpack` has written."""
        views = self.unpacked.views(flat)
        for entry in self.operand_entries:
            del views[entry.name]
            path = entry.name.removesuffix("weight")
            tensors = operands(entry.memory(flat), entry.shape)
            views |= {f"{path}{name}": tensor for name, tensor in tensors.items()}
        return views

    def values(self, flat: Tensor) -> dict[str, Tensor]:
        """Every parameter's values in memory that `unpack` has written; from operands, copies."""
        views = self.unpacked.views(flat)
        for entry in self.operand_entries:
            views[entry.name] = flat.new_empty(entry.shape)
            FP8.unpack(entry.memory(flat), views[entry.name])
        return views

    @cached_property
    def operand_entries(self) -> list[Entry]:
        """The parameters that layers multiply by in float8, as entries of `unpacked`."""
        return [self.unpacked.by_name[entry.name] for entry in self.entries if entry.is_operand]

    @cached_property
    def unpacked(self) -> "TileLayout":
        """The layout of the unpacked parameters, in which plain ones have the same places."""
        if not self.needs_unpacking:
            return self

        def unpacked(entry: Entry) -> Entry:
            if entry.is_operand:
                return replace(entry, packed=OPERANDS, is_operand=False, wide=False)
            return replace(entry, packed=None) if entry.needs_unpacking else entry

        return self._with(map(unpacked, self.entries))

    @cached_property
    def local(self) -> "TileLayout":
        """The layout on a rank's device, which has the rank's experts alone of `owned` stacks."""
        if not self.owned:
            return self
        return self._with(
            replace(entry, shape=(entry.shape[0] // self.ranks, *entry.shape[1:]))
            if entry.name in self.owned
            else entry
            for entry in self.entries
        )

    @cached_property
    def gathered(self) -> list[tuple[int, int]]:
        """The parts that are gathered: on the device they have the blocks of all ranks."""
        owned_starts = {entry.offset for entry in self.local.entries if entry.name in self.owned}
        return [part for part in self.local.parts if part[0] not in owned_starts]

    def spans(self, rank: int) -> list[Span]:
        """A rank's block of each part; of a single rank, one span of all parts."""
        if self.ranks == 1:
            return [Span(0, 0, self.numel)]
        spans, start = list[Span](), 0
        parts = zip(self.blocks(rank), self.local.parts, self.moved, strict=True)
        for (at, numel), part, moved in parts:
            slot = part[0] + (rank * numel if part in self.gathered else 0)
            spans.append(Span(start, at, numel, slot, moved))
            start += numel
        return spans

    def unpack(
        self,
        stored: Tensor,
        out: Tensor,
        compiled: Callable[[Any], Any],
        left_out: Collection[str] = (),
        rows: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Write the parameters of the weights plane `stored` to `out`, laid out as `unpacked`.

        Args:
            compiled: returns a format's `expand`, or `write_operands`, compiled or not.
            left_out: parameters that are not written.
            rows: by name, the only parameters and rows to write; None: all.
        """
        plain_stop = next((e.offset for e in self.entries if e.needs_unpacking), self.numel)
        if rows is None:
            out[:plain_stop].copy_(stored[:plain_stop])
        for entry in self.entries:
            if rows is not None and entry.name not in rows:
                continue
            if rows is None and (entry.name in left_out or entry.offset < plain_stop):
                continue
            chosen = None if rows is None else rows[entry.name]
            memory = entry.memory(stored)
            to = self.unpacked.by_name[entry.name]
            if entry.is_operand:
                values, scales = memory, None
                if entry.packed is FP8:
                    codes, scales = FP8.codes_and_scales(memory, entry.shape)
                    values = codes.view(torch.float8_e4m3fn)
                elif entry.packed is not None:
                    values = memory.new_empty(entry.shape)
                    entry.packed.unpack(memory, values, compiled)
                written = operands(to.memory(out), to.shape).values()
                compiled(write_operands)(values.view(entry.shape), scales, *written)
            elif entry.packed is None:
                for row in (slice(None),) if chosen is None else chosen:
                    to.view(out)[row].copy_(entry.view(stored)[row])
            else:
                entry.packed.unpack(memory, to.view(out), compiled, chosen)

    def blocks(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield `(start, size)` of a rank's block of each part."""
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

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter's values in the weights of all ranks; of one kept in fp32, its fp32 copy.

        A copy of which several ranks have pieces is joined in new memory.
        """
        views = {entry.name: entry.view(flat) for entry in self.entries}
        for name, pieces in self.copies.items():
            # An fp32 value takes two elements of the bf16 weights.
            parts = [flat[offset : offset + 2 * (stop - start)] for start, stop, offset in pieces]
            copy = parts[0] if len(parts) == 1 else torch.cat(parts)
            views[name] = copy.view(torch.float32).view(self.by_name[name].shape)
        return views
