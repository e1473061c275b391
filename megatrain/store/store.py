"""Keeps the planes of every tile, in host memory, on the device or on a disk.

The optimizer's rule says which planes there are, and their bytes (optim/rule.py). Only the plane of
gradients belongs to the sink (engine/sink.py).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import chain, cycle
from typing import Any

import torch
from torch import Tensor

from megatrain import kernels
from megatrain.base.units import align
from megatrain.base.whole_files import BLOCK
from megatrain.device import Buffer, Device, disk
from megatrain.device.base import COMPUTE, DISK_IN, DISK_OUT, DISK_WEIGHTS, UPDATE, Memory, Name
from megatrain.device.disk import PlaneFile
from megatrain.errors import InputError
from megatrain.kernels import reference
from megatrain.optim import Plane, PlaneKind, Rule, tile_planes
from megatrain.parallel.distributed import Ranks
from megatrain.placement import CPU_PLACEMENT, Placement
from megatrain.tile import Entry, Span, TileKind, TileLayout

_PINNED = (PlaneKind.WEIGHTS, PlaneKind.GRADIENT)  # copied between host and device


class Tier(Enum):
    """The kind of memory that a plane of a tile rests on."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class Rests:
    """Where a tile rests: the tier of each kind of plane."""

    weights: Tier = Tier.HOST
    remainder: Tier = Tier.HOST
    moments: Tier = Tier.HOST
    gradient: Tier = Tier.HOST
    stays: bool = False  # the device keeps a copy of the weights from one visit to the next
    shared: bool = False  # the device reads weights and writes the gradient in host memory

    @property
    def local(self) -> bool:
        """True if the device computes with weights and gradient in place, without copies."""
        return self.shared or self.weights is Tier.DEVICE

    def tier(self, plane: Plane) -> Tier:
        """The tier of a plane. A plane that only the device uses rests on the host, not a disk."""
        tier: Tier = getattr(self, plane.kind.value)
        return Tier.HOST if plane.on_device and tier is Tier.DISK else tier

    @property
    def streamed(self) -> bool:
        """True if weights are copied to the device for each use."""
        return not self.local and not self.stays

    @property
    def updates(self) -> str:
        """The stream of the tile's updates: COMPUTE if its states rest on the device."""
        return COMPUTE if self.moments is Tier.DEVICE else UPDATE


_RESIDENT = Rests(Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)  # all planes


@dataclass(frozen=True)
class Reader:
    """A save that is reading a tile's planes: the next update of the tile waits for the save."""

    event: Any  # the update may begin after this
    wait: str  # the name of that wait
    # copies the bytes that the save still has to read, on the update's stream
    set_aside: Callable[[], None] | None = None


