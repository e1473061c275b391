"""Planes that rest on a disk: read ahead of their updates and written behind them.

A tile's planes pass through a few lanes of host memory, a piece at a time. Weights that rest there
are also read for each visit of their layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatrain.base.units import align
from megatrain.device import Buffer, Device, disk
from megatrain.device.base import DISK_IN, DISK_OUT, DISK_WEIGHTS, UPDATE, Memory, Name
from megatrain.device.plane_file import BLOCK
from megatrain.optim import Plane
from megatrain.store.store import Span, Tier, Tile

LANES = 4  # pieces read, updated and written at once; another one for a disk that is uneven


@dataclass
class Lane:
    """Host memory for one piece of all planes of a tile that rest on the disk."""

    buffer: Buffer
    left: Any = None  # event: the planes updated here are on the disk


def own_numel(tile: Tile) -> int:
    """The number of a tile's trained elements in this rank's block."""
    return tile.trained.stop - tile.trained.start


class DiskStaging:
    """Moves planes from a disk to their updates, and back."""

    def __init__(self, device: Device, tiles: Sequence[Tile]) -> None:
        self._device = device
        self._on_disk = {
            tile.index: [
                p for p in tile.planes if tile.rests.tier(p) is Tier.DISK and not p.on_device
            ]
            for tile in tiles
        }
        numels = [own_numel(t) for t in tiles if self._on_disk[t.index]]
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
        """Bytes of host memory of the lanes."""
        return sum(lane.buffer.data.nbytes for lane in self._lanes)

    def _bytes(self, plane: Plane) -> int:
        """Bytes that a full piece of a plane takes in a lane."""
        return align(plane.place(0, self._piece).stop * plane.dtype.itemsize, BLOCK)

    def visit(self, tile: Tile) -> Iterator[tuple[int, int, Tile]]:
        """Yield `(start, stop, tile)` for each piece of a tile, with its planes in memory.

        Work put on UPDATE for a piece, before the iterator goes on, may change its planes.
        """
        device, planes, own = self._device, self._on_disk[tile.index], tile.trained
        if not planes:
            yield own.start, own.stop, tile
            return
        device.wait(DISK_IN, tile.written, "disk version due")
        for start in range(0, own_numel(tile), self._piece):
            stop = min(start + self._piece, own_numel(tile))
            places = {plane: plane.place(start, stop) for plane in tile.planes}
            parts = {p: b.piece(places[p].start, places[p].stop) for p, b in tile.planes.items()}
            lane = self._lanes[self._turn % len(self._lanes)]
            self._turn += 1
            present = [plane for plane in planes if len(parts[plane].data)]  # some end earlier
            rooms = self._rooms(lane, {plane: parts[plane] for plane in present})
            device.wait(DISK_IN, lane.left, "disk lane free")
            for plane in present:
                device.copy(DISK_IN, rooms[plane], parts[plane])
            device.wait(UPDATE, device.record(DISK_IN), "disk planes arrived")
            yield own.start + start, own.start + stop, replace(tile, planes=parts | rooms)
            device.wait(DISK_OUT, device.record(UPDATE), "disk planes updated")
            for plane in present:
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


class DiskReader:
    """Moves buffers from a disk to the device: a host thread reads and copies pieces.

    Only work that uses a buffer waits for it, so no queue of the device holds up other work.
    """

    def __init__(self, device: Device, buffers: Sequence[Buffer]) -> None:
        """Args: `buffers`: those that rest on a disk may be read later."""
        self._device = device
        sizes = [buffer.data for buffer in buffers if isinstance(buffer, disk.DiskBuffer)]
        self._piece = min(disk.PIECE, max(map(len, sizes), default=0))
        self._room = align(self._piece * max((data.itemsize for data in sizes), default=0), BLOCK)
        self._lane = self._new_lane("in") if sizes else None

    def _new_lane(self, way: str) -> torch.Tensor:
        name = Name(Memory.DISK, f"disk lane {way} the device")
        return self._device.host(name, self._room, torch.uint8, pinned=True).data

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of the lane."""
        return 0 if self._lane is None else self._lane.nbytes

    def bring(
        self, tile: Tile, source: Buffer, to: Buffer, spans: Sequence[Span] | None = None
    ) -> Any:
        """Start copying a tile's `source` to free device memory; returns the event of its arrival.

        Args: `spans`: the places of its parts in `to`; None: all of it, in order.
        """
        device = self._device
        device.wait(DISK_WEIGHTS, tile.written, "disk weights due")
        # `.data` hides this thread's writes from autograd, which would take a write into one slot,
        # while a layer computes, for a change of all slots.
        spans = [Span(0, 0, len(source.data))] if spans is None else spans
        work = partial(self._read, source, to.data.data, spans)
        device.run(DISK_WEIGHTS, f"{source.name} -> {to.name}", work, [source], [to])
        return device.record(DISK_WEIGHTS)

    def _read(self, source: Buffer, to: torch.Tensor, spans: Sequence[Span]) -> None:
        assert isinstance(source, disk.DiskBuffer) and self._lane is not None
        for start, part, lane in self._pieces(source.data, self._lane):
            source.piece(start, start + len(part)).read(lane)
            values = lane[: part.nbytes].view(part.dtype)
            for span in spans:
                first, last = max(start, span.start), min(start + len(part), span.stop)
                if first < last:
                    into = to[span.at + first - span.start :][: last - first]
                    self._device.fetch(into, values[first - start : last - start])

    def _pieces(
        self, whole: torch.Tensor, lane: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for start in range(0, len(whole), self._piece):
            part = whole[start : start + self._piece]
            yield start, part, lane[: align(part.nbytes, BLOCK)]


class DiskTransfer(DiskReader):
    """A DiskReader that also writes back, to planes that nothing else touches meanwhile."""

    def __init__(self, device: Device, buffers: Sequence[Buffer]) -> None:
        super().__init__(device, buffers)
        self._lane_back = None if self._lane is None else self._new_lane("from")

    @property
    def host_bytes(self) -> int:
        return 2 * super().host_bytes

    def take(self, tile: Tile, source: Buffer, to: Buffer) -> Any:
        """Start copying `source`, which is ready, to the plane `to`; returns the end's event."""
        work = partial(self._write, source.data, to)
        self._device.run(DISK_OUT, f"{source.name} -> {to.name}", work, [source], [to])
        tile.written = self._device.record(DISK_OUT)
        return tile.written

    def _write(self, source: torch.Tensor, to: Buffer) -> None:
        assert isinstance(to, disk.DiskBuffer) and self._lane_back is not None
        for start, part, lane in self._pieces(source, self._lane_back):
            self._device.fetch(lane[: part.nbytes].view(part.dtype), part)
            lane[part.nbytes :].zero_()
            to.piece(start, start + len(part)).write(lane)
