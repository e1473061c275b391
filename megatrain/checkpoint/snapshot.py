"""The pieces of a save that are still to be written, and the memory that holds them meanwhile.

Only an update that would overwrite a piece waits for a save. A piece first waits. It is ready when
its bytes are those of the step to save; then it is written, or first moved to spare memory. A piece
in host memory is ready when its tile's newest update is done. If it is not written before the next
update, it is copied into spare memory; if that is full, the update waits for the writers. A piece
on the device or a disk is copied into spare memory at once, and the next update waits for the copy.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from megatrain import kernels
from megatrain.base.units import align
from megatrain.base.whole_files import BLOCK
from megatrain.checkpoint import files, manifest
from megatrain.checkpoint.read import planes_of
from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, SAVE
from megatrain.device.disk import DiskBuffer
from megatrain.errors import DoesNotFit, RunFailed
from megatrain.model.safetensors_io import DTYPE_NAMES, header_bytes
from megatrain.store.store import Reader, Tier, Tile
from megatrain.telemetry.host import host_available_bytes, update_threads

_log = logging.getLogger(__name__)

AT_ONCE = 4  # files that are written at a time, and files whose pieces leave the device at a time
TO_LEAVE = 2 * AT_ONCE  # blocks: a file is written from one block while its next one is filled


class Stage(Enum):
    """The progress of a piece."""

    WAITING = auto()
    READY = auto()
    MOVING = auto()
    WRITING = auto()
    WRITTEN = auto()


@dataclass(eq=False)
class Piece:
    """Some bytes of a plane to be written into a file."""

    plane: Buffer
    source: Buffer  # the bytes in the plane, as uint8
    offset: int  # place of the first byte in the file
    tier: Tier
    # host memory that has the bytes to write: the plane itself, or spare memory
    memory: Tensor | None = None
    block: Tensor | None = None  # the spare block that the piece has taken, if any
    stage: Stage = Stage.WAITING

    @property
    def num_bytes(self) -> int:
        return self.source.data.numel()


@dataclass(eq=False)
class TileFile:
    """A tile's file: a header, then the planes; and the pieces of it that this rank writes.

    Pieces in host memory are `released` and written from there; pieces `leaving` the device or a
    disk are copied to host memory first.
    """

    tile: Tile
    record: manifest.TileRecord
    num_bytes: int
    header: bytes
    pieces: list[Piece]

    def __post_init__(self) -> None:
        self.released = [piece for piece in self.pieces if piece.tier is Tier.HOST]
        self.leaving = [piece for piece in self.pieces if piece.tier is not Tier.HOST]


def tile_file(tile: Tile, name: str, *, trained: bool = False) -> TileFile:
    """Plan the file `name` of a tile, with all parameters or only the `trained` ones."""
    planes, layout = planes_of(tile), tile.layout
    stop = layout.trainable_numel if trained else layout.numel
    # Elements to save of each plane, which may have one for several values, or end before `stop`.
    lengths = {n: min(p.numel(layout), p.place(0, stop).stop) for n, p in planes.items()}
    on_meta = {n: torch.empty(lengths[n], dtype=p.dtype, device="meta") for n, p in planes.items()}
    metadata = {"tile": tile.name, "version": str(tile.version)}
    header = header_bytes(on_meta, metadata, boundary=BLOCK)  # pieces begin with whole pages
    end, pieces = len(header), []
    for plane, tensor in zip(planes.values(), on_meta.values(), strict=True):
        buffer, tier, size = tile.planes[plane], tile.rests.tier(plane), plane.dtype.itemsize
        flat = buffer.as_bytes()
        for shard in tile.shards(plane, tensor.shape[0]):
            first, last = shard.start * size, (shard.start + shard.numel) * size
            for start in range(first, last, files.PIECE_BYTES):
                part = flat.piece(start, min(start + files.PIECE_BYTES, last))
                pieces.append(Piece(buffer, part, end + shard.at * size + start - first, tier))
        end += tensor.nbytes
    records = {n: manifest.Plane(DTYPE_NAMES[p.dtype], lengths[n]) for n, p in planes.items()}
    entries, skipped = layout.trainable if trained else layout.entries, tile.skipped
    packed = {e.name: e.packed.name for e in entries if e.packed}
    parameters = tuple(
        manifest.Parameter(e.name, e.shape, e.offset, e.group, packed.get(e.name), skipped[e.name])
        for e in entries
    )
    record = manifest.TileRecord(tile.name, name, tile.version, records, parameters)
    return TileFile(tile, record, end, header, pieces)


class StagingBlocks:
    """Spare host memory for pieces that change before they are written, or leave device or disk.

    Its blocks, of a piece's size, are allocated when first needed and kept from save to save.
    `reserved` blocks are for pieces that leave the device or a disk. These are written in order:
    a writer would wait forever for a block if pieces that are written later held all of them.
    """

    def __init__(self, device: Device, most_bytes: int | None, host_limit: int | None) -> None:
        """Args: `most_bytes`: None: half of the memory free at the first background save."""
        self._device, self._most_bytes, self._host_limit = device, most_bytes, host_limit
        self._has_background_blocks = False
        self.num_bytes = self.reserved = 0
        self.free: list[Tensor] = []

    def prepare(self, pieces: Sequence[int], *, leaving: bool, background: bool) -> None:
        """Allocate blocks for a save of `pieces` (their bytes), or as many as memory allows.

        Raises DoesNotFit: too little is free for the planes `leaving` the device or a disk.
        """
        if leaving and not self.reserved:
            self._add(TO_LEAVE, pinned=True)
            self.reserved = TO_LEAVE
        if background and not self._has_background_blocks:
            self._has_background_blocks = True
            limit = self._most_bytes
            if limit is None:
                # Half, because later steps and the process may need more memory.
                limit = host_available_bytes(self._host_limit) // 2
            # A block holds one piece. Small pieces are written so soon that their blocks are used
            # again: twice the blocks that full pieces of as many bytes take are enough.
            full_pieces = -(-sum(pieces) // files.PIECE_BYTES)
            num_blocks = min(limit // files.PIECE_BYTES, len(pieces), 2 * full_pieces)
            while num_blocks > 0:
                try:
                    self._add(num_blocks, pinned=leaving)
                    break
                except DoesNotFit as error:
                    num_blocks //= 2
                    _log.warning("saves will hold up updates more than need be: %s", error)

    def _add(self, blocks: int, *, pinned: bool) -> None:
        size = blocks * files.PIECE_BYTES
        buffer = self._device.host("spare room of saves", size, torch.uint8, pinned=pinned)
        self.num_bytes += size
        self.free += buffer.data.split(files.PIECE_BYTES)


class Snapshot:
    """Hands the pieces of one save from the streams that own their planes to the writers.

    `moved_bytes`: bytes copied to spare memory; `waited`: how often a stream waited for writers.
    """

    def __init__(self, spare: StagingBlocks) -> None:
        self._spare = spare
        self._changed = threading.Condition()
        self._abandoned = False
        self.moved_bytes = 0
        self.waited = 0

    def start(self, device: Device, tile_files: Sequence[TileFile]) -> None:
        """Put a save of the state after all started updates on its stream."""
        for file in tile_files:
            file.tile.readers = ()
            if not (released := file.released):
                continue
            device.wait(SAVE, file.tile.updated, "version to save")
            # To access checks the writers read as this stream, from here until `set_aside`.
            planes = list(dict.fromkeys(piece.plane for piece in released))
            device.run(SAVE, f"release {file.tile.name}", partial(self.release, released), planes)
            set_aside = partial(self.set_aside, released)
            file.tile.readers += (Reader(device.record(SAVE), "tile released", set_aside),)
        leaving = [file for file in tile_files if file.leaving]
        if any(piece.tier is Tier.DEVICE for file in leaving for piece in file.leaving):
            device.wait(SAVE, device.record(COMPUTE), "resident version to save")
        for first in range(0, len(leaving), AT_ONCE):
            self._let_leave(device, leaving[first : first + AT_ONCE])

    def _let_leave(self, device: Device, group: Sequence[TileFile]) -> None:
        """Let pieces of several files leave in turn, so that each file's writer has work."""
        for file in group:
            device.wait(SAVE, file.tile.written, "version to save from the disk")
        for row in zip_longest(*(file.leaving for file in group)):
            for piece in filter(None, row):
                work = partial(self._leave, device, piece)
                device.run(SAVE, f"{piece.plane.name} leaves", work, [piece.plane])
        event = device.record(SAVE)
        for file in group:
            file.tile.readers += (Reader(event, "what left is saved"),)

    def _leave(self, device: Device, piece: Piece) -> None:
        """Copy a piece from the device or a disk into a spare block, and release it."""
        block = self._block_for(piece, leaves=True)
        if block is None:
            return
        target = block[: piece.num_bytes]
        if isinstance(piece.source, DiskBuffer) and piece.source.at % BLOCK == 0:
            piece.source.read(block[: align(piece.num_bytes, BLOCK)])
        elif isinstance(piece.source, DiskBuffer):  # a rank's block of frozen weights
            target.copy_(piece.source.values())
        else:
            device.fetch(target, piece.source.data)
        self.release([piece], target)

    def release(self, pieces: Sequence[Piece], memory: Tensor | None = None) -> None:
        """Mark pieces as ready to be written from their planes, or a single one from `memory`."""
        with self._changed:
            for piece in pieces:
                piece.memory = piece.source.data if memory is None else memory
                piece.stage = Stage.READY
                if self._abandoned:
                    self._free(piece)
            self._changed.notify_all()

    def set_aside(self, pieces: Sequence[Piece]) -> None:
        """Let updates overwrite released pieces: copy each, or wait until it is written."""
        for piece in pieces:
            block = self._block_for(piece, leaves=False)
            if block is not None:
                assert piece.memory is not None
                spare = block[: piece.num_bytes]
                kernels.copy(spare, piece.memory, threads=update_threads())
                self.change(piece, Stage.READY, spare)

    def _block_for(self, piece: Piece, *, leaves: bool) -> Tensor | None:
        """Wait for a spare block for a piece; None: the save has failed, or none is needed."""
        reserved = 0 if leaves else self._spare.reserved
        with self._changed:
            while not (self._abandoned or piece.stage is Stage.WRITTEN or piece.block is not None):
                ready = leaves or piece.stage is Stage.READY
                if ready and len(self._spare.free) > reserved:
                    piece.block, piece.stage = self._spare.free.pop(), Stage.MOVING
                    self.moved_bytes += piece.num_bytes
                    return piece.block
                self.waited += 1
                self._changed.wait()
            return None

    def take(self, piece: Piece) -> Any:
        """Wait until a piece is ready, and return its bytes. Raises RunFailed: the save failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or piece.stage is Stage.READY)
            if self._abandoned:
                raise RunFailed("it was broken off")
            piece.stage = Stage.WRITING
            assert piece.memory is not None
            return piece.memory.numpy().data

    def change(self, piece: Piece, stage: Stage, memory: Tensor | None) -> None:
        """Set a piece's stage and the memory of its bytes; a written piece gives up its block."""
        with self._changed:
            piece.stage, piece.memory = stage, memory
            if stage is Stage.WRITTEN or self._abandoned:
                self._free(piece)
            self._changed.notify_all()

    def abandon(self, pieces: Sequence[Piece]) -> None:
        """Make the save fail: end all waits of streams for writers, and of writers for streams."""
        with self._changed:
            self._abandoned = True
            for piece in pieces:
                if piece.stage is Stage.READY:  # in other stages the block is freed at their end
                    self._free(piece)
            self._changed.notify_all()

    def _free(self, piece: Piece) -> None:
        if piece.block is not None:
            self._spare.free.append(piece.block)
            piece.block, piece.stage, piece.memory = None, Stage.WRITTEN, None
