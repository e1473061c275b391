"""Gradients become directions on the device, where their sums are complete.

What a rule keeps for that comes in from the host, or a disk, while the layer's backward runs, and
goes back (`Rule.average`). Of several ranks, each averages its block; the blocks are gathered, and
each makes directions of the matrices that its own block is of (`Rule.direct`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.device import Buffer, Device
from megatrain.device.base import (
    COMPUTE,
    COPY_IN,
    COPY_OUT,
    DISK_OUT,
    DISK_WEIGHTS,
    UPDATE,
    Kind,
    Memory,
    Name,
)
from megatrain.device.collectives import Collectives
from megatrain.engine.bit_checks import BitChecks
from megatrain.errors import InputError
from megatrain.optim import Rule
from megatrain.store.disk_staging import DiskTransfer
from megatrain.store.store import Tier, Tile
from megatrain.tile import Entry, TileKind

# Of state on its way: one comes in while another one leaves.
_ROOMS = 2
_FLOATS = 1024  # of a block on a disk

Settings = Mapping[str, Any]


@dataclass
class _Room:
    """Device memory for one tile's state."""

    buffer: Buffer
    free: Any
    ready: Any = None


def give_way(device: Device, tile: Tile, stream: str) -> None:
    """Before a stream overwrites a tile's planes, let it wait for a save that still reads them."""
    for reader in tile.readers:
        device.wait(stream, reader.event, reader.wait)
        if reader.set_aside is not None:
            device.run(stream, f"set aside {tile.name}", reader.set_aside)
    tile.readers = ()


