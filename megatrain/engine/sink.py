"""Gradients on their way out: summed in fp32 on the device, measured there, sent to the host."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from megatrain import kernels
from megatrain.base.units import align
from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT, Kind, Memory, Name
from megatrain.engine.shared import Shared
from megatrain.optim import gradient_plane
from megatrain.store.store import Lane, Tier, Tile, in_place, planes
from megatrain.tile import TileKind

_ALIGNMENT = 128  # fp32 elements: every piece starts on a boundary that the widest loads like

# Elements of a gradient that are rounded and sent at once. 32 MiB in bf16: large enough for the
# bus (0.6 ms), small enough that a few of them are nothing beside a tile.
PIECE = 1 << 24

NOWHERE = Buffer("nowhere", torch.empty(0))


@dataclass(eq=False)
class TableRows:
    """An embedding table's rows of a step on the device, and the fp32 sums of their gradients.

    `trained`: the rows have gradients; `numel`: the elements of the rows.
    """

    name: str
    trained: bool
    numel: int = 0
    rows: Buffer = NOWHERE
    sums: Buffer = NOWHERE


class ScratchArena:
    """Device memory that all visits share, one after the other: gradient sums, embedding rows.

    One range, as large as the largest visit needs:

        | fp32 sums of a tile's gradient ...................... | rows, if they are kept |
        | sums of a small prologue | sums of the rows, fp32 | rows |

    The first line shows a layer or the head, the second the backward of the prologue or of
    encoders, for which rows that are not kept are copied in again. Only COMPUTE touches the range,
    except for the rows.
    """

    def __init__(self, device: Device, numel: int, prologue: int, dtype: torch.dtype) -> None:
        """Args: `numel`: gradient elements of the largest tile; `prologue`: of the prologue's tile,
        or of the encoders' tile if that is larger."""
        self._device, self._dtype = device, dtype
        self._numel, self._prologue = align(numel, _ALIGNMENT), align(prologue, _ALIGNMENT)
        self._memory: Tensor
        self._overlapping: tuple[Buffer, ...] = ()  # buffers in the memory that `sums` hands out
        self._allocate(self._numel)

    def _allocate(self, numel: int) -> None:
        name = Name(Memory.SUMS, "scratch arena")
        self._memory = self._device.empty(name, numel, torch.float32).data

    def sums(self, numel: int) -> Buffer:
        """Room for `numel` fp32 sums, not cleared."""
        return Buffer("gradient sums", self._memory[:numel], self._overlapping)

    def lay_out(self, tables: Sequence[TableRows], *, keep_rows: bool) -> None:
        """Set the tables' `rows` and `sums`, valid until the next call; the arena may grow.

        Args: `keep_rows`: True if the tiles' `sums` must not overlap the rows.
        """
        self._overlapping = ()
        for table in tables:  # drop references to memory that may be replaced
            table.rows = table.sums = NOWHERE
        sum_starts, stop = _in_a_row([t.numel * t.trained for t in tables], self._prologue)
        in_fp32 = [-(-t.numel * self._dtype.itemsize // 4) for t in tables]  # rounded up
        row_starts, stop = _in_a_row(in_fp32, max(stop, self._numel) if keep_rows else stop)
        if stop > len(self._memory):
            self._memory = torch.empty(0)  # frees the old range before the new one is allocated
            self._allocate(max(stop, self._numel))
        for table, sums, rows in zip(tables, sum_starts, row_starts, strict=True):
            row_memory = self._memory[rows:].view(self._dtype)[: table.numel]
            sum_memory = self._memory[sums : sums + table.numel * table.trained]
            table.rows = Buffer(f"{table.name} rows", row_memory)
            table.sums = Buffer(f"{table.name} row gradients", sum_memory)
        all_buffers = [buffer for table in tables for buffer in (table.rows, table.sums)]
        self._overlapping = tuple(t.sums for t in tables) if keep_rows else tuple(all_buffers)
        # Earlier sums in this memory were used in the order of COMPUTE; earlier rows have left,
        # since a step ends when all its copies out have ended.
        self._device.run(COMPUTE, "lay out rows", lambda: None, writes=all_buffers)


def _in_a_row(lengths: Sequence[int], offset: int) -> tuple[list[int], int]:
    """The starts of pieces placed one after the other from `offset`, and the end of the last."""
    starts = []
    for length in lengths:
        starts.append(offset)
        offset = align(offset + length, _ALIGNMENT)
    return starts, offset


@dataclass
class GradAccumulator:
    """A tile's fp32 gradient sums on the device; `reached`: parameters that have a gradient."""

    tile: Tile
    sums: Buffer
    reached: set[str] = field(default_factory=set)

    @cached_property
    def views(self) -> dict[str, Tensor]:
        """The sums of each parameter."""
        trainable = self.tile.layout.local.trainable
        return {entry.name: entry.view(self.sums.data) for entry in trainable}

    def add(self, names: Iterable[str], gradients: Iterable[Tensor | None]) -> None:
        """Add one micro-batch's gradients; None counts as zero (an expert without tokens)."""
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                kernels.add(self.views[name], gradient)
                self.reached.add(name)


class Sink:
    """Takes each tile's gradient once per step."""

    def __init__(self, shared: Shared, waiting: Sequence[Tile], updates: Any) -> None:
        """Each tile in `waiting` has a host gradient of its own; the others share a few."""
        device, placement, dtype = shared.device, shared.placement, shared.dtype
        tiles, visited = shared.tiles, shared.visited
        self._device = device
        # Tiles whose fp32 gradient is summed where it rests, in memory that the device can write.
        summed_in_plane = [t for t in waiting if t.rests.shared and dtype == torch.float32]
        outside_arena = visited if placement.passes > 1 else summed_in_plane
        arena_numels = {
            tile: 0 if tile in outside_arena else tile.layout.local.trainable_numel
            for tile in visited
        }
        prologue_numel = max(arena_numels[tile] for tile in (shared.prologue, *shared.media))
        self.arena = ScratchArena(device, max(arena_numels.values()), prologue_numel, dtype)
        self._collectives = shared.collectives
        self.updates = updates  # the `Update` (engine/update.py) that gets each gradient
        self._is_first_pass, self._is_last_pass = True, True
        self._reached = set[str]()  # encoders' parameters with a gradient, in any pass of the step
        # The Embedding adds the gradients of rows to the gradients of these tiles (by index), and
        # then calls `updates.ready`; until then `landed` has the tiles' host gradients.
        self.with_rows = set[int]()
        self.landed: dict[int, Lane] = {}
        # Lanes: device buffers for rounded pieces of gradients on their way to the host.
        largest = max([1, *(tile.layout.local.trainable_numel for tile in visited)])
        layer = max((tile.layout.local.trainable_numel for tile in shared.layers), default=0)
        self._piece = min(self._lane_numel(layer, placement.gradient_lanes), largest)
        num_lanes = placement.gradient_lanes or max(1, -(-layer // self._piece))
        if all(tile.rests.shared for tile in visited):  # no gradient leaves the device
            num_lanes = 0
        self._lanes = [
            Lane(device.empty(Name(Memory.GRADIENTS, f"leaving gradient {i}"), self._piece, dtype))
            for i in range(num_lanes)
        ]
        self._next_lane = cycle(self._lanes)
        # fp32 sums that stay on the device from one pass to the next.
        self._sums: dict[int, Buffer] = {}  # by the tile's id
        for tile in visited if placement.passes > 1 else ():
            if tile not in summed_in_plane:
                name, numel = f"{tile.name} sums", tile.layout.local.trainable_numel
                sums = device.empty(Name(Memory.KEPT_SUMS, name), numel, torch.float32)
                self._sums[id(tile)] = sums
        # on the device, the squared norm of each tile's gradient (fp32); the last element is the
        # squared norm of row gradients, which the Embedding adds
        self.squares = device.empty("squares", len(tiles) + 1, torch.float32)
        device.run(COMPUTE, "clear squares", self.squares.data.zero_, writes=[self.squares])
        # Host gradients: one for each waiting tile, and a few for all other tiles.
        layouts = [tile.layout for tile in waiting]
        tiers = [tile.rests.gradient for tile in waiting]
        buffers = planes(device, gradient_plane(dtype), layouts, tiers)
        self._own = {t.index: Lane(b) for t, b in zip(waiting, buffers, strict=True)}
        for tile in summed_in_plane:
            gradient = in_place(device, tile, self._own[tile.index].buffer)
            self._sums[id(tile)] = gradient.piece(0, tile.layout.local.trainable_numel)
        others = [tile for tile in tiles if tile.index not in self._own]
        any_on_host = any(tile.rests.gradient is Tier.HOST for tile in others)
        numel = max(tile.own_numel for tile in tiles)
        num_shared = placement.host_grad_buffers if any_on_host else 0
        names = [Name(Memory.GRADIENTS, f"host gradient {i}") for i in range(num_shared)]
        self._shared = [Lane(device.host(name, numel, dtype, pinned=True)) for name in names]
        self._next_shared = cycle(self._shared)
        on_host = [self._own[t.index] for t in waiting if t.rests.gradient is Tier.HOST]
        self.host_bytes = sum(lane.buffer.data.nbytes for lane in (*on_host, *self._shared))

    def _lane_numel(self, layer: int, lanes: int | None) -> int:
        """Elements of a lane; a forecast's sink looks at the largest layer and at `lanes`."""
        return PIECE

    def _pieces(self, numel: int) -> Iterable[tuple[int, int]]:
        """The bounds of a gradient's pieces; an empty gradient has one empty piece."""
        starts = range(0, max(1, numel), self._piece)
        return ((start, min(start + self._piece, numel)) for start in starts)

    def begin(self, *, first: bool, last: bool) -> None:
        """Begin a pass of a step: `first` or `last` says that it is the step's first or last."""
        self._is_first_pass, self._is_last_pass = first, last

    def accumulator(self, tile: Tile) -> GradAccumulator:
        """The fp32 sums of a tile's gradient, which the step's first pass begins with zeros."""
        numel = tile.layout.local.trainable_numel
        sums = self._sums.get(id(tile)) or self.arena.sums(numel)
        if not numel:  # all of it is frozen
            return GradAccumulator(tile, sums)
        if self._is_first_pass:
            self._device.run(COMPUTE, "clear gradient sums", sums.data.zero_, writes=[sums])
        if self._is_last_pass:
            self.updates.expect(tile)
        if tile.layout.kind is not TileKind.MEDIA:
            return GradAccumulator(tile, sums)
        self._reached = set() if self._is_first_pass else self._reached
        return GradAccumulator(tile, sums, self._reached)

    def put(self, accumulator: GradAccumulator) -> None:
        """In the last pass, measure a gradient and send it to its update."""
        tile, sums, device = accumulator.tile, accumulator.sums, self._device
        if not self._is_last_pass or not tile.layout.trainable_numel:
            return
        for start, stop in tile.layout.gathered:
            if start < len(sums.data):
                self._collectives.reduce_scatter(sums.piece(start, stop), tile.name)
        # As plain torch does, skip parameters of encoders that got no gradient; layers' get zeros.
        if tile.layout.kind is TileKind.MEDIA:
            by_rank = self._collectives.ranks.all_gather_object(accumulator.reached)
            tile.idle = {entry.name for entry in tile.layout.trainable} - set().union(*by_rank)

        def measure() -> None:
            squares = [torch.linalg.vector_norm(sums.data[part]) ** 2 for part in tile.sums]
            self.squares.data[tile.index] = reduce(torch.add, squares)

        device.run(COMPUTE, f"measure {tile.name}", measure, [sums], [self.squares])
        self.updates.direct(tile, sums)  # Muon replaces gradients by directions
        host_grad = self.claim(tile, COMPUTE if tile.rests.local else COPY_OUT)
        self.send(accumulator, host_grad)
        if tile.index in self.with_rows:
            self.landed[tile.index] = host_grad
        else:
            self.updates.ready(tile, host_grad)

    def leave_out(self, tile: Tile) -> None:
        """Leave out a tile that has no gradient in this step: its norm is 0."""
        clear = self.squares.data[tile.index].zero_
        self._device.run(COMPUTE, f"no gradient of {tile.name}", clear, writes=[self.squares])

    def send(self, accumulator: GradAccumulator, host_grad: Lane) -> None:
        """Round a gradient and send it to `host_grad`, whose `ready` event the update waits for."""
        tile, device = accumulator.tile, self._device
        if tile.rests.local:
            if host_grad.buffer.name != accumulator.sums.name:  # else they are the same memory
                to = in_place(device, tile, host_grad.buffer)
                for span, part in zip(tile.spans, tile.sums, strict=False):
                    self._round(accumulator, part, to.piece(span.start, len(to.data)))
            host_grad.ready = device.record(COMPUTE)
            return
        for span in tile.spans:
            numel_to_end = len(accumulator.sums.data) - span.slot
            trained_numel = max(0, min(span.numel, numel_to_end))  # the rest is frozen
            for start, stop in self._pieces(trained_numel):
                lane = next(self._next_lane)
                device.wait(COMPUTE, lane.free, "outgoing buffer free")
                self._round(accumulator, slice(span.slot + start, span.slot + stop), lane.buffer)
                device.wait(COPY_OUT, device.record(COMPUTE), "gradient ready")
                to = host_grad.buffer.piece(span.start + start, span.start + stop)
                device.copy(COPY_OUT, to, lane.buffer, stop - start)
                lane.free = device.record(COPY_OUT)
        host_grad.ready = device.record(COPY_OUT)

    def recall(self, tile: Tile, host_grad: Lane) -> GradAccumulator:
        """Copy a gradient from `host_grad` back into fp32 sums on the device."""
        device, trained = self._device, tile.trained
        numel = trained.stop - trained.start
        sums = self._sums.get(id(tile)) or self.arena.sums(tile.layout.trainable_numel)
        gradient = in_place(device, tile, host_grad.buffer)
        if gradient.name == sums.name:  # the same memory
            return GradAccumulator(tile, sums)
        for start in range(0, numel, self._piece):
            source = gradient.piece(start, min(start + self._piece, numel))
            first = trained.start + start
            to = sums.piece(first, first + len(source.data))
            lane = None
            if not tile.rests.local:
                lane = next(self._next_lane)
                device.wait(COPY_IN, lane.free, "outgoing buffer free to return")
                device.copy(COPY_IN, lane.buffer, source, len(source.data))
                device.wait(COMPUTE, device.record(COPY_IN), "gradient returned")
                source = lane.buffer.piece(0, len(source.data))
            work = partial(to.data.copy_, source.data)
            device.run(COMPUTE, Name(Kind.ROUND, f"return {tile.name}"), work, [source], [to])
            if lane is not None:
                lane.free = device.record(COMPUTE)
        return GradAccumulator(tile, sums)

    def _round(self, accumulator: GradAccumulator, part: slice, to: Buffer) -> None:
        def work() -> None:
            to.data[: part.stop - part.start].copy_(accumulator.sums.data[part])

        name = Name(Kind.ROUND, f"round {accumulator.tile.name}")
        self._device.run(COMPUTE, name, work, [accumulator.sums], [to])

    def claim(self, tile: Tile, stream: str) -> Lane:
        """Return the host gradient of a tile, which later work of `stream` may write."""
        if tile.index in self._own:
            return self._own[tile.index]
        if tile.rests.gradient is Tier.DEVICE:  # the sums of all passes, kept until the update
            return Lane(self._sums[id(tile)].piece(tile.trained.start, tile.trained.stop))
        host_grad = next(self._next_shared)
        self._device.wait(stream, host_grad.free, "host gradient free")
        return host_grad
