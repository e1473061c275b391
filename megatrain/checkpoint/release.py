"""Puts a save on the device's streams: nobody waits but those who would overwrite its tiles.

What rests on the host is released to the writers when its tile's newest update is done, and the
next update first sets aside what they have not written. What rests on the device or a disk is
copied into spare memory by the host thread of saves; the next update waits until it has left.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import zip_longest

from megatrain.checkpoint.snapshot import Piece, Snapshot, TileFile
from megatrain.checkpoint.staging_blocks import AT_ONCE
from megatrain.device import Device
from megatrain.device.base import COMPUTE, SAVE
from megatrain.device.disk import DiskBuffer
from megatrain.device.plane_file import BLOCK
from megatrain.store.store import Reader, Tier


class Release:
    """One save's work on the streams."""

    def __init__(self, device: Device, snapshot: Snapshot) -> None:
        self._device, self._snapshot = device, snapshot

    def start(self, tile_files: Iterable[TileFile]) -> None:
        """Put everything on its stream; the state saved is that of the updates started so far."""
        files = list(tile_files)
        for each in files:
            each.tile.readers = ()
            if each.released:
                self._release(each)
        leaving = [each for each in files if each.leaving]
        if any(piece.tier is Tier.DEVICE for each in leaving for piece in each.leaving):
            self._device.wait(SAVE, self._device.record(COMPUTE), "resident version to save")
        for first in range(0, len(leaving), AT_ONCE):
            self._let_leave(leaving[first : first + AT_ONCE])

    def _release(self, file: TileFile) -> None:
        device, tile, snapshot = self._device, file.tile, self._snapshot
        device.wait(SAVE, tile.updated, "version to save")
        # The writers' reads count as this stream's: they begin here, and `set aside` ends them.
        device.run(
            SAVE,
            f"release {tile.name}",
            partial(snapshot.release, file.released),
            list(dict.fromkeys(piece.plane for piece in file.released)),
        )
        set_aside = partial(snapshot.set_aside, file.released)
        tile.readers += (Reader(device.record(SAVE), "tile released", set_aside),)

    def _let_leave(self, group: Sequence[TileFile]) -> None:
        """Pieces of several files in turn, so that as many writers have something to do."""
        device = self._device
        for file in group:
            device.wait(SAVE, file.tile.written, "version to save from the disk")
        for row in zip_longest(*(file.leaving for file in group)):
            for piece in filter(None, row):
                work = partial(self._leave, piece)
                device.run(SAVE, f"{piece.plane.name} leaves", work, [piece.plane])
        left = device.record(SAVE)
        for file in group:
            file.tile.readers += (Reader(left, "what left is saved"),)

    def _leave(self, piece: Piece) -> None:
        room = self._snapshot.room_for(piece)
        if room is None:
            return
        kept = room[: piece.num_bytes]
        if isinstance(piece.source, DiskBuffer) and piece.source.at % BLOCK == 0:
            piece.source.read(room)
        elif isinstance(piece.source, DiskBuffer):  # a rank's block of what is frozen
            kept.copy_(piece.source.values())
        else:
            self._device.fetch(kept, piece.source.data)
        self._snapshot.release([piece], kept)
