"""Planes on a disk as buffers: streams move their bytes, a piece at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock

import torch
from torch import Tensor

from megatrain.base.units import align
from megatrain.device.base import Buffer
from megatrain.device.plane_file import BLOCK, PlaneFile

# Elements of a tile that are read, updated and written at once: AdamW's moments take 64 MiB in
# fp32. In all planes a multiple of whole blocks.
PIECE = 1 << 23


@dataclass
class DiskRoom:
    """Space for buffers in one file, which is made once all buffers are known.

    Attributes:
        file: None where nothing is computed.
    """

    num_bytes: int = 0
    file: PlaneFile | None = None
    lock: Lock = field(default_factory=Lock)  # of blocks that two ranges share

    def buffer(self, name: str, numel: int, dtype: torch.dtype, moved: int) -> "DiskBuffer":
        """Reserve zeros that begin with a block; updates move `moved` elements at a time."""
        at, self.num_bytes = self.num_bytes, self.num_bytes + align(numel * dtype.itemsize, BLOCK)
        data = torch.empty(numel, dtype=dtype, device="meta")
        return DiskBuffer(name, data, (), self, at, moved)


@dataclass(frozen=True, eq=False)
class DiskBuffer(Buffer):
    """A range of a file; `data` is on the meta device and has only its size.

    Attributes:
        at: its first byte in the file.
        moved: elements that are moved at a time; access checks take them for one.
        start: its first element in the plane.
    """

    room: DiskRoom = field(default_factory=DiskRoom)
    at: int = 0
    moved: int = 1
    start: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        first, stop = self.start // self.moved, -(-(self.start + len(self.data)) // self.moved)
        return tuple(f"{self.name} {piece}" for piece in range(first, stop))

    def piece(self, start: int, stop: int) -> "DiskBuffer":
        at, first = self.at + start * self.data.itemsize, self.start + start
        data = self.data[start:stop]
        return DiskBuffer(self.name, data, self.parts, self.room, at, self.moved, first)

    def read(self, to: Tensor) -> None:
        """Read whole blocks from the first byte on into `to`. Raises RunFailed."""
        assert self.room.file is not None
        self.room.file.read(self.at, to)

    def write(self, data: Tensor) -> None:
        """Write whole blocks from the first byte on. Raises RunFailed."""
        assert self.room.file is not None
        self.room.file.write(self.at, data)

    def values(self, place: slice = slice(None)) -> Tensor:
        blocks, memory, inside = self._blocks(place)
        blocks.read(memory)
        return memory[inside].view(self.data.dtype)

    @contextmanager
    def writing(self, place: slice) -> Iterator[Tensor]:
        blocks, memory, inside = self._blocks(place)
        yield memory[inside].view(self.data.dtype)
        with self.room.lock:
            # Elements of others in the first and the last block keep their values.
            for edge, others in (inside.start, slice(0, inside.start)), (
                inside.stop, slice(inside.stop % BLOCK, BLOCK)
            ):  # fmt: skip
                if edge % BLOCK:
                    first = edge // BLOCK * BLOCK
                    block = _memory(BLOCK)
                    replace(blocks, at=blocks.at + first).read(block)
                    memory[first : first + BLOCK][others] = block[others]
            blocks.write(memory)

    def _blocks(self, place: slice) -> tuple["DiskBuffer", Tensor, slice]:
        """The blocks that contain a range, memory for them, and the range's place in this."""
        size = self.data.itemsize
        start, stop, _ = place.indices(len(self.data))
        first = (self.at + start * size) // BLOCK * BLOCK
        inside = slice(self.at + start * size - first, self.at + stop * size - first)
        return replace(self, at=first), _memory(align(inside.stop, BLOCK)), inside


def _memory(num_bytes: int) -> Tensor:
    """Memory aligned to a block, as direct access demands."""
    room = torch.empty(num_bytes + BLOCK, dtype=torch.uint8)
    start = -room.data_ptr() % BLOCK
    return room[start : start + num_bytes]


def move(to: Buffer, source: Buffer, numel: int | None = None) -> None:
    """Copy the first elements within host memory, or whole blocks from or to a disk."""
    if isinstance(source, DiskBuffer):
        source.read(to.data)
    elif isinstance(to, DiskBuffer):
        to.write(source.data)
    else:
        to.data[:numel].copy_(source.data[:numel])
