"""Which bytes of a save are still to be written, and where they are meanwhile.

A piece waits, is ready (its bytes are those of the step that is saved), is being written or moved,
and in the end is written. Before its tile is updated, a piece that is not written is copied into
spare memory; when that is full, the update waits for the writers. What leaves the device goes there
at once.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor

from megatrain import kernels
from megatrain.base.units import align
from megatrain.checkpoint import files, manifest
from megatrain.checkpoint.staging_blocks import StagingBlocks
from megatrain.device import Buffer
from megatrain.model.safetensors_io import DTYPE_NAMES, Described, header_bytes
from megatrain.optim import Plane
from megatrain.store.store import Tier, Tile
from megatrain.telemetry.cores import update_threads
from megatrain.tile import Entry, TileLayout

_PAGE = 4096  # pieces fill whole pages of the page cache


class Stage(Enum):
    """How far a piece is."""

    WAITING = auto()
    READY = auto()
    MOVING = auto()
    WRITING = auto()
    WRITTEN = auto()


@dataclass(eq=False)
class Piece:
    """Some bytes of a plane on their way into a file.

    Attributes:
        source: where the tile has them, as uint8.
        offset: of the first one in the file.
        tier: where the plane rests.
        memory: host memory that has them now: the plane itself, staging or spare memory.
        block: number of the spare block that it takes.
    """

    plane: Buffer
    source: Buffer
    offset: int
    tier: Tier
    memory: Tensor | None = None
    block: int | None = None
    stage: Stage = Stage.WAITING

    @property
    def num_bytes(self) -> int:
        return self.source.data.numel()


@dataclass(eq=False)
class TileFile:
    """A tile's file: header, then each plane, cut into pieces; of several ranks, those of this one.

    Attributes:
        num_bytes: of the whole file.
        planes: their lengths in the file.
        entries: the parameters in it.
        released: pieces that are written from host memory, where they rest.
        leaving: all others, which are copied there first.
    """

    tile: Tile
    name: str
    version: int
    num_bytes: int
    header: bytes
    pieces: list[Piece]
    planes: dict[str, manifest.Plane]
    entries: Sequence[Entry]

    def __post_init__(self) -> None:
        self.released = [piece for piece in self.pieces if piece.tier is Tier.HOST]
        self.leaving = [piece for piece in self.pieces if piece.tier is not Tier.HOST]


def planes_of(tile: Tile) -> dict[str, Plane]:
    """A tile's planes by their names in files; wide elements first, which keeps each aligned."""
    states_first = sorted(tile.planes, key=lambda plane: plane not in tile.states)
    wide_first = sorted(states_first, key=lambda plane: -plane.dtype.itemsize)
    return {file_name(plane): plane for plane in wide_first}


def file_name(plane: Plane) -> str:
    """A plane's name in files."""
    return plane.name.replace(" ", "_")


def tile_file(tile: Tile, name: str, *, trained: bool = False) -> TileFile:
    """The file `name` of a tile, no byte of it written.

    Args:
        trained: leave parameters out that no step changes; they lie last in every plane.
    """
    planes, layout = planes_of(tile), tile.layout
    stop = layout.trainable_numel if trained else layout.numel
    lengths = {n: saved_numel(p, layout, stop) for n, p in planes.items()}
    described = [Described(n, p.dtype, (lengths[n],)) for n, p in planes.items()]
    metadata = {"tile": tile.name, "version": str(tile.version)}
    header = header_bytes(described, metadata, boundary=_PAGE)
    end, pieces = len(header), []
    for plane, each in zip(planes.values(), described, strict=True):
        buffer, tier, size = tile.planes[plane], tile.rests.tier(plane), plane.dtype.itemsize
        flat = buffer.as_bytes()
        for shard in tile.shards(plane, each.shape[0]):
            first, stop = shard.start * size, (shard.start + shard.numel) * size
            for start in range(first, stop, files.PIECE_BYTES):
                part = flat.piece(start, min(start + files.PIECE_BYTES, stop))
                offset = end + shard.at * size + start - first
                pieces.append(Piece(buffer, part, offset, tier))
        end += each.num_bytes
    records = {n: manifest.Plane(DTYPE_NAMES[p.dtype], lengths[n]) for n, p in planes.items()}
    entries = layout.trainable if trained else layout.entries
    return TileFile(tile, name, tile.version, end, header, pieces, records, entries)


