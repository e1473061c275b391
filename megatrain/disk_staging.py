"""Planes that rest on a disk: read ahead of their updates and written behind them.

A tile's planes pass through a few lanes of host memory, a piece at a time. Weights that rest there
are also read for each visit of their layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatrain.device import Buffer, Device, disk
from megatrain.device.base import DISK_IN, DISK_OUT, DISK_WEIGHTS, UPDATE, Memory, Name
from megatrain.optim import Plane
from megatrain.plane_file import BLOCK
from megatrain.store import Tier, Tile
from megatrain.units import align

LANES = 4  # pieces read, updated and written at once; another one for a disk that is uneven


@dataclass
class Lane:
    """Host memory for one piece of all planes of a tile that rest on the disk."""

    buffer: Buffer
    left: Any = None  # what was updated here is on the disk


class DiskStaging:
    """The way of planes from a disk to their updates, and back."""

    def __init__(self, device: Device, tiles: Sequence[Tile]) -> None:
        self._device = device
        self._on_disk = {
            tile.index: [p for p in tile.planes if tile.rests.tier(p) is Tier.DISK]
            for tile in tiles
        }
        numels = [t.layout.trainable_numel for t in tiles if self._on_disk[t.index]]
        self._piece = min(disk.PIECE, max(numels, default=1))
        widest = max((sum(map(self._bytes, p)) for p in self._on_disk.values()), default=0)
        self._lanes = [
            Lane(
                device.host(Name(Memory.DISK, f"disk lane {i}"), widest, torch.uint8, pinned=False)
            )
            for i in range(LANES if numels else 0)
        ]
        self._turn = 0

    @property
    def host_bytes(self) -> int:
        """Host memory that the lanes take."""
        return sum(lane.buffer.data.nbytes for lane in self._lanes)

    def _bytes(self, plane: Plane) -> int:
        """Of a whole piece, in a lane."""
        return align(plane.place(0, self._piece).stop * plane.dtype.itemsize, BLOCK)

    def visit(self, tile: Tile) -> Iterator[tuple[int, int, Tile]]:
        """Pieces of a tile: from one element to before another, with planes of these in memory.

        What is put on UPDATE for a piece, before the next one is asked for, may change them.
        """
        device, planes = self._device, self._on_disk[tile.index]
        numel = tile.layout.trainable_numel
        if not planes:
            yield tile.trained.start, tile.trained.stop, tile
            return
        device.wait(DISK_IN, tile.written, "disk version due")
        for start in range(0, numel, self._piece):
            stop = min(start + self._piece, numel)
            places = {plane: plane.place(start, stop) for plane in tile.planes}
            parts = {p: b.piece(places[p].start, places[p].stop) for p, b in tile.planes.items()}
            lane = self._lanes[self._turn % len(self._lanes)]
            self._turn += 1
            rooms = self._rooms(lane, {plane: parts[plane] for plane in planes})
            device.wait(DISK_IN, lane.left, "disk lane free")
            for plane in planes:
                device.copy(DISK_IN, rooms[plane], parts[plane])
            device.wait(UPDATE, device.record(DISK_IN), "disk planes arrived")
            yield start, stop, replace(tile, planes=parts | rooms)
            device.wait(DISK_OUT, device.record(UPDATE), "disk planes updated")
            for plane in planes:
                device.copy(DISK_OUT, parts[plane], rooms[plane])
            lane.left = tile.written = device.record(DISK_OUT)

    def _rooms(self, lane: Lane, parts: Mapping[Plane, Buffer]) -> dict[Plane, Buffer]:
        """Whole blocks of a lane for each part."""
        rooms, at = {}, 0
        for plane, part in parts.items():
            memory = lane.buffer.data[at : at + align(part.data.nbytes, BLOCK)]
            rooms[plane] = Buffer(lane.buffer.name, memory.view(plane.dtype))
            at += self._bytes(plane)
        return rooms


class WeightsReader:
    """The way of weights from a disk to their slots: a host thread reads and copies pieces.

    Nothing but the visit itself waits for them, so no queue of the device holds more than that.
    """

    def __init__(self, device: Device, layers: Sequence[Tile]) -> None:
        self._device = device
        there = [tile.weights for tile in layers if tile.rests.weights is Tier.DISK]
        self._piece = min(disk.PIECE, max((len(each.data) for each in there), default=0))
        size = max((each.data.itemsize for each in there), default=0)
        lane = Name(Memory.DISK, "disk lane of weights")
        room = align(self._piece * size, BLOCK)
        self._lane = device.host(lane, room, torch.uint8, pinned=True).data if there else None

    @property
    def host_bytes(self) -> int:
        """Host memory that the lane takes."""
        return 0 if self._lane is None else self._lane.nbytes

    def bring(self, tile: Tile, slot: Buffer) -> Any:
        """Start a tile's way into a slot, which may be written; the event of its arrival."""
        device, weights = self._device, tile.weights
        device.wait(DISK_WEIGHTS, tile.written, "disk weights due")
        work = partial(self._read, weights, slot.data)
        device.run(DISK_WEIGHTS, f"{weights.name} -> {slot.name}", work, [weights], [slot])
        return device.record(DISK_WEIGHTS)

    def _read(self, weights: Buffer, slot: torch.Tensor) -> None:
        assert isinstance(weights, disk.DiskBuffer) and self._lane is not None
        for part in slot[: len(weights.data)].split(self._piece):
            start = part.storage_offset() - slot.storage_offset()
            lane = self._lane[: align(part.nbytes, BLOCK)]
            weights.piece(start, start + len(part)).read(lane)
            self._device.fetch(part, lane[: part.nbytes].view(part.dtype))
