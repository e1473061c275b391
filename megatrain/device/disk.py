"""Planes on a disk: one preallocated scratch file, and buffers that are ranges of it.

The file has no name, so no second run can open it, and it vanishes with the process. Reads and
writes bypass the page cache (O_DIRECT), a piece at a time.
"""

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partialmethod
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from megatrain import kernels
from megatrain.base.units import align, size
from megatrain.base.whole_files import BLOCK, forget_pages, pass_cache_by
from megatrain.device.base import Buffer
from megatrain.errors import DoesNotFit, InputError, RunFailed, explained, os_reason

_log = logging.getLogger(__name__)

# A read or a write is cut into pieces of this size, of which so many are on their way at once.
PIECE_BYTES, THREADS = 8 << 20, 4
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def disk_bytes(folder: str | os.PathLike[str], limit: int | None) -> int:
    """Free bytes of the disk of `folder`, at most `limit`.

    Raises InputError: there is no such folder, or it cannot be written into.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        problem = "not a folder" if path.exists() else "no such folder"
        raise InputError(f"disk is {os.fspath(folder)!r}: {problem}; make it, or name another")
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"disk is {os.fspath(folder)!r}: it cannot be written into; name another")
    free = shutil.disk_usage(path).free
    return free if limit is None else min(free, limit)


class PlaneFile:
    """Bytes on a disk, zeros at first. Threads may read and write different ranges at once."""

    def __init__(self, folder: str | os.PathLike[str], num_bytes: int) -> None:
        """Make a file of `num_bytes`, rounded up to whole blocks, in `folder`; allocate all of it.

        Raises InputError: no file can be made in `folder`; DoesNotFit: the disk has less room.
        """
        self.folder, self.num_bytes = Path(folder).expanduser(), align(num_bytes, BLOCK)
        with explained(f"{self.folder}: no file for planes can be made there", of=OSError):
            self._handle = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        try:
            _take_room(self._handle.fileno(), self.folder, self.num_bytes)
            self.direct = pass_cache_by(self._handle.fileno())
        except BaseException:
            self._handle.close()
            raise
        if not self.direct:
            _log.warning(
                "%s: the file system has no direct access (O_DIRECT); planes on disk go through "
                "the page cache, which takes host memory and is slower",
                self.folder,
            )

    def close(self) -> None:
        """Free the disk space; no read or write may be running."""
        self._handle.close()

    def _move(self, verb: str, offset: int, tensor: Tensor) -> None:
        """Read or write the bytes of `tensor`, from byte `offset` of the file on.

        Raises ValueError: offset, length or address is not a multiple of `BLOCK`; RunFailed: the
        disk fails, or the file is closed.
        """
        if self._handle.closed:
            raise RunFailed(f"{self.folder}: the planes' file is closed; make a new engine")
        data = tensor.view(torch.uint8)
        num_bytes, writes = data.numel(), verb == "write"
        if offset % BLOCK or num_bytes % BLOCK or data.data_ptr() % BLOCK:
            raise ValueError(f"{num_bytes} bytes at {offset} are not whole blocks of {BLOCK}")
        if not 0 <= offset <= self.num_bytes - num_bytes:
            raise ValueError(f"{num_bytes} bytes at {offset}: the file has {self.num_bytes}")
        file, at_once = self._handle.fileno(), {"piece": PIECE_BYTES, "threads": THREADS}
        try:
            kernels.move_file(file, offset, data, writes=writes, **at_once)
            if not self.direct:  # else errors would come late, and dirty pages would grow
                getattr(os, "fdatasync", os.fsync)(file)
                forget_pages(file, offset, num_bytes)
        except OSError as error:
            full = "; make room there" if error.errno in _FULL else ""
            raise RunFailed(
                f"{self.folder}: cannot {verb} planes on this disk: {os_reason(error)}{full}; "
                "resume from the last checkpoint"
            ) from error

    read, write = partialmethod(_move, "read"), partialmethod(_move, "write")


def _take_room(handle: int, folder: Path, num_bytes: int) -> None:
    """Allocate all blocks, so that writes cannot fill the disk later. Raises DoesNotFit."""
    status = os.fstatvfs(handle)
    free = status.f_bavail * status.f_frsize
    problem = f"{size(num_bytes - free)} are missing"
    if num_bytes <= free:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, num_bytes)
            else:  # a Mac: it can only make a file with holes
                os.ftruncate(handle, num_bytes)
            return
        except OSError as error:
            problem = os_reason(error)
    raise DoesNotFit(
        f"{folder}: no room for planes on this disk: {size(num_bytes)} wanted, {size(free)} free "
        f"({problem}); make room, or name a folder on another disk"
    )


# Elements of a tile that are read, updated and written at once: 64 MiB of AdamW's moments in fp32.
# They are whole blocks in every plane.
PIECE = 1 << 23


@dataclass
class DiskRoom:
    """Hands out ranges of one file, which is made once all ranges are known."""

    num_bytes: int = 0
    file: PlaneFile | None = None  # None on a device that computes nothing
    lock: Lock = field(default_factory=Lock)  # for blocks that two ranges share

    def buffer(self, name: str, numel: int, dtype: torch.dtype, piece_numel: int) -> "DiskBuffer":
        """Reserve a range that starts with a block; updates move `piece_numel` elements at once."""
        first = self.num_bytes
        self.num_bytes += align(numel * dtype.itemsize, BLOCK)
        data = torch.empty(numel, dtype=dtype, device="meta")
        return DiskBuffer(name, data, (), self, first, piece_numel)


@dataclass(eq=False)
class DiskBuffer(Buffer):
    """A range of a file; `data` is on the meta device and only has the range's size and dtype."""

    room: DiskRoom = field(default_factory=DiskRoom)
    at: int = 0  # the range's first byte in the file
    piece_numel: int = 1  # elements moved at once, which access checks treat as one buffer
    start: int = 0  # the range's first element in its plane

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each piece of `piece_numel` elements that the range touches."""
        numel = self.piece_numel
        pieces = range(self.start // numel, -(-(self.start + len(self.data)) // numel))
        return tuple(f"{self.name} {piece}" for piece in pieces)

    def piece(self, start: int, stop: int) -> "DiskBuffer":
        byte = self.at + start * self.data.itemsize
        return replace(self, data=self.data[start:stop], at=byte, start=self.start + start)

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
        """Yield memory for the elements of `place`; write its blocks when the context ends."""
        blocks, memory, inside = self._blocks(place)
        yield memory[inside].view(self.data.dtype)
        with self.room.lock:
            # Other ranges' elements in the first and the last block keep their values.
            for start, stop in ((0, inside.start), (inside.stop, len(memory))):
                if start < stop:
                    first, block = start // BLOCK * BLOCK, _memory(BLOCK)
                    replace(blocks, at=blocks.at + first).read(block)
                    memory[start:stop] = block[start - first : stop - first]
            blocks.write(memory)

    def _blocks(self, place: slice) -> tuple["DiskBuffer", Tensor, slice]:
        """The whole blocks around a range, memory for them, and the range's place in the memory."""
        itemsize = self.data.itemsize
        start, stop, _ = place.indices(len(self.data))
        first = (self.at + start * itemsize) // BLOCK * BLOCK
        inside = slice(self.at + start * itemsize - first, self.at + stop * itemsize - first)
        return replace(self, at=first), _memory(align(inside.stop, BLOCK)), inside


def _memory(num_bytes: int) -> Tensor:
    memory = torch.empty(num_bytes + BLOCK, dtype=torch.uint8)
    start = -memory.data_ptr() % BLOCK
    return memory[start : start + num_bytes]


def move(to: Buffer, source: Buffer, numel: int | None = None) -> None:
    """Copy the first `numel` elements within host memory, or whole blocks from or to a disk."""
    if isinstance(source, DiskBuffer):
        source.read(to.data)
    elif isinstance(to, DiskBuffer):
        to.write(source.data)
    else:
        to.data[:numel].copy_(source.data[:numel])