def saved_numel(plane: Plane, layout: TileLayout, stop: int) -> int:
    """Values of a plane that the file of a tile has, of its first `stop` elements."""
    return min(plane.numel(layout), plane.place(0, stop).stop)


def tile_record(job: TileFile) -> manifest.TileRecord:
    """The tile's part of the manifest."""
    parameters = tuple(
        manifest.Parameter(e.name, e.shape, e.offset, e.group, e.packed.name if e.packed else None)
        for e in job.entries
    )
    return manifest.TileRecord(job.tile.name, job.name, job.version, job.planes, parameters)


class Abandoned(Exception):
    """The save has failed: its pieces are of no use any more."""

    def __str__(self) -> str:
        return "it was broken off"


class Snapshot:
    """All pieces of one save, between the streams that own the planes and the writers."""

    def __init__(self, spare: StagingBlocks) -> None:
        self._spare = spare
        self._changed = threading.Condition()
        self._abandoned = False
        self.moved_bytes = 0
        self.waited = 0

    def room_for(self, piece: Piece) -> Tensor | None:
        """Whole pages for a piece that leaves, when there are some; None: nobody wants it."""
        with self._changed:
            while not self._abandoned:
                free = self._spare.free or self._spare.free_to_leave
                if free:
                    piece.block = free.pop()
                    self.moved_bytes += piece.num_bytes
                    return self._spare[piece.block][: align(piece.num_bytes, _PAGE)]
                self.waited += 1
                self._changed.wait()
            return None

    def release(self, pieces: Sequence[Piece], memory: Tensor | None = None) -> None:
        """The pieces hold what is to be saved, in their plane or in `memory` (of a single one)."""
        with self._changed:
            for piece in pieces:
                piece.memory = piece.source.data if memory is None else memory
                piece.stage = Stage.READY
                if self._abandoned:
                    self._free(piece)
            self._changed.notify_all()

    def set_aside(self, pieces: Sequence[Piece]) -> None:
        """Return when the memory of released pieces may be overwritten."""
        for piece in pieces:
            block = self._block_for(piece)
            if block is not None:
                assert piece.memory is not None
                spare = self._spare[block][: piece.num_bytes]
                kernels.copy(spare, piece.memory, threads=update_threads())
                self._change(piece, Stage.READY, spare)

    def _block_for(self, piece: Piece) -> int | None:
        """A spare block for a piece that needs one; waits for it, or for the piece's writer."""
        with self._changed:
            while not (self._abandoned or piece.stage is Stage.WRITTEN or piece.block is not None):
                if piece.stage is Stage.READY and self._spare.free:
                    piece.block, piece.stage = self._spare.free.pop(), Stage.MOVING
                    self.moved_bytes += piece.num_bytes
                    return piece.block
                self.waited += 1
                self._changed.wait()
            return None

    def take(self, piece: Piece) -> Any:
        """A piece's bytes, to be written, when it is ready.

        Raises:
            Abandoned: nobody wants them any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or piece.stage is Stage.READY)
            if self._abandoned:
                raise Abandoned
            piece.stage = Stage.WRITING
            assert piece.memory is not None
            return piece.memory.numpy().data

    def give(self, piece: Piece) -> None:
        """A piece that was taken is written, or is not going to be."""
        self._change(piece, Stage.WRITTEN, None)

    def _change(self, piece: Piece, stage: Stage, memory: Tensor | None) -> None:
        with self._changed:
            piece.stage, piece.memory = stage, memory
            if stage is Stage.WRITTEN or self._abandoned:
                self._free(piece)
            self._changed.notify_all()

    def abandon(self, pieces: Sequence[Piece]) -> None:
        """Let everybody go who waits for the writers, and the other way round."""
        with self._changed:
            self._abandoned = True
            for piece in pieces:
                if piece.stage is Stage.READY:  # all others free theirs when they are through
                    self._free(piece)
            self._changed.notify_all()

    def _free(self, piece: Piece) -> None:
        if piece.block is not None:
            self._spare.give(piece.block)
            piece.block, piece.stage, piece.memory = None, Stage.WRITTEN, None
