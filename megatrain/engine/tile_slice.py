"""Slices: what of a head is streamed together, and has its gradient summed, where the head is too
large for that as a whole. Its planes stay as they are.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from megatrain.base.units import align
from megatrain.device import Buffer
from megatrain.errors import InputError
from megatrain.model.projection import Projection
from megatrain.model.spec import ModelSpec
from megatrain.store.store import Rests, Span, Tile
from megatrain.tile import TileKind, TileLayout
from megatrain.tile.layout import ALIGNMENT

_ROWS = 64  # what numbers of a range's rows are multiples of: kernels want rows of logits aligned

RowRanges = Mapping[str, tuple[int, int] | None]


@dataclass(eq=False)
class TileSlice:
    """Rows of some parameters of a tile, streamed in place of the tile.

    Attributes:
        layout: of the streamed rows.
        spans: the places of this rank's part in the tile's planes.
        begins, ends: its gradient is the tile's first, or last, in a step.
    """

    whole: Tile
    layout: TileLayout
    spans: list[Span]
    begins: bool = False
    ends: bool = False

    @property
    def index(self) -> int:
        return self.whole.index

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def rests(self) -> Rests:
        return self.whole.rests

    @property
    def weights(self) -> Buffer:
        return self.whole.weights

    @property
    def trained(self) -> slice:
        """The elements whose gradient this rank measures: all on rank 0, none on others."""
        return slice(0, self.layout.trainable_numel if self.whole.rank == 0 else 0)

    @property
    def updated(self) -> object:
        return self.whole.updated


@dataclass(frozen=True)
class VocabSlices:
    """The head's slices: its projection's rows in ranges, and all other parameters.

    Attributes:
        bounds: the first row of each range, and the end.
    """

    rest: TileSlice
    rows: list[TileSlice]
    bounds: list[int]


def slice_tile(tile: Tile, name: str, rows: RowRanges) -> TileSlice:
    """Slice rows `[start, stop)` of each parameter in `rows`; None: the whole parameter."""
    layout = _layout(tile.layout, name, rows)
    spans: list[Span] = []
    for entry in layout.entries:
        full, place = tile.layout.by_name[entry.name], rows[entry.name]
        offset = full.offset + (place[0] * prod(entry.shape[1:]) if place else 0)
        numel = entry.numel
        if place is None or place[1] == full.shape[0]:  # then with the padding after it
            end = align(full.offset + full.numel, ALIGNMENT)
            numel = min(align(numel, ALIGNMENT), end - offset)
        last = spans[-1] if spans else Span(0, 0, 0)
        if (last.start + last.numel, last.at + last.numel) == (offset, entry.offset):
            spans[-1:] = [Span(last.start, last.at, last.numel + numel)]
        else:
            spans.append(Span(offset, entry.offset, numel))
    if tile.layout.ranks == 1:
        return TileSlice(tile, layout, spans)
    blocks = []  # this rank's part of these ranges
    for span, block in itertools.product(spans, tile.spans):
        start, stop = max(span.start, block.at), min(span.stop, block.at + block.numel)
        if start < stop:
            shift = start - span.start
            blocks.append(Span(block.start + start - block.at, span.at + shift, stop - start))
    return TileSlice(tile, layout, blocks)


def _layout(tile: TileLayout, name: str, rows: RowRanges) -> TileLayout:
    parameters = []
    for entry in tile.entries:
        if entry.name in rows:
            place, shape = rows[entry.name], entry.shape
            shape = shape if place is None else (place[1] - place[0], *shape[1:])
            parameters.append((entry.name, torch.Size(shape), entry.group))
    return TileLayout(name, parameters, tile.kind)


def vocab_slices(
    tile: Tile, projection: Projection, max_stream_bytes: int, slot_bytes: int, itemsize: int
) -> VocabSlices:
    """Split a head larger than `max_stream_bytes`; a slice has as many rows as fit in a slot.

    Raises:
        InputError: a slice would be larger than `max_stream_bytes`.
    """
    for part, num_bytes in _parts_of_head(tile.layout, projection, itemsize):
        require_streamable(part, num_bytes, max_stream_bytes)
    entries = [tile.layout.by_name[name] for name in projection.names]
    row, padding = sum(prod(e.shape[1:]) for e in entries), ALIGNMENT * len(entries)
    most = max(1, (min(max_stream_bytes, slot_bytes) // itemsize - padding) // row)  # rows
    step = _ROWS if most >= _ROWS else 1
    count = -(-projection.num // (most // step * step))
    rows = align(-(-projection.num // count), step)
    bounds = [*range(0, projection.num, rows), projection.num]
    tile_slices = [
        slice_tile(
            tile, f"{tile.name} rows {a} to {b - 1}", dict.fromkeys(projection.names, (a, b))
        )
        for a, b in itertools.pairwise(bounds)
    ]
    names = [e.name for e in tile.layout.entries if e.name not in projection.names]
    rest = slice_tile(tile, f"{tile.name} without rows", dict.fromkeys(names))
    tile_slices[-1].begins = rest.ends = True  # the backward comes from the end
    return VocabSlices(rest, tile_slices, bounds)


def least_split(spec: ModelSpec, layouts: Sequence[TileLayout], itemsize: int) -> int | None:
    """The least `max_stream_bytes` for a model; None: splitting its head would save nothing."""
    layers = [layout.numel * itemsize for layout in layouts if layout.kind is TileKind.LAYER]
    [head] = (layout for layout in layouts if layout.kind is TileKind.HEAD)
    parts = _parts_of_head(head, spec.projection, itemsize)
    least = max([*layers, *(num_bytes for _, num_bytes in parts)])
    return least if least < head.numel * itemsize else None


def require_streamable(part: str, num_bytes: int, max_stream_bytes: int) -> None:
    """Raises InputError: `part`, which cannot be split, is larger than `max_stream_bytes`."""
    if num_bytes > max_stream_bytes:
        raise InputError(
            f"placement.max_stream_bytes is {max_stream_bytes}, but {part} takes {num_bytes} "
            "bytes and cannot be split; set it to that or more"
        )


def _parts_of_head(
    tile: TileLayout, projection: Projection, itemsize: int
) -> list[tuple[str, int]]:
    """The parts of the head that cannot be split, and their bytes."""
    if projection.obstacle:
        return [(f"the head, {projection.obstacle},", tile.numel * itemsize)]
    names = [entry.name for entry in tile.entries if entry.name not in projection.names]
    rest, row = dict.fromkeys(names), dict.fromkeys(projection.names, (0, 1))
    return [
        ("all but the rows of the head", _layout(tile, "", rest).numel * itemsize),
        ("a row of the head", _layout(tile, "", row).numel * itemsize),
    ]
