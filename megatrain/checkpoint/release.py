"""Puts a save on the device's streams: nobody waits but those who would overwrite its tiles.

A host tile is released to the writers when its newest update is done, and its next update first
sets aside what they have not written. A tile that rests on the device is copied into spare memory,
or where that is full through a few pinned staging rooms; its next update waits until it has left.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from megatrain.checkpoint import files
from megatrain.checkpoint.pieces import Piece, Snapshot, TileFile, planes_of
from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, SAVE, SAVE_OUT, UPDATE

AT_ONCE = 4  # files of resident tiles
STAGING_ROOMS = 2 * AT_ONCE


@dataclass
class _Room:
    """Pinned memory for a piece on its way from the device to a file."""

    buffer: Buffer
    held: tuple[Snapshot, Piece] | None = None  # what it was given last
    free: Any = None


class Staging:
    """The rooms, used in turn, kept from save to save; made when the first one is needed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rooms: deque[_Room] = deque()

    @property
    def num_bytes(self) -> int:
        """Pinned host memory taken."""
        return sum(room.buffer.data.nbytes for room in self._rooms)

    def next(self) -> _Room:
        """A room that SAVE_OUT may write: what it held is written, or set aside."""
        if not self._rooms:
            for i in range(STAGING_ROOMS):
                name, size = f"save staging {i}", files.PIECE_BYTES
                buffer = self._device.host(name, size, torch.uint8, pinned=True)
                self._rooms.append(_Room(buffer))
        room = self._rooms[0]
        self._rooms.rotate(-1)
        if room.held is not None:
            snapshot, piece = room.held
            self._device.run(
                SAVE, f"clear {room.buffer.name}", partial(snapshot.set_aside, [piece])
            )
            room.free = self._device.record(SAVE)
        self._device.wait(SAVE_OUT, room.free, "save staging free")
        return room


class Release:
    """One save's work on the streams."""

    def __init__(self, device: Device, snapshot: Snapshot, staging: Staging) -> None:
        self._device, self._snapshot, self._staging = device, snapshot, staging

    def start(self, tile_files: Iterable[TileFile]) -> None:
        """Put everything on its stream; the state saved is that of the updates started so far."""
        resident = []
        for each in tile_files:
            if each.tile.resident:
                resident.append(each)
            elif each.pieces:
                self._release(each)
        if resident:
            self._device.wait(SAVE_OUT, self._device.record(COMPUTE), "resident version to save")
        for first in range(0, len(resident), AT_ONCE):
            self._copy_out(resident[first : first + AT_ONCE])

    def _release(self, file: TileFile) -> None:
        device, tile, snapshot = self._device, file.tile, self._snapshot
        device.wait(SAVE, tile.updated, "version to save")
        # The writers' reads count as this stream's: they begin here, and `set aside` ends them.
        device.run(
            SAVE,
            f"release {tile.name}",
            partial(snapshot.release, file.pieces),
            list(planes_of(tile).values()),
        )
        released = device.record(SAVE)

        def let_go() -> None:
            device.wait(UPDATE, released, "tile released")
            device.run(UPDATE, f"set aside {tile.name}", partial(snapshot.set_aside, file.pieces))

        tile.let_go = let_go

    def _copy_out(self, group: Sequence[TileFile]) -> None:
        """Pieces of several files in turn, so that as many writers have something to do."""
        for row in zip_longest(*(file.pieces for file in group)):
            for piece in filter(None, row):
                self._offer(piece)
        copied = self._device.record(SAVE_OUT)
        for file in group:
            file.tile.let_go = partial(self._device.wait, COMPUTE, copied, "resident tile copied")

    def _offer(self, piece: Piece) -> None:
        device, snapshot, spare = self._device, self._snapshot, self._snapshot.reserve(piece)
        if spare is None:
            room = self._staging.next()
            room.held = (snapshot, piece)
            to = room.buffer
        else:
            to = Buffer(f"spare block {piece.block}", spare)
        source = Buffer(piece.plane.name, piece.source)
        device.copy(SAVE_OUT, to, source, piece.num_bytes)
        device.wait(SAVE, device.record(SAVE_OUT), "save piece landed")
        work = partial(snapshot.release, [piece], to.data[: piece.num_bytes])
        device.run(SAVE, f"offer {to.name}", work, [to])
