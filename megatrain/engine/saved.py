"""Activations between the sweeps: layer inputs wait for the backward that recomputes from them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT
from megatrain.model.program import Activations
from megatrain.model.skeleton import Ref


class Boundary(Protocol):
    """What `Saved` asks of a unit: its place, and the activations that it reads."""

    visit: int
    inputs: list[Ref]
    fresh: list[Ref]  # made by the unit before it, read by it or a later layer


class Saved:
    """Keeps layer inputs on the device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: list[Activations] = []

    def begin(self, num_micro: int) -> None:
        """Forget everything; a step of `num_micro` micro-batches begins."""
        self._kept = [{} for _ in range(num_micro)]

    def put(self, unit: Boundary, h: list[Activations]) -> None:
        """Keep what `unit` is about to read and nobody has kept yet."""
        for index, kept in enumerate(self._kept):

            def keep(index: int = index, kept: Activations = kept) -> None:
                kept.update({ref: h[index][ref] for ref in unit.fresh})

            self._device.run(COMPUTE, "keep", keep)

    def take(self, unit: Boundary) -> Iterator[Activations]:
        """The unit's inputs, one micro-batch after the other; each holds until the next."""
        for kept in self._kept:

            def give(kept: Activations = kept) -> Activations:
                inputs = {ref: kept[ref] for ref in unit.inputs}
                for ref in unit.fresh:
                    del kept[ref]
                return inputs

            yield self._device.run(COMPUTE, "give", give)


@dataclass
class _Lane:
    """A piece of device memory through which boundaries leave or return (bytes)."""

    name: str
    buffer: Buffer | None = None
    busy: Any = None  # leaving: the copy out is done; returning: the work that read it is done
    ready: Any = None  # returning: the copy in is done


@dataclass
class _Item:
    """One saved activation on the host."""

    room: Buffer
    num_bytes: int
    like: Tensor | None
    landed: Any


class HostSaved:
    """Keeps layer inputs in pinned host memory, fetched again ahead of their backward."""

    def __init__(self, device: Device, lanes: int) -> None:
        self._device = device
        self._out = [_Lane(f"leaving boundary {i}") for i in range(lanes)]
        self._in = [_Lane(f"returning boundary {i}") for i in range(lanes)]
        self._rooms: dict[tuple[int, Ref], Buffer] = {}
        self._items: dict[tuple[int, Ref], _Item] = {}
        self._order: list[tuple[int, Ref]] = []
        self._num_micro = self._sent = self._fetched = self._taken = 0

    @property
    def host_bytes(self) -> int:
        """Pinned host memory held."""
        return sum(room.data.nbytes for room in self._rooms.values())

    def begin(self, num_micro: int) -> None:
        """Forget everything; a step of `num_micro` micro-batches begins."""
        self._num_micro = num_micro
        self._items.clear()
        self._order = []
        self._fetched = self._taken = 0

    def put(self, unit: Boundary, h: list[Activations]) -> None:
        """Send out what `unit` is about to read and nobody has sent yet."""
        for index in range(self._num_micro):
            for ref in unit.fresh:
                self._send((index, ref), h[index])
        self._order = [
            (index, ref) for index in range(self._num_micro) for ref in unit.inputs
        ] + self._order

    def _send(self, key: tuple[int, Ref], values: Activations) -> None:
        device, lane = self._device, self._out[self._sent % len(self._out)]
        self._sent += 1
        value = values[key[1]].contiguous() if values else None
        num_bytes = 0 if value is None else value.nbytes
        device.wait(COMPUTE, lane.busy, "leaving lane free")
        buffer = self._sized(lane, num_bytes)

        def stage() -> None:
            assert value is not None
            buffer.data[:num_bytes].copy_(value.view(-1).view(torch.uint8))

        device.run(COMPUTE, f"stage {key}", stage, writes=[buffer])
        device.wait(COPY_OUT, device.record(COMPUTE), "boundary ready")
        room = self._room(key, num_bytes)
        device.copy(COPY_OUT, room, buffer, num_bytes)
        lane.busy = device.record(COPY_OUT)
        like = None if value is None else torch.empty_like(value, device="meta")
        self._items[key] = _Item(room, num_bytes, like, lane.busy)

    def take(self, unit: Boundary) -> Iterator[Activations]:
        """The unit's inputs, one micro-batch after the other; each holds until the next."""
        width = len(unit.inputs)
        for _ in range(self._num_micro):
            self._fetch_until(self._taken + max(len(self._in), width))
            lanes = [self._in[(self._taken + i) % len(self._in)] for i in range(width)]
            keys = self._order[self._taken : self._taken + width]
            for lane in lanes:
                self._device.wait(COMPUTE, lane.ready, "boundary returned")
            yield self._device.run(
                COMPUTE,
                "give",
                partial(self._views, keys, lanes),
                reads=[lane.buffer for lane in lanes if lane.buffer is not None],
            )
            done = self._device.record(COMPUTE)
            for lane in lanes:
                lane.busy = done
            self._taken += width

    def _views(self, keys: list[tuple[int, Ref]], lanes: list[_Lane]) -> Activations:
        return {key[1]: self._view(key, lane) for key, lane in zip(keys, lanes, strict=True)}

    def _view(self, key: tuple[int, Ref], lane: _Lane) -> Tensor:
        item = self._items[key]
        assert item.like is not None and lane.buffer is not None
        flat = lane.buffer.data[: item.num_bytes].view(item.like.dtype)
        return flat.view(item.like.shape)

    def _fetch_until(self, stop: int) -> None:
        while self._fetched < min(stop, len(self._order)):
            item = self._items[self._order[self._fetched]]
            lane = self._in[self._fetched % len(self._in)]
            buffer = self._sized(lane, item.num_bytes)
            self._device.wait(COPY_IN, item.landed, "boundary landed")
            self._device.wait(COPY_IN, lane.busy, "returning lane free")
            self._device.copy(COPY_IN, buffer, item.room, item.num_bytes)
            lane.ready = self._device.record(COPY_IN)
            self._fetched += 1

    def _sized(self, lane: _Lane, num_bytes: int) -> Buffer:
        if lane.buffer is None or lane.buffer.data.nbytes < num_bytes:
            lane.buffer = self._device.empty(lane.name, num_bytes, torch.uint8)
            # Device memory is free to use only in the order of COMPUTE, where it was given.
            lane.busy = self._device.record(COMPUTE)
        return lane.buffer

    def _room(self, key: tuple[int, Ref], num_bytes: int) -> Buffer:
        room = self._rooms.get(key)
        if room is None or room.data.nbytes < num_bytes:
            if room is not None:
                self._device.free(room)
            name = f"boundary {key[0]}.{key[1].visit}.{key[1].leaf}"
            room = self._device.host(name, num_bytes, torch.uint8, pinned=True)
            self._rooms[key] = room
        return room
