"""Slices: what of a tile is streamed together, and has its gradient summed, where a tile is too
large for that as a whole. Its planes stay as they are.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from megatrain.base.units import align
from megatrain.device import Buffer
from megatrain.errors import InputError
from megatrain.model.projection import Projection
from megatrain.model.spec import Layer, ModelSpec
from megatrain.store.store import Rests, Span, Tile
from megatrain.tile import TileKind, TileLayout
from megatrain.tile.layout import ALIGNMENT

_ROWS = 64  # what numbers of a range's rows are multiples of: kernels want rows of logits aligned

RowRanges = Mapping[str, tuple[int, int] | None]


@dataclass(eq=False)
class TileSlice:
    """Rows of some parameters of a tile; wherever a tile is streamed, this may be.

    Attributes:
        layout: of what is streamed.
        spans: where what this rank has of it lies in the tile's planes.
        begins, ends: whether its gradient is the tile's first, or last, of a step.
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
        """The elements whose gradient this rank measures: the first rank all, others none."""
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

    @property
    def all(self) -> list[TileSlice]:
        return [self.rest, *self.rows]


@dataclass(frozen=True)
class ExpertSlices:
    """A layer's slices: its experts in groups, all other parameters, and these once more.

    Attributes:
        bounds: the first expert of each group, and the end.
    """

    core: TileSlice
    groups: list[TileSlice]
    again: TileSlice
    bounds: list[int]

    @property
    def all(self) -> list[TileSlice]:
        return [self.core, *self.groups, self.again]


def slice_tile(tile: Tile, name: str, rows: RowRanges, *, trainable: bool = True) -> TileSlice:
    """Rows `[start, stop)` of each parameter in `rows`; None: the whole parameter."""
    layout = _layout(tile.layout, name, rows, trainable=trainable)
    spans: list[Span] = []
    for entry in layout.entries:
        full, place = tile.layout.by_name[entry.name], rows[entry.name]
        offset = full.offset + (place[0] * prod(entry.shape[1:]) if place else 0)
        numel = entry.numel
        if place is None or place[1] == full.shape[0]:  # then with what is left free behind it
            end = align(full.offset + full.numel, ALIGNMENT)
            numel = min(align(numel, ALIGNMENT), end - offset)
        last = spans[-1] if spans else Span(0, 0, 0)
        if (last.start + last.numel, last.at + last.numel) == (offset, entry.offset):
            spans[-1:] = [Span(last.start, last.at, last.numel + numel)]
        else:
            spans.append(Span(offset, entry.offset, numel))
    return TileSlice(tile, layout, spans if tile.layout.ranks == 1 else [*_own(tile, spans)])


def _own(tile: Tile, spans: Sequence[Span]) -> Iterator[Span]:
    """What this rank has of ranges of the whole tile."""
    for span, block in itertools.product(spans, tile.spans):
        start, stop = max(span.start, block.at), min(span.stop, block.at + block.numel)
        if start < stop:
            yield Span(block.start + start - block.at, span.at + start - span.start, stop - start)


def _layout(tile: TileLayout, name: str, rows: RowRanges, *, trainable: bool = True) -> TileLayout:
    parameters = []
    for entry in tile.entries:
        if entry.name in rows:
            place, shape = rows[entry.name], entry.shape
            shape = shape if place is None else (place[1] - place[0], *shape[1:])
            parameters.append((entry.name, torch.Size(shape), entry.group if trainable else None))
    return TileLayout(name, parameters, tile.kind)


