"""Weights on their way in: tiles are copied into a few slots ahead of their use.

A slot is as large as the largest layer. A larger tile (the head) takes several adjacent slots.
Weights that stay on the device have memory of their own, into which each version is copied once.
Where the device reads the host's memory in place, nothing is copied: layers read a tile's plane.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from megatrain.device import Buffer
from megatrain.device.base import COMPUTE, COPY_IN, DISK_WEIGHTS, Kind, Memory, Name
from megatrain.engine.modules import StreamedModule
from megatrain.engine.shared import Shared
from megatrain.store.store import DiskReader, Lane, Tier, Tile, in_place
from megatrain.tile import Entry, TileKind

Unit = TypeVar("Unit", bound=StreamedModule)
Unpack = Callable[..., None]  # takes a layout, then the arguments of `TileLayout.unpack`
Stacks = Mapping[int, Sequence[Entry]]  # by tile index, parameters of which only rows are copied


@dataclass
class _Place:
    """Device memory for a tile's weights: one slot, neighbouring slots, or memory of its own."""

    slots: list[Lane]
    buffer: Buffer
    ready: Any = None  # event after which the weights have arrived
    version: int | None = None  # version of the weights that were copied in last


class Stream:
    """Loads tiles in the order of an itinerary, up to `distance` tiles ahead of the one in use."""

    def __init__(self, shared: Shared, unpack: Unpack) -> None:
        """Allocate the slots: at least as many as the largest visited tile takes."""
        device, tiles, dtype = shared.device, shared.tiles, shared.dtype
        self.disk = DiskReader(device, [tile.weights for tile in shared.layers])
        streamed = [tile.layout.local for tile in shared.visited if tile.rests.streamed]
        largest_numel = max((layout.numel for layout in streamed), default=0)
        layer_numels = [layout.numel for layout in streamed if layout.kind is TileKind.LAYER]
        self._device, self._distance = device, shared.placement.prefetch_distance
        self._collectives, self._checks, self._unpack = shared.collectives, shared.checks, unpack
        self._slot_numel = numel = max(layer_numels, default=largest_numel)
        num_slots = max(shared.placement.slots, self._num_slots(largest_numel))
        self._memory = device.empty(Name(Memory.SLOTS, "slots"), num_slots * numel, dtype)
        slots = [
            Buffer(f"slot {i}", self._memory.data[i * numel : (i + 1) * numel])
            for i in range(num_slots)
        ]
        staying: dict[int, Buffer] = {}  # by the tile's index, memory for weights that stay
        for tile in tiles:
            if tile.rests.stays:
                name = Name(Memory.KEPT_WEIGHTS, f"{tile.name} kept weights")
                staying[tile.index] = device.empty(name, tile.layout.local.numel, dtype)
        # torch's allocator orders by COMPUTE alone: other streams wait until COMPUTE is past this.
        device.run(COMPUTE, "allocate slots", lambda: None, writes=slots)
        allocated = device.record(COMPUTE)
        self._slots = [Lane(slot, allocated) for slot in slots]
        self._staying = {i: _Place([Lane(b, allocated)], b) for i, b in staying.items()}
        local = (tile for tile in shared.visited if tile.rests.local)
        self._local = {tile.index: in_place(device, tile, tile.weights) for tile in local}
        layouts = [tile.layout.local for tile in shared.layers]
        numels = [layout.unpacked.numel for layout in layouts if layout.needs_unpacking]
        name = Name(Memory.SLOTS, "unpacked weights")
        self._unpacked = device.empty(name, max(numels, default=0), dtype)
        self._itinerary: list[StreamedModule] = []  # the visits that need a load, in order
        self._places: list[_Place] = []  # of these visits
        self._loaded = self._visited = 0  # how many of these loads have started, visits have ended
        self._stacks: Stacks = {}

    def keeps(self, tile: Tile) -> bool:
        """True if the weights that layers compute with stay on the device from visit to visit."""
        rests = tile.rests
        on_device = rests.weights is Tier.DEVICE or rests.stays
        on_device |= rests.shared and self._device.can.shares_host_memory
        return on_device and not tile.layout.needs_unpacking

    def begin(
        self, itinerary: Sequence[StreamedModule], stacks: Stacks = MappingProxyType({})
    ) -> None:
        """Set the visits of a step's sweeps, in order, and start the first loads.

        Args: `stacks`: parameters that loads leave out; visits `bring` the rows that they need.
        """
        self._stacks = stacks
        self._itinerary, versions = [], {i: place.version for i, place in self._staying.items()}
        for unit in itinerary:
            tile = unit.tile
            # Weights that stay are loaded once for each version.
            if tile.rests.streamed or versions.get(tile.index, tile.version) != tile.version:
                self._itinerary.append(unit)
                versions[tile.index] = tile.version
        self._places = list(self._assigned_places())
        self._loaded = self._visited = 0
        self._load_until(self._distance)

    def _assigned_places(self) -> Iterator[_Place]:
        """Yield each visit's place: the next slots, from the first one again at the end."""
        start = 0
        for unit in self._itinerary:
            if (place := self._staying.get(unit.tile.index)) is not None:
                yield place
                continue
            count = self._num_slots(unit.tile.layout.local.numel)
            if start + count > len(self._slots):
                start = 0
            slots = self._slots[start : start + count]
            buffer = slots[0].buffer
            if count > 1:
                numel = self._slot_numel
                data = self._memory.data[start * numel : (start + count) * numel]
                parts = tuple(slot.buffer for slot in slots)
                buffer = Buffer(f"slots {start} to {start + count - 1}", data, parts)
            yield _Place(slots, buffer)
            start += count

    def visit(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, Buffer]]:
        """Yield each unit with its weights, which stay valid until the next unit is asked for."""
        for unit in units:
            if unit.tile.rests.local and not unit.tile.rests.stays:
                weights = self._local[unit.tile.index]
                if unit.tile.rests.shared:
                    self._device.wait(COMPUTE, unit.tile.updated, "version due")
                    # Before the visit: the update may begin as soon as the layer has read them.
                    self._checks.sum_copy(unit.tile, weights, unit.tile.version)
                yield unit, self._as_computed(unit.tile, weights)
                continue
            place, position = self._staying.get(unit.tile.index), self._visited
            is_loaded_now = self._itinerary[position : position + 1] == [unit]
            if is_loaded_now:  # else the unit's weights have stayed from an earlier visit
                self._load_until(position + self._distance)
                place = self._places[position]
            assert place is not None, "visits must follow the itinerary"
            self._device.wait(COMPUTE, place.ready, "weights arrived")
            version = unit.tile.version  # an update may begin before the visit ends
            left_out = self._stacks.get(unit.tile.index, ())
            yield unit, self._as_computed(unit.tile, place.buffer, left_out)
            self._checks.sum_copy(unit.tile, place.buffer, version)
            done = self._device.record(COMPUTE)
            for slot in place.slots:
                slot.free = done
            self._visited += is_loaded_now

    def bring(self, tile: Tile, stack: Sequence[Entry], chosen: torch.Tensor) -> None:
        """Copy chosen rows of the parameters `stack`, which `begin` left out, into the slot.

        The tile is streamed from host memory, which has all of it: it is not cut for ranks.
        Waits until the device has computed `chosen`: numbers of rows, in any order, with
        repetitions; numbers beyond the last row are ignored.
        """
        device, weights = self._device, tile.weights
        place = self._places[self._visited]
        assert self._itinerary[self._visited].tile is tile, "the visit is of another tile"
        device.synchronize(device.record(COMPUTE), "rows chosen")
        rows = sorted({row for row in chosen.flatten().tolist() if row < stack[0].shape[0]})
        for entry in stack:
            for start, stop in entry.places_of(rows, weights.data.itemsize):
                device.copy(COPY_IN, place.buffer.piece(start, stop), weights.piece(start, stop))
        device.wait(COMPUTE, device.record(COPY_IN), "rows arrived")
        device.run(COMPUTE, Name(Kind.NOTE, "read rows"), lambda: None, [place.buffer])
        self._as_computed(tile, place.buffer, rows={entry.name: rows for entry in stack})

    def _as_computed(
        self,
        tile: Tile,
        weights: Buffer,
        left_out: Sequence[Entry] = (),
        rows: Mapping[str, Sequence[int]] | None = None,
    ) -> Buffer:
        """The weights in the compute dtype; `left_out`, and what `rows` leave out, stay packed."""
        layout = tile.layout.local
        if not layout.needs_unpacking:
            return weights
        work = partial(self._unpack, layout, weights.data, self._unpacked.data)
        if left_out:
            work = partial(work, left_out={entry.name for entry in left_out})
        if rows is not None:
            work = partial(work, rows=rows)
        self._device.run(COMPUTE, f"unpack {tile.name}", work, [weights], [self._unpacked])
        return self._unpacked

    def _load_until(self, position: int) -> None:
        """Start loads up to a visit's position, as far as slots are free."""
        last = min(position, len(self._itinerary) - 1)
        while self._loaded <= last:
            place = self._places[self._loaded]
            places_in_use = self._places[self._visited : self._loaded]  # by visits that are loaded
            if any(slot in place.slots for used in places_in_use for slot in used.slots):
                break
            self._load(self._itinerary[self._loaded].tile, place)
            self._loaded += 1

    def _load(self, tile: Tile, place: _Place) -> None:
        """Copy a tile's weights to `place` as soon as they are updated and `place` is free."""
        if tile.rests.weights is Tier.DISK:
            for slot in place.slots:
                self._device.wait(DISK_WEIGHTS, slot.free, "slot free for the disk")
            self.disk.bring(tile, place.buffer)
            place.ready = self._gather(tile, place.buffer, DISK_WEIGHTS)
        else:
            self._device.wait(COPY_IN, tile.updated, "version due")
            for slot in place.slots:
                self._device.wait(COPY_IN, slot.free, "slot free")
            for span in tile.spans_without(self._stacks.get(tile.index, ())):
                to = place.buffer.piece(span.slot, span.slot + span.numel)
                source = tile.weights.piece(span.start, span.start + span.numel)
                self._device.copy(COPY_IN, to, source)
            place.ready = self._gather(tile, place.buffer, COPY_IN)
        place.version = tile.version  # set last: an interrupted load is repeated

    def _gather(self, tile: Tile, weights: Buffer, stream: str) -> Any:
        """Gather the ranks' blocks of a tile's parts; return the event of their arrival."""
        parts = [weights.piece(*part) for part in tile.layout.gathered]
        return self._collectives.all_gather(parts, tile.name, stream)

    def _num_slots(self, numel: int) -> int:
        return max(1, -(-numel // max(1, self._slot_numel)))
