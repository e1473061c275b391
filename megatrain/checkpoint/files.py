"""Files and folders of checkpoints.

A folder is written under a hidden name and renamed when everything in it has reached the disk, so
it is whole or not there. Each file is a sequence of pieces with a checksum each, so that many
threads can write and check the file, and a reader needs memory for one piece.
"""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from megatrain.base import huge_pages
from megatrain.base.whole_files import BLOCK, forget_pages, hidden, pass_cache_by
from megatrain.errors import InputError, RunFailed, explained, os_reason

_log = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
_DIRECT_BYTES = 8 << 20  # the most that one direct write takes
MAX_PIECE_BYTES = 256 << 20  # the largest piece that a manifest may name: readers allocate one

PARTIAL, REPLACED, REMOVED = (f".checkpoint-{end}" for end in ("partial", "replaced", "removed"))

# Checksums as hexadecimal digits of 64 bits. Both release Python's lock; on one core xxh3 reads
# 22 GB/s and blake2b 0.8 GB/s, which early versions took where xxhash was missing.
ALGORITHM = "xxh3_64"
ALGORITHMS: dict[str, Callable[[Any], str]] = {
    ALGORITHM: xxhash.xxh3_64_hexdigest,
    "blake2b_64": lambda data: hashlib.blake2b(data, digest_size=8).hexdigest(),
}


class PieceSum(NamedTuple):
    """A piece of a file, and its checksum."""

    offset: int
    num_bytes: int
    checksum: str


class NewFile:
    """An empty file being written; the file is whole on the disk when the `with` block ends well.

    Other processes may write other bytes of it.

    Whole blocks bypass the page cache if the file system has O_DIRECT: some disks take them eight
    times faster than dirty pages, which also take memory.
    """

    def __init__(self, path: Path) -> None:
        self._cached = os.open(path, os.O_WRONLY)
        self._direct = os.open(path, os.O_WRONLY)
        self._is_direct = pass_cache_by(self._direct)
        # O_DIRECT needs memory of whole pages.
        self._buffer = np.frombuffer(huge_pages.mapping(_DIRECT_BYTES), np.uint8)

    def write(self, data: Any, offset: int) -> None:
        """Write `data` (bytes or a flat memoryview) at `offset`; one thread at a time."""
        unwritten = memoryview(data)
        while len(unwritten) > 0:
            blocks = min(len(unwritten) // BLOCK * BLOCK, _DIRECT_BYTES)
            if not self._is_direct:
                count = self._write_cached(unwritten, offset)
            elif offset % BLOCK or not blocks:
                count = self._write_cached(unwritten[: -offset % BLOCK or len(unwritten)], offset)
            else:
                buffer = self._buffer[:blocks]
                buffer[:] = np.frombuffer(unwritten[:blocks], np.uint8)  # releases Python's lock
                try:
                    count = os.pwrite(self._direct, buffer.data, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    # The disk has larger blocks, or a limit of the file's size cuts a block.
                    count = self._write_cached(unwritten[:blocks], offset)
            unwritten, offset = unwritten[count:], offset + count

    def _write_cached(self, part: memoryview, offset: int) -> int:
        count = os.pwrite(self._cached, part, offset)  # one call writes 2 GiB at most
        forget_pages(self._cached, offset, count)
        return count

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(self, error: type[BaseException] | None, *details: object) -> None:
        try:
            if error is None:
                os.fsync(self._cached)
                forget_pages(self._cached)
        finally:
            os.close(self._cached)
            os.close(self._direct)


def require_seen(path: Path) -> None:
    """Raise InputError if this host does not see rank 0's folder, even in a fresh listing."""
    if not path.parent.is_dir() or path.name not in os.listdir(path.parent):
        raise InputError(
            f"{path}: made by rank 0, but not there on {socket.gethostname()}; give a folder of a "
            "file system that all hosts have in the same place"
        )


def joined_sums(tile: str, by_rank: Sequence[list[PieceSum]]) -> tuple[tuple[int, str], ...]:
    """Bytes and checksums of a tile's pieces from all ranks, in the order of their offsets."""
    pieces = sorted({piece for sums in by_rank for piece in sums})
    if len({offset for offset, *_ in pieces}) < len(pieces):
        raise RunFailed(
            f"the weights or states of {tile} differ between hosts, but should be the same to the "
            "bit: a machine has a fault; go on from an earlier checkpoint"
        )
    return tuple((size, checksum) for _, size, checksum in pieces)


def settle(path: Path) -> tuple[int, tuple[tuple[int, str], ...]]:
    """Flush a file to the disk that other code has written; return its size and pieces."""
    pieces = []
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            pieces.append((len(data), ALGORITHMS[ALGORITHM](data)))
        os.fsync(file.fileno())
    return sum(size for size, _ in pieces), tuple(pieces)


def regular_size(folder: Path, name: str) -> int:
    """The size of the file `name` below `folder`. Raises InputError: missing, or not regular."""
    path = folder / name
    with explained(f"{path}: missing", of=OSError):
        status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode) or path.resolve() != folder.resolve() / name:
        raise InputError(f"{path}: not a regular file; links are not followed")
    return status.st_size


def remove(folder: Path) -> None:
    """Remove a checkpoint, which a rename hides first. Raises PermissionError: it is read-only."""
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    renamed = hidden(folder, REMOVED)
    os.rename(folder, renamed)
    shutil.rmtree(renamed)


def put_right(parent: Path) -> None:
    """Remove leftovers of killed saves and removals in `parent`; bring back replaced folders.

    Folders of running saves stay (`claimed`): other engines may save beside this one. A leftover
    that cannot be removed causes a warning only, since it does not hinder saves.
    """
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if path.name[0] != "." or not path.name.endswith((PARTIAL, REPLACED, REMOVED)):
            continue
        original = path.with_name(path.name[1:].rpartition(".")[0])
        if path.name.endswith(REPLACED) and not os.path.lexists(original):
            os.rename(path, original)
            continue
        try:
            if path.is_symlink():  # a link that had a checkpoint's name
                os.unlink(path)
            else:
                with claimed(path) as is_free:
                    if is_free:
                        shutil.rmtree(path)
        except OSError as error:
            _log.warning("%s: left over, and cannot be removed (%s)", path, os_reason(error))


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Keep `put_right` from removing `folder` (by a file lock) in this context.

    Yields False if another process or context has claimed the folder.
    """
    handle, is_free = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # a file system without locks cannot tell: take it as free
            is_free = not isinstance(error, BlockingIOError)
        yield is_free
    finally:
        os.close(handle)