def expert_slices(tile: Tile, layer: Layer, max_stream_bytes: int, itemsize: int) -> ExpertSlices:
    """The slices of a layer of more than `max_stream_bytes`.

    Raises:
        InputError: a slice would be larger.
    """
    _check(_indivisible(tile.layout, layer, itemsize), max_stream_bytes)
    experts, (own, rest) = layer.kind.experts, _names(tile.layout, layer)
    assert experts is not None
    one = _layout(tile.layout, "", dict.fromkeys(own, (0, 1)))
    num_groups = -(-experts.num // (max_stream_bytes // itemsize // one.numel))
    bounds = [experts.num * group // num_groups for group in range(num_groups + 1)]
    groups = [
        slice_tile(tile, f"{tile.name} experts {a} to {b - 1}", dict.fromkeys(own, (a, b)))
        for a, b in itertools.pairwise(bounds)
    ]
    core = slice_tile(tile, f"{tile.name} without experts", dict.fromkeys(rest))
    again = slice_tile(tile, f"{tile.name} again", dict.fromkeys(rest), trainable=False)
    again.begins = core.ends = True  # the backward comes from the end
    return ExpertSlices(core, groups, again, bounds)


def vocab_slices(
    tile: Tile, projection: Projection, max_stream_bytes: int, slot_bytes: int, itemsize: int
) -> VocabSlices:
    """The slices of a head of more than `max_stream_bytes`; rows are as many as fit in a slot.

    Raises:
        InputError: a slice would be larger.
    """
    _check(_parts_of_head(tile.layout, projection, itemsize), max_stream_bytes)
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


def least_split(spec: ModelSpec, layouts: Sequence[TileLayout], itemsize: int) -> int:
    """The least `max_stream_bytes` for a model; if its largest tile cannot be split, its bytes."""
    tiles = [layout for layout in layouts if layout.kind is TileKind.LAYER]
    [head_tile] = (layout for layout in layouts if layout.kind is TileKind.HEAD)
    head = _parts_of_head(head_tile, spec.projection, itemsize)
    layers = [
        part
        for tile, layer in zip(tiles, spec.layers, strict=True)
        for part in _indivisible(tile, layer, itemsize)
    ]
    return max(num_bytes for _, num_bytes in [*layers, *head])


def _check(parts: list[tuple[str, int]], max_stream_bytes: int) -> None:
    for what, num_bytes in parts:
        if num_bytes > max_stream_bytes:
            raise InputError(
                f"placement.max_stream_bytes is {max_stream_bytes}, but {what} takes {num_bytes} "
                "bytes and cannot be split; set it to that or more"
            )


def _parts_of_head(
    tile: TileLayout, projection: Projection, itemsize: int
) -> list[tuple[str, int]]:
    """What of the head is streamed as a whole in any case, and its bytes."""
    if projection.obstacle:
        return [(f"the head, {projection.obstacle},", tile.numel * itemsize)]
    words = "all but the rows of the head", "a row of the head"
    return _least_slices(tile, projection.names, words, itemsize)


def _indivisible(tile: TileLayout, layer: Layer, itemsize: int) -> list[tuple[str, int]]:
    """What of a layer is streamed as a whole in any case, and its bytes."""
    if layer.kind.experts is None:
        what = f"{tile.name}, which has no experts that could be taken some at a time,"
        return [(what, tile.numel * itemsize)]
    words = f"all but the experts of {tile.name}", f"an expert of {tile.name}"
    return _least_slices(tile, _names(tile, layer)[0], words, itemsize)


def _least_slices(
    tile: TileLayout, own: Sequence[str], words: tuple[str, str], itemsize: int
) -> list[tuple[str, int]]:
    """Smallest slices, in `words` and bytes: all but the parameters `own`, and one row of these."""
    rest = _layout(tile, "", dict.fromkeys(e.name for e in tile.entries if e.name not in own))
    one = _layout(tile, "", dict.fromkeys(own, (0, 1)))
    sizes = (layout.numel * itemsize for layout in (rest, one))
    return list(zip(words, sizes, strict=True))


def _names(tile: TileLayout, layer: Layer) -> tuple[list[str], list[str]]:
    """Names of the experts' parameters, and names of the layer's other parameters."""
    assert layer.kind.experts is not None
    prefix = f"{layer.name}.{layer.kind.experts.path}."
    own = [f"{prefix}{name}" for name in layer.kind.experts.shapes]
    return own, [entry.name for entry in tile.entries if entry.name not in own]