@dataclass(eq=False)
class Tile:
    """One tile's planes, with the offsets of its layout.

    Attributes:
        weights: the plane that is streamed: bf16, or the fp32 master if layers compute in fp32.
        remainder: int16; `fp32 master = (weights << 16) + remainder`. Some rules keep its upper
            byte alone, as int8. None in fp32. Frozen parameters from bf16 sources have none.
        states: the planes of the optimizer's states, in the order of its rule.
        spans: the blocks of the tile that this rank keeps; sums: their trained parts, as slices of
            the tile's gradient sums on the device.
        own_numel: the number of trained elements in this rank's blocks; trained: these elements of
            the tile, if it has no owned experts.
    """

    index: int
    layout: TileLayout
    planes: Mapping[Plane, Buffer]
    rests: Rests = Rests()
    version: int = 0  # the number of updates applied or started
    updated: Any = None  # event of the newest update; None when there is nothing to wait for
    written: Any = None  # event after which planes on a disk have the newest update, too
    readers: tuple[Reader, ...] = ()  # saves that the next update has to wait for
    idle: Collection[str] = ()  # trained parameters without a gradient: this step skips them
    skipped: Counter[str] = field(default_factory=Counter)  # by parameter, the skipped updates
    rank: int = 0  # the planes hold this rank's block of each part of the layout, and nothing else

    def __post_init__(self) -> None:
        kinds = {plane.kind: buffer for plane, buffer in self.planes.items()}
        self.weights, self.remainder = kinds[PlaneKind.WEIGHTS], kinds.get(PlaneKind.REMAINDER)
        self.states = {p: b for p, b in self.planes.items() if p.kind is PlaneKind.STATE}
        self.name, self.spans = self.layout.name, self.layout.spans(self.rank)
        end = self.layout.local.trainable_numel  # of the gradient sums
        bounds = [(s.slot, min(s.slot + s.numel, end)) for s in self.spans if s.slot < end]
        self.sums = [slice(start, stop) for start, stop in bounds]
        self.own_numel = numel = self.layout.trainable_numel // self.layout.ranks
        self.trained = slice(self.rank * numel, (self.rank + 1) * numel)

    def spans_without(self, stacks: Sequence[Entry]) -> list[Span]:
        """The `spans` without the rows of the parameters `stacks` (with one rank only)."""
        size = self.weights.data.itemsize
        left_out = [place for e in stacks for place in e.places_of(range(e.shape[0]), size)]
        if not left_out:
            return self.spans
        spans, numel = [], self.layout.numel
        end = 0  # of the ranges that have been left out so far
        for start, stop in sorted([*left_out, (numel, numel)]):
            if end < start:
                spans.append(Span(end, end, start - end, end))
            end = max(end, stop)
        return spans

    def shards(self, plane: Plane, numel: int) -> Iterator[Span]:
        """Yield this rank's spans, counted in a plane's values; `numel`: those of the tile."""
        size = plane.group_size
        for span in self.spans_of(0, numel * size):
            yield Span(span.start // size, span.at // size, span.numel // size)

    def spans_of(self, first: int, last: int) -> Iterator[Span]:
        """Yield this rank's parts of the tile's elements `first` to `last` (excluded)."""
        for span in self.spans:
            at = max(first, span.at)  # place in the tile
            numel, skipped = min(last, span.at + span.numel) - at, at - span.at
            if numel > 0:
                yield Span(span.start + skipped, at, numel, span.slot + skipped, span.moved)

    def place(self, entry: Entry) -> tuple[slice, slice]:
        """The slice of this rank's planes with values of a parameter, and these values' slice."""
        for span in self.spans_of(entry.offset, entry.offset + entry.stored):
            first = span.at - entry.offset
            return slice(span.start, span.stop), slice(first, first + span.numel)
        return slice(0, 0), slice(0, 0)

    def remainder_of(self, entry: Entry) -> Buffer | None:
        """The remainder plane; None if it has no part of this parameter's master."""
        remainders = (b for p, b in self.planes.items() if b is self.remainder and p.has(entry))
        return next(remainders, None)

    def write_master(self, entry: Entry, values: Tensor, threads: int = 1) -> None:
        """Set one parameter's master from CPU `values` of its shape, any float dtype."""
        place, part = self.place(entry)
        if entry.packed is not None:
            values = values.detach().cpu()
            stored = entry.packed.pack(values) if values.is_floating_point() else values
            stored = stored[2 * part.start : 2 * part.stop]  # bytes of elements of two bytes
            with self.weights.writing(place) as weights:
                weights.view(torch.uint8)[: len(stored)].copy_(stored)
            return
        flat = values.detach().contiguous().view(-1)[part]
        low_bits = self.remainder_of(entry)
        if low_bits is None or flat.dtype == torch.bfloat16:
            with self.weights.writing(place) as weights:
                weights.copy_(flat)  # a bf16 value is its own master: the remainder is zero
            if low_bits is not None:
                with low_bits.writing(place) as remainder:
                    remainder.zero_()
            return
        with low_bits.writing(place) as remainder, self.weights.writing(place) as weights:
            high, low = (p if p.is_cpu else torch.empty_like(p, device="cpu")
                         for p in (weights, remainder))  # fmt: skip
            kernels.split(flat.float(), high, low, threads=threads)
            weights.copy_(high)  # no copy where they are the same CPU tensor
            remainder.copy_(low)

    def whole_master(self, entry: Entry, ranks: Ranks) -> Tensor:
        """A CPU copy of a parameter's whole fp32 master; all ranks call this."""
        (place, part), low_bits = self.place(entry), self.remainder_of(entry)
        weights = self.weights.values(place)
        if entry.packed is not None:
            stored = weights.cpu()
            if self.layout.ranks > 1:
                pairs = stored.view(torch.int16).float()  # pairs of bytes, exact in fp32
                stored = ranks.shards.join(pairs, part, (entry.stored,)).to(torch.int16)
            return entry.packed.unpacked(stored, entry.shape)
        if low_bits is None:
            master = weights.to("cpu", torch.float32, copy=True)
        else:
            master = torch.empty(len(weights), dtype=torch.float32)
            kernels.join(weights.cpu(), low_bits.values(place).cpu(), master)
        return ranks.shards.join(master, part, entry.shape)

    def copy_masters(self, threads: int = 1) -> None:
        """After an update, renew the copies of masters that layers compute with in fp32."""
        if self.remainder is None:
            return
        for start, stop, copy_start in chain.from_iterable(self.layout.copies.values()):
            copies = self.spans_of(copy_start, copy_start + 2 * (stop - start))
            for span, span_of_copy in zip(self.spans_of(start, stop), copies, strict=True):
                place = slice(span.start, span.stop)
                with self.weights.writing(slice(span_of_copy.start, span_of_copy.stop)) as copy:
                    master = copy.view(torch.float32)
                    high = self.weights.values(place).to(master.device)
                    low = self.remainder.values(place).to(master.device)
                    join = kernels.join if master.is_cpu else reference.join
                    join(high, low, master, threads=threads)


class Store:
    """All tiles of a model. Planes of one kind share one host range, so pinning is one call."""

    def __init__(
        self,
        device: Device,
        layouts: Sequence[TileLayout],
        dtype: torch.dtype,
        *,
        rule: Rule | None,
        placement: Placement = CPU_PLACEMENT,
        open_file: Callable[[int], PlaneFile] | None = None,
        rank: int = 0,
    ) -> None:
        """Allocate zeroed planes.

        Args:
            rule: the optimizer's rule; None: weights alone, for inference.
            open_file: makes a file for planes on a disk, of a number of bytes; None on a device
                that computes nothing.
            rank: the rank whose blocks to keep, if `layouts` are cut for several ranks.

        Raises DoesNotFit: there is not enough memory; InputError: `placement.resident` has a name
        that no tile has.
        """
        rests = resting(placement, layouts)
        self.disk, self.rule = disk.DiskRoom(), rule
        by_tile: list[dict[Plane, Buffer]] = [{} for _ in layouts]
        for plane in tile_planes(rule, dtype):
            tiers = [tile_rests.tier(plane) for tile_rests in rests]
            buffers = planes(device, plane, layouts, tiers, rank, self.disk)
            for planes_of_tile, buffer in zip(by_tile, buffers, strict=True):
                planes_of_tile[plane] = buffer
        self.tiles = [
            Tile(index, *layout_planes_rests, rank=rank)
            for index, layout_planes_rests in enumerate(zip(layouts, by_tile, rests, strict=True))
        ]
        used_tiers = (t.rests.tier(p) for t in self.tiles for p in t.planes if p.numel(t.layout))
        if open_file is not None and Tier.DISK in used_tiers:
            self.disk.file = open_file(max(1, self.disk.num_bytes))

    def of(self, kind: TileKind) -> list[Tile]:
        """The tiles of this kind, in order."""
        return [tile for tile in self.tiles if tile.layout.kind is kind]

    def entries(self) -> Iterator[tuple[Tile, Entry]]:
        """Every parameter with its tile."""
        for tile in self.tiles:
            for entry in tile.layout.entries:
                yield tile, entry

    def close(self) -> None:
        """Free the disk space."""
        if self.disk.file is not None:
            self.disk.file.close()

    def bytes_by_plane(self) -> dict[str, int]:
        """Host bytes by kind of plane, over all tiles; `moments` are all states of the rule."""
        totals = {kind.value: 0 for kind in PlaneKind if kind is not PlaneKind.GRADIENT}
        for tile in self.tiles:
            for plane, buffer in tile.planes.items():
                if tile.rests.tier(plane) is Tier.HOST:
                    totals[plane.kind.value] += buffer.data.nbytes
        return totals


def in_place(device: Device, tile: Tile, plane: Buffer) -> Buffer:
    """A tile's plane as work on COMPUTE reads or writes it in place."""
    return device.in_place(plane) if tile.rests.shared else plane


DISK_KINDS = ("moments", "remainder", "weights")  # kinds of planes; `auto` moves moments first


def resting(placement: Placement, layouts: Sequence[TileLayout]) -> list[Rests]:
    """The tiers of each tile's planes. Raises InputError: a resident tile does not exist."""
    resident = set(placement.resident)
    unknown = resident - {layout.name for layout in layouts}
    if unknown:
        raise InputError(
            f"placement.resident: the model has no tile {min(unknown)!r}; it has "
            f"{', '.join(layout.name for layout in layouts)}"
        )
    others = [t for t in layouts if t.name not in resident]
    layers = [t for t in others if t.kind is TileKind.LAYER]
    counts = {kind: getattr(placement, f"disk_{kind}") for kind in DISK_KINDS}
    disk_names = {kind: chosen_for_disk(kind, count, others) for kind, count in counts.items()}
    # The head stays first: while it takes the slots of layers, no layer can be loaded.
    heads = [t.name for t in others if t.kind is TileKind.HEAD][: placement.keep_weights]
    staying = {*heads, *_spread(layers, placement.keep_weights - len(heads))}
    unvisited = TileKind.EMBEDDING, TileKind.UNUSED
    # Without slots the device reads weights in host memory, where all of them must be.
    shared = {t.name for t in others if not placement.slots and t.ranks == 1}
    shared -= disk_names["weights"]
    staying -= shared

    def tiers_of(layout: TileLayout) -> Rests:
        if layout.name in resident:  # weights gathered from several ranks stay until the update
            return replace(_RESIDENT, stays=layout.ranks > 1 and layout.kind not in unvisited)
        tiers = {kind: Tier.DISK for kind, names in disk_names.items() if layout.name in names}
        return Rests(**tiers, stays=layout.name in staying, shared=layout.name in shared)

    return [tiers_of(layout) for layout in layouts]


def chosen_for_disk(kind: str, count: int, layouts: Sequence[TileLayout]) -> set[str]:
    """The names of the `count` tiles whose planes of a kind go to the disk."""
    if kind == "weights":
        return _spread([t for t in layouts if t.kind is TileKind.LAYER], count)
    return _spread([t for t in layouts if t.trainable_numel], count)


def _spread(layouts: Sequence[TileLayout], count: int) -> set[str]:
    """Names of `count` tiles: first layers, spread evenly over all layers, then other tiles."""
    layers = [t.name for t in layouts if t.kind is TileKind.LAYER]
    others = [t.name for t in layouts if t.kind is not TileKind.LAYER]
    num, num_chosen = len(layers), min(count, len(layers))
    chosen = {name for i, name in enumerate(layers) if i * num_chosen % num < num_chosen}
    return chosen.union(others[: count - num_chosen])


def planes(
    device: Device,
    plane: Plane,
    layouts: Sequence[TileLayout],
    tiers: Sequence[Tier],
    rank: int = 0,
    disk_room: disk.DiskRoom | None = None,
) -> list[Buffer]:
    """Allocate a plane: for each tile a piece of one host range or file, or a device buffer."""
    step = BLOCK // plane.dtype.itemsize  # planes of different tiles start on pages of their own
    lengths = [plane.own_numel(layout, rank) for layout in layouts]
    on_host = sum(
        align(numel, step) for numel, tier in zip(lengths, tiers, strict=True) if tier is Tier.HOST
    )
    name, pinned = Name(plane.kind, plane.name), plane.kind in _PINNED or plane.on_device
    host = device.host(name, on_host, plane.dtype, pinned=pinned)
    buffers, offset = [], 0
    for layout, length, tier in zip(layouts, lengths, tiers, strict=True):
        name = Name(plane.kind, f"{layout.name} {plane.name}")
        if tier is Tier.DEVICE:
            buffer = device.empty(name, length, plane.dtype)
            device.run(COMPUTE, f"clear {buffer.name}", buffer.data.zero_, writes=[buffer])
        elif tier is Tier.DISK:
            assert disk_room is not None
            piece = plane.place(0, disk.PIECE).stop
            buffer = disk_room.buffer(name, length, plane.dtype, piece)
        else:
            buffer = Buffer(name, host.data[offset : offset + length])
            offset += align(length, step)
        buffers.append(buffer)
    return buffers


LANES = 4  # one piece is read, one updated, one written; one more evens out the disk's pace


@dataclass(eq=False)
class Lane:
    """A buffer that is filled and emptied again and again."""

    buffer: Buffer
    free: Any = None  # event after which the buffer may be written again
    ready: Any = None  # event after which the buffer is filled


class DiskStaging:
    """Moves planes, piece by piece, from a disk to their updates and back."""

    def __init__(self, device: Device, tiles: Sequence[Tile]) -> None:
        self._device = device
        self._on_disk = {
            tile.index: [p for p in tile.planes if tile.rests.tier(p) is Tier.DISK]
            for tile in tiles
        }
        numels = [t.own_numel for t in tiles if self._on_disk[t.index]]
        self._piece = min(disk.PIECE, max(numels, default=1))
        lane_bytes = max((sum(map(self._bytes, p)) for p in self._on_disk.values()), default=0)
        names = (Name(Memory.DISK, f"disk lane {i}") for i in range(LANES if numels else 0))
        self._lanes = [Lane(device.host(n, lane_bytes, torch.uint8, pinned=False)) for n in names]
        self._next_lane = cycle(self._lanes)
        self.host_bytes = sum(lane.buffer.data.nbytes for lane in self._lanes)

    def _bytes(self, plane: Plane) -> int:
        """Bytes of a lane that a piece of the plane takes."""
        return align(plane.place(0, self._piece).stop * plane.dtype.itemsize, BLOCK)

    def visit(self, tile: Tile) -> Iterator[tuple[int, int, Tile]]:
        """Yield `(start, stop, tile)` for each piece of this rank's block, with planes in memory.

        The caller puts the piece's update on UPDATE before it asks for the next piece.
        """
        device, planes = self._device, self._on_disk[tile.index]
        if not planes:
            yield 0, tile.own_numel, tile
            return
        device.wait(DISK_IN, tile.written, "disk version due")
        for start in range(0, tile.own_numel, self._piece):
            stop = min(start + self._piece, tile.own_numel)
            places = {plane: plane.place(start, stop) for plane in tile.planes}
            parts = {p: b.piece(places[p].start, places[p].stop) for p, b in tile.planes.items()}
            lane = next(self._next_lane)
            not_empty = [plane for plane in planes if len(parts[plane].data)]
            buffers = self._lane_buffers(lane, {plane: parts[plane] for plane in not_empty})
            device.wait(DISK_IN, lane.free, "disk lane free")
            self._move(DISK_IN, [(buffers[plane], parts[plane]) for plane in not_empty])
            device.wait(UPDATE, device.record(DISK_IN), "disk planes arrived")
            yield start, stop, replace(tile, planes=parts | buffers)
            device.wait(DISK_OUT, device.record(UPDATE), "disk planes updated")
            self._move(DISK_OUT, [(parts[plane], buffers[plane]) for plane in not_empty])
            lane.free = tile.written = device.record(DISK_OUT)

    def _move(self, stream: str, pairs: Sequence[tuple[Buffer, Buffer]]) -> None:
        """Put the copies of a piece's planes on a stream: to the first of each pair."""
        for to, source in pairs:
            self._device.copy(stream, to, source)

    def _lane_buffers(self, lane: Lane, parts: Mapping[Plane, Buffer]) -> dict[Plane, Buffer]:
        """Buffers for `parts` of planes, one after the other in a lane's memory."""
        buffers, start = {}, 0
        for plane, part in parts.items():
            memory = lane.buffer.data[start : start + align(part.data.nbytes, BLOCK)]
            buffers[plane] = Buffer(lane.buffer.name, memory.view(plane.dtype))
            start += self._bytes(plane)
        return buffers


class DiskReader:
    """Loads weights from a disk to the device: a host thread reads and copies pieces.

    Only work that uses the weights waits for them; the device's copy streams do not.
    """

    def __init__(self, device: Device, buffers: Sequence[Buffer]) -> None:
        """Args: `buffers`: weights that may be loaded; buffers not on a disk are ignored."""
        self._device = device
        data = [buffer.data for buffer in buffers if isinstance(buffer, disk.DiskBuffer)]
        self._piece = min(disk.PIECE, max(map(len, data), default=0))
        num_bytes = align(self._piece * max((tensor.itemsize for tensor in data), default=0), BLOCK)
        name = Name(Memory.DISK, "disk lane in the device")
        self._lane = device.host(name, num_bytes, torch.uint8, pinned=True).data
        self.host_bytes = self._lane.nbytes

    def bring(self, tile: Tile, to: Buffer) -> Any:
        """Start copying this rank's blocks of a tile's weights to their places in `to`.

        Returns the event of their arrival.
        """
        device, source = self._device, tile.weights
        device.wait(DISK_WEIGHTS, tile.written, "disk weights due")
        # `.data` hides this thread's writes from autograd: all slots share one version counter, so
        # a write into one would look like a change of the slot in use.
        work = partial(self._read, source, to.data.data, tile.spans)
        device.run(DISK_WEIGHTS, f"{source.name} -> {to.name}", work, [source], [to])
        return device.record(DISK_WEIGHTS)

    def _read(self, source: Buffer, to: torch.Tensor, spans: Sequence[Span]) -> None:
        assert isinstance(source, disk.DiskBuffer)
        for start in range(0, len(source.data), self._piece):
            part = source.data[start : start + self._piece]
            lane = self._lane[: align(part.nbytes, BLOCK)]
            source.piece(start, start + len(part)).read(lane)
            values = lane[: part.nbytes].view(part.dtype)
            for span in spans:
                first, stop = max(start, span.start), min(start + len(part), span.stop)
                if first < stop:
                    place = to[span.slot + first - span.start :][: stop - first]
                    self._device.fetch(place, values[first - start : stop - start])
