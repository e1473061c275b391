"""Gradients out: accumulated in fp32 on the device, measured there, sent to host slabs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, COPY_OUT
from megatrain.store import Tile, planes

LANES = 2  # gradients on the device at once: one being made, one leaving


@dataclass
class Slab:
    """Host room for one tile's gradient."""

    buffer: Buffer
    free: Any = None  # the update that read it is done


@dataclass
class Room:
    """Where a tile's gradient is summed on the device, in fp32."""

    tile: Tile
    sums: Buffer
    views: dict[str, Tensor]
    lane: "_Lane"

    def add(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """Add one micro-batch's gradients; None counts as zero (an expert without tokens)."""
        pairs = [(self.views[n], g) for n, g in zip(names, gradients, strict=True) if g is not None]
        if pairs:
            totals, parts = zip(*pairs, strict=True)
            torch._foreach_add_(totals, parts)


@dataclass
class _Lane:
    sums: Buffer
    outgoing: Buffer
    left: Any = None  # the copy to the host is done


class Sink:
    """Takes each tile's gradient once per step.

    Attributes:
        ready: called with `(tile, slab, event)` as each gradient is put on its way; `event` is
            when it has landed.
        squares: on the device, the squared norm of each tile's gradient (fp32); the last element
            is the correction for tied tables (engine/embedding.py).
    """

    def __init__(
        self,
        device: Device,
        tiles: Sequence[Tile],
        dtype: torch.dtype,
        slabs: int,
        own: Sequence[Tile],
        ready: Callable[[Tile, Slab, Any], None],
    ) -> None:
        """Args: `own` tiles have a host slab each; the others share `slabs` of them."""
        self._device, self.ready = device, ready
        numel = max(tile.layout.trainable_numel for tile in tiles)
        self._lanes = _lanes(device, numel, dtype)
        self._turn = 0
        self.squares = device.empty("squares", len(tiles) + 1, torch.float32)
        device.run(COMPUTE, "clear squares", self.squares.data.zero_, writes=[self.squares])
        self._own = _own_slabs(device, own, dtype)
        count = slabs if len(self._own) < len(tiles) else 0
        self._shared = [
            Slab(device.host(f"slab {i}", numel, dtype, pinned=True)) for i in range(count)
        ]
        self._claimed = 0
        every = [*self._own.values(), *self._shared]
        self.host_bytes = sum(
            s.buffer.data.nbytes for s in every if s.buffer.data.device.type != "cuda"
        )

    def room(self, tile: Tile) -> Room:
        """Zeroed fp32 sums for a tile's gradient."""
        lane = self._lanes[self._turn % LANES]
        self._turn += 1
        self._device.wait(COMPUTE, lane.left, "outgoing buffer free")
        sums = lane.sums.data[: tile.layout.trainable_numel]
        self._device.run(COMPUTE, f"clear {lane.sums.name}", sums.zero_, writes=[lane.sums])
        views = {entry.name: entry.view(sums) for entry in tile.layout.trainable}
        return Room(tile, lane.sums, views, lane)

    def put(self, room: Room, *, complete: bool = True) -> tuple[Slab, Any]:
        """Measure a gradient and send it out.

        With `complete` its update is told; else whoever adds the rest calls `ready`. Returns the
        slab and the event of the gradient's landing there.
        """
        tile, lane, device = room.tile, room.lane, self._device
        numel = tile.layout.trainable_numel

        outgoing = self._own[tile.index].buffer if tile.resident else lane.outgoing

        def leave() -> None:
            sums = lane.sums.data[:numel]
            self.squares.data[tile.index] = torch.linalg.vector_norm(sums) ** 2
            if outgoing is not lane.sums:
                outgoing.data[:numel].copy_(sums)

        device.run(COMPUTE, f"measure {tile.name}", leave, [lane.sums], [outgoing, self.squares])
        if tile.resident:
            return self._landed(tile, self._own[tile.index], device.record(COMPUTE), complete)
        device.wait(COPY_OUT, device.record(COMPUTE), "gradient ready")
        slab = self.claim(tile, COPY_OUT)
        device.copy(COPY_OUT, slab.buffer, lane.outgoing, numel)
        lane.left = device.record(COPY_OUT)
        return self._landed(tile, slab, lane.left, complete)

    def _landed(self, tile: Tile, slab: Slab, event: Any, complete: bool) -> tuple[Slab, Any]:
        if complete:
            self.ready(tile, slab, event)
        return slab, event

    def claim(self, tile: Tile, stream: str) -> Slab:
        """The slab for a tile's gradient; `stream` may write it after this."""
        if tile.index in self._own:
            return self._own[tile.index]
        slab = self._shared[self._claimed % len(self._shared)]
        self._claimed += 1
        self._device.wait(stream, slab.free, "slab free")
        return slab


def _lanes(device: Device, numel: int, dtype: torch.dtype) -> list[_Lane]:
    if dtype == torch.float32:
        each = [device.empty(f"gradient sums {i}", numel, torch.float32) for i in range(LANES)]
        return [_Lane(sums, sums) for sums in each]
    shared = device.empty("gradient sums", numel, torch.float32)
    return [_Lane(shared, device.empty(f"outgoing {i}", numel, dtype)) for i in range(LANES)]


def _own_slabs(device: Device, tiles: Sequence[Tile], dtype: torch.dtype) -> dict[int, Slab]:
    layouts = [tile.layout for tile in tiles]
    lengths = [layout.trainable_numel for layout in layouts]
    resident = [tile.name for tile in tiles if tile.resident]
    buffers = planes(device, "gradient", layouts, lengths, dtype, pinned=True, resident=resident)
    return {tile.index: Slab(buffer) for tile, buffer in zip(tiles, buffers, strict=True)}