class Directions:
    """Replaces gradients by a rule's directions on the device; most rules have none."""

    def __init__(
        self,
        device: Device,
        rule: Rule,
        tiles: Sequence[Tile],
        proceed: Buffer,
        collectives: Collectives,
        checks: BitChecks,
    ) -> None:
        """Args: `proceed`: the step's loss; while it is not finite no state is changed.

        Raises:
            InputError: the rule would direct a parameter outside of the layers.
        """
        self._device, self._rule, self._proceed = device, rule, proceed
        self._collectives, self._checks = collectives, checks
        directed = {t.index: [e for e in t.layout.trainable if rule.directed(e)] for t in tiles}
        self._directed = {index: entries for index, entries in directed.items() if entries}
        self._next_room, self._fetched = 0, {}  # type: ignore[var-annotated]
        with_state = [tile for tile in tiles if tile.index in self._directed]
        outside = [tile for tile in with_state if tile.layout.kind is not TileKind.LAYER]
        if outside:
            name = self._directed[outside[0].index][0].name
            raise InputError(
                f"{type(rule).__name__} takes {name!r} for a matrix of a layer, but it is outside "
                "of the layers; choose another optimizer"
            )
        numels = [self._range(t)[1] - self._range(t)[0] for t in with_state if self._state_moves(t)]
        self._disk = DiskTransfer(device, [self._state(tile) for tile in with_state])
        self._rooms = [
            _Room(device.empty(Name(Memory.GRADIENTS, name), max(numels), torch.float32), None)
            for name in (f"state {i} of directions" for i in range(_ROOMS if numels else 0))
        ]
        for room in self._rooms:
            device.run(COMPUTE, "allocate state of directions", lambda: None, writes=[room.buffer])
            room.free = device.record(COMPUTE)

    def has_any(self, tile: Tile) -> bool:
        """True if a tile has parameters whose gradients become directions."""
        return tile.index in self._directed

    def _state(self, tile: Tile) -> Buffer:
        start, stop = self._range(tile)
        [whole] = [buffer for plane, buffer in tile.states.items() if plane.on_device]
        return whole.piece(start, stop)

    def _range(self, tile: Tile) -> tuple[int, int]:
        """The bounds of the directed part of this rank's block; the first one rounded down."""
        (first, *_), (*_, last), block = (
            self._directed[tile.index],
            self._directed[tile.index],
            tile.trained,
        )
        start = max(0, first.offset - block.start) // _FLOATS * _FLOATS
        return start, max(start, min(last.offset + last.numel, block.stop) - block.start)

    def _parameters_here(self, tile: Tile) -> Iterator[tuple[Entry, int, int]]:
        """Directed parameters in this rank's block, each with `(start, stop)` in the tile."""
        block = tile.trained
        for entry in self._directed[tile.index]:
            start = max(entry.offset, block.start)
            stop = min(entry.offset + entry.numel, block.stop)
            if start < stop:
                yield entry, start, stop

    def _state_moves(self, tile: Tile) -> bool:
        return tile.rests.moments is not Tier.DEVICE

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of the lanes from and to a disk."""
        return self._disk.host_bytes

    def fetch_state(self, tile: Tile) -> None:
        """Start copying the state to the device, ahead of the time its gradient is complete."""
        if not self.has_any(tile) or not self._state_moves(tile):
            return
        room, device = self._rooms[self._next_room % _ROOMS], self._device
        self._next_room += 1
        self._fetched[tile.index], state = room, self._state(tile)
        to, on_disk = room.buffer.piece(0, len(state.data)), tile.rests.moments is Tier.DISK
        device.wait(DISK_WEIGHTS if on_disk else COPY_IN, room.free, "directions' room free")
        if on_disk:
            room.ready = self._disk.bring(tile, state, to)
            return
        # It is the newest state: the tile's weights were loaded on this stream after its update.
        device.copy(COPY_IN, to, state)
        room.ready = device.record(COPY_IN)

    def replace_gradients(
        self, tile: Tile, sums: Buffer, settings: Mapping[str, Settings], scale: float = 1.0
    ) -> None:
        """Replace gradients times `scale` by directions; `settings` by parameter.

        Each rank does this for its block of gradients, states and directions.
        """
        if not self.has_any(tile):
            return
        self._average(tile, sums, settings, scale)
        self._collectives.complete(sums, f"averages of {tile.name}")
        rule, here = self._rule, [*self._parameters_here(tile)]

        def work() -> None:
            for entry, start, stop in here:
                rule.direct(entry, _matrices(entry, sums.data, start, stop))

        self._device.run(COMPUTE, Name(Kind.PLAIN, f"direct {tile.name}"), work, [], [sums])

    def _average(
        self, tile: Tile, sums: Buffer, settings: Mapping[str, Settings], scale: float
    ) -> None:
        """Update the state with the gradients; the averages replace the gradients."""
        device, whole, room = self._device, self._state(tile), self._fetched.pop(tile.index, None)
        state = whole
        if room is None:
            give_way(self._device, tile, COMPUTE)
        else:
            device.wait(COMPUTE, room.ready, "directions' state arrived")
            state = room.buffer.piece(0, len(whole.data))
        at, rule, here = self._range(tile)[0], self._rule, self._parameters_here(tile)
        first, checks = tile.trained.start + at, self._checks

        def work() -> None:
            proceed = self._proceed.data[0].isfinite()
            with checks.averaging(tile, state, at):
                for entry, start, stop in here:
                    gradient, kept = sums.data[start:stop], state.data[start - first : stop - first]
                    rule.average(gradient.mul_(scale), kept, settings[entry.name], proceed)

        name = Name(Kind.PLAIN, f"average {tile.name}")
        device.run(COMPUTE, name, work, [self._proceed], [sums, state, checks.flag])
        if room is None:
            return
        out = DISK_OUT if tile.rests.moments is Tier.DISK else COPY_OUT
        device.wait(out, device.record(COMPUTE), "directions' state ready")
        if tile.readers:
            give_way(self._device, tile, UPDATE)
            device.wait(out, device.record(UPDATE), "directions' state released")
        if out == DISK_OUT:
            room.free = self._disk.take(tile, state, whole)
            return
        device.copy(COPY_OUT, whole, state)
        room.free = device.record(COPY_OUT)


def _matrices(entry: Entry, flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """A parameter's view in the tile's flat plane; of stacked matrices those within the range."""
    values = entry.view(flat)
    if len(entry.shape) < 3:
        return values
    numel = entry.shape[-2] * entry.shape[-1]
    return values[(start - entry.offset) // numel : -((entry.offset - stop) // numel)]
