"""Weights in: tiles are copied into a few slots ahead of their use."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, COPY_IN
from megatrain.store import Tile


class Streamed(Protocol):
    """Something computed with the weights of one tile."""

    tile: Tile


Unit = TypeVar("Unit", bound=Streamed)


@dataclass
class _Slot:
    buffer: Buffer
    free: Any  # the work that read it is done
    ready: Any = None  # its weights have arrived


class Stream:
    """Loads tiles in the order of an itinerary, `distance` tiles ahead of the one in use."""

    def __init__(
        self, device: Device, slots: int, distance: int, numel: int, dtype: torch.dtype
    ) -> None:
        """Args: `numel` elements of each slot, the largest tile's."""
        self._device = device
        self._distance = distance
        # Device memory is free to use only in the order of COMPUTE, where it was given.
        self._slots = [
            _Slot(device.empty(f"slot {i}", numel, dtype), device.record(COMPUTE))
            for i in range(slots)
        ]
        self._itinerary: list[Streamed] = []
        self._loaded = self._visited = 0

    def begin(self, itinerary: Sequence[Streamed]) -> None:
        """Set all visits of a step, both sweeps, and start the first loads."""
        self._itinerary = [unit for unit in itinerary if not unit.tile.resident]
        self._loaded = self._visited = 0
        self._load_until(self._distance)

    def visit(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, Buffer]]:
        """Each unit with its weights, which hold until the next one is asked for."""
        for unit in units:
            if unit.tile.resident:
                yield unit, unit.tile.weights
                continue
            position = self._visited
            assert self._itinerary[position] is unit, "visits must follow the itinerary"
            self._load_until(position + self._distance)
            slot = self._slots[position % len(self._slots)]
            self._device.wait(COMPUTE, slot.ready, "weights arrived")
            yield unit, slot.buffer
            slot.free = self._device.record(COMPUTE)
            self._visited += 1

    def _load_until(self, position: int) -> None:
        while self._loaded <= min(position, len(self._itinerary) - 1):
            slot = self._slots[self._loaded % len(self._slots)]
            self._load(self._itinerary[self._loaded].tile, slot)
            self._loaded += 1

    def _load(self, tile: Tile, slot: _Slot) -> None:
        self._device.wait(COPY_IN, tile.updated, "version due")
        self._device.wait(COPY_IN, slot.free, "slot free")
        self._device.copy(COPY_IN, slot.buffer, tile.weights, tile.layout.numel)
        slot.ready = self._device.record(COPY_IN)
