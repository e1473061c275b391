"""Tensors that wait in pinned host memory: out through a few lanes, back ahead of their use."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatrain.base.units import align
from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT, Kind, Memory, Name

_STEP = 256  # bytes: every tensor starts on a boundary that the widest loads like


@dataclass
class _Lane:
    """Bytes of device memory through which items leave or return."""

    name: str
    buffer: Buffer | None = None
    busy: Any = None  # leaving: the copy out is done; returning: the work that read it is done
    ready: Any = None  # returning: the copy in is done


@dataclass
class _Item:
    """Tensors on the host, one after the other."""

    room: Buffer
    num_bytes: int
    tensors: list[tuple[torch.Size, torch.dtype, int]]  # shape, type, bytes
    landed: Any


@dataclass
class _Rooms:
    """The host ranges of one group of items, as few as possible."""

    buffers: list[Buffer] = field(default_factory=list)
    at: int = 0  # the range in use
    offset: int = 0


class HostOffload:
    """Moves items (a few tensors each) to the host and back, `returning` of them at a time."""

    def __init__(self, device: Device, what: str, leaving: int, returning: int) -> None:
        self._device, self._what = device, what
        self._out = [_Lane(f"leaving {what} {i}") for i in range(leaving)]
        self._in = [_Lane(f"returning {what} {i}") for i in range(returning)]
        self._rooms: dict[Hashable, _Rooms] = {}
        self._items: dict[Hashable, _Item] = {}
        self._order: list[Hashable] = []
        self._sent = self._fetched = self._num_taken = 0

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory held."""
        return sum(r.data.nbytes for rooms in self._rooms.values() for r in rooms.buffers)

    def begin(self) -> None:
        """Begin a step: forget all items."""
        self._items.clear()
        self._order = []
        self._fetched = self._num_taken = 0
        for rooms in self._rooms.values():
            rooms.at = rooms.offset = 0

    def release(self) -> None:
        """Free all memory, between two steps."""
        self.begin()
        for rooms in self._rooms.values():
            for room in rooms.buffers:
                self._device.free(room)
        self._rooms.clear()
        for lane in (*self._out, *self._in):
            lane.buffer = None

    def send(
        self, group: Hashable, key: Hashable, tensors: Sequence[Tensor], later_bytes: int = 0
    ) -> None:
        """Send an item to the host.

        Args:
            group: items of one group share host ranges.
            tensors: contiguous; empty where nothing is computed.
            later_bytes: that the group will send after it in this step, as far as is known.
        """
        device, lane = self._device, self._out[self._sent % len(self._out)]
        self._sent += 1
        num_bytes = packed_bytes(tensors)
        device.wait(COMPUTE, lane.busy, f"leaving {self._what} lane free")
        buffer = self._sized(lane, num_bytes)
        stage = partial(_pack, tensors, buffer.data)
        staged = Name(Kind.PACK, f"stage {self._what}")
        device.run(COMPUTE, staged, stage, writes=[buffer.piece(0, num_bytes)])
        device.wait(COPY_OUT, device.record(COMPUTE), f"{self._what} ready")
        room = self._room(group, key, num_bytes, later_bytes)
        device.copy(COPY_OUT, room, buffer, num_bytes)
        lane.busy = device.record(COPY_OUT)
        sizes = [(tensor.shape, tensor.dtype, tensor.nbytes) for tensor in tensors]
        self._items[key] = _Item(room, num_bytes, sizes, lane.busy)

    def expect(self, *takes: Sequence[Hashable]) -> None:
        """Announce the keys of the next `take`s, in their order; they come before earlier ones."""
        self._order = [key for keys in takes for key in keys] + self._order
        for index in range(len(self._in), max(map(len, takes), default=0)):
            self._in.append(_Lane(f"returning {self._what} {index}"))

    def take(self, num: int) -> Iterator[tuple[list[list[Tensor]], list[Buffer]]]:
        """Yield the next `num` items and their buffers, which hold until the iterator goes on."""
        self.fetch_ahead()
        lanes = [self._in[(self._num_taken + i) % len(self._in)] for i in range(num)]
        keys = self._order[self._num_taken : self._num_taken + num]
        for lane in lanes:
            self._device.wait(COMPUTE, lane.ready, f"{self._what} returned")
        items = [
            _views(self._items[key], lane.buffer) for key, lane in zip(keys, lanes, strict=True)
        ]
        yield items, [lane.buffer for lane in lanes if lane.buffer is not None]
        done = self._device.record(COMPUTE)
        for lane in lanes:
            lane.busy = done
        self._num_taken += num

    def fetch_ahead(self) -> None:
        """Start the return of as many items as there are lanes."""
        stop = min(self._num_taken + len(self._in), len(self._order))
        while self._fetched < stop:
            item = self._items[self._order[self._fetched]]
            lane = self._in[self._fetched % len(self._in)]
            buffer = self._sized(lane, item.num_bytes)
            self._device.wait(COPY_IN, item.landed, f"{self._what} landed")
            self._device.wait(COPY_IN, lane.busy, f"returning {self._what} lane free")
            self._device.copy(COPY_IN, buffer, item.room, item.num_bytes)
            lane.ready = self._device.record(COPY_IN)
            self._fetched += 1

    def _sized(self, lane: _Lane, num_bytes: int) -> Buffer:
        if lane.buffer is None or lane.buffer.data.nbytes < num_bytes:
            lane.buffer = None  # what it had is given back first
            name = Name(Memory.LANES, lane.name)
            lane.buffer = self._device.empty(name, num_bytes, torch.uint8)
            # Device memory is free to use only in the order of COMPUTE, where it was given.
            lane.busy = self._device.record(COMPUTE)
        return lane.buffer

    def _room(self, group: Hashable, key: Hashable, num_bytes: int, later_bytes: int) -> Buffer:
        """A piece of the group's host ranges; ranges of earlier steps are reused in order."""
        rooms = self._rooms.setdefault(group, _Rooms())
        while rooms.at < len(rooms.buffers):
            data = rooms.buffers[rooms.at].data
            if rooms.offset + num_bytes <= len(data):
                break
            if rooms.offset:
                rooms.at, rooms.offset = rooms.at + 1, 0
            else:  # outgrown
                self._device.free(rooms.buffers.pop(rooms.at))
        else:
            name = Name(Memory.LANES, f"{self._what} {group}")
            size = num_bytes + later_bytes
            rooms.buffers.append(self._device.host(name, size, torch.uint8, pinned=True))
        start = rooms.offset
        rooms.offset += num_bytes
        data = rooms.buffers[rooms.at].data[start : rooms.offset]
        return Buffer(f"{self._what} {key}", data)


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of an item's tensors, each aligned."""
    stop = 0
    for tensor in tensors:
        stop = align(stop, _STEP) + tensor.nbytes
    return stop


def _pack(tensors: Sequence[Tensor], flat: Tensor) -> None:
    offset = 0
    for tensor in tensors:
        flat[offset : offset + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
        offset += align(tensor.nbytes, _STEP)


def _views(item: _Item, buffer: Buffer | None) -> list[Tensor]:
    views, offset = [], 0
    for shape, dtype, num_bytes in item.tensors:
        assert buffer is not None
        views.append(buffer.data[offset : offset + num_bytes].view(dtype).view(shape))
        offset += align(num_bytes, _STEP)
    return views
