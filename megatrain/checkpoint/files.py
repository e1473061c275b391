"""Files and folders of checkpoints.

A folder is written under a hidden name and renamed when everything in it has reached the disk, so
it is whole or not there. Each file is a row of pieces with a checksum each, so that many threads
write and check it, and a reader holds no more than a piece.
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
from typing import Any

import numpy as np

from megatrain.base import huge_pages
from megatrain.base.whole_files import BLOCK, forget_pages, hidden, pass_cache_by
from megatrain.errors import InputError, RunFailed, explained, os_reason

try:
    import xxhash
except ImportError:  # it comes with every installation, but some machines run from a bare checkout
    xxhash = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
_DIRECT_BYTES = 8 << 20  # of a file that are on their way past the page cache
MAX_PIECE_BYTES = 256 << 20  # a reader makes room for one, whatever a manifest says

PARTIAL, REPLACED, REMOVED = (f".checkpoint-{end}" for end in ("partial", "replaced", "removed"))

# Hexadecimal digits of 64 bits. Both leave Python's lock while they run; on one core xxh3 reads
# 22 GB/s and blake2b 0.8 GB/s.
ALGORITHMS: dict[str, Callable[[Any], str]] = {
    "blake2b_64": lambda data: hashlib.blake2b(data, digest_size=8).hexdigest()
}
if xxhash is not None:
    ALGORITHMS["xxh3_64"] = xxhash.xxh3_64_hexdigest
Sums = list[tuple[int, int, str]]  # of pieces: where they begin, their bytes, the checksum
ALGORITHM = "xxh3_64" if xxhash is not None else "blake2b_64"


class NewFile:
    """A file being written; whole on the disk when the `with` block ends well.

    Whole blocks go past the page cache where the file system lets them (O_DIRECT): there are disks
    that take them eight times faster than dirty pages, and these would take memory.
    """

    def __init__(self, path: Path, *, exists: bool = False) -> None:
        """Args: `exists`: the file is there, and other processes write other bytes of it."""
        new = 0 if exists else os.O_CREAT | os.O_EXCL
        self._handle = os.open(path, os.O_WRONLY | new, 0o666)
        self._past = os.open(path, os.O_WRONLY)
        self._direct = pass_cache_by(self._past)
        # Whole pages, as direct access demands.
        self._room = np.frombuffer(huge_pages.mapping(_DIRECT_BYTES), np.uint8)

    def write(self, data: Any, offset: int) -> None:
        """Put `data` (bytes or a flat memoryview of them) at `offset`; one thread at a time."""
        unwritten = memoryview(data)
        while len(unwritten) > 0:
            blocks = min(len(unwritten) // BLOCK * BLOCK, _DIRECT_BYTES)
            if not self._direct:
                count = self._write_cached(unwritten, offset)
            elif offset % BLOCK or not blocks:
                count = self._write_cached(unwritten[: -offset % BLOCK or len(unwritten)], offset)
            else:
                buffer = self._room[:blocks]
                buffer[:] = np.frombuffer(unwritten[:blocks], np.uint8)  # without Python's lock
                try:
                    count = os.pwrite(self._past, buffer.data, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    # Larger blocks are asked for, or a limit of the file's size cuts one.
                    count = self._write_cached(unwritten[:blocks], offset)
            unwritten, offset = unwritten[count:], offset + count

    def _write_cached(self, part: memoryview, offset: int) -> int:
        count = os.pwrite(self._handle, part, offset)  # one call writes 2 GiB at most
        forget_pages(self._handle, offset, count)
        return count

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(self, error: type[BaseException] | None, *details: object) -> None:
        try:
            if error is None:
                os.fsync(self._handle)
                forget_pages(self._handle)
        finally:
            os.close(self._handle)
            os.close(self._past)


def require_seen(path: Path) -> None:
    """Raises InputError: this host does not see rank 0's folder, even with a fresh listing."""
    if not path.parent.is_dir() or path.name not in os.listdir(path.parent):
        raise InputError(
            f"{path}: made by rank 0, but not there on {socket.gethostname()}; give a folder of a "
            "file system that all hosts have in the same place"
        )


def joined_sums(tile: str, by_rank: Sequence[Sums]) -> tuple[tuple[int, str], ...]:
    """Bytes and checksums of a tile's pieces in the order of their offsets, over all ranks."""
    pieces = sorted({piece for sums in by_rank for piece in sums})
    if len({offset for offset, *_ in pieces}) < len(pieces):
        raise RunFailed(
            f"the weights or states of {tile} differ between hosts, but should be the same to the "
            "bit: a machine has a fault; go on from an earlier checkpoint"
        )
    return tuple((size, checksum) for _, size, checksum in pieces)


def settle(path: Path) -> tuple[int, tuple[tuple[int, str], ...]]:
    """Flush a file that was written elsewhere to the disk; its size and its pieces' checksums."""
    pieces = []
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            pieces.append((len(data), ALGORITHMS[ALGORITHM](data)))
        os.fsync(file.fileno())
    return sum(size for size, _ in pieces), tuple(pieces)


def regular_size(folder: Path, name: str) -> int:
    """The size of the regular file `name` below `folder`. Raises InputError: a link, or none."""
    path = folder / name
    with explained(f"{path}: missing", of=OSError):
        status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode) or path.resolve() != folder.resolve() / name:
        raise InputError(f"{path}: not a regular file; links are not followed")
    return status.st_size


def remove(folder: Path) -> None:
    """Remove a checkpoint, after a rename that hides it at once; a read-only one is left whole."""
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    moved_away = hidden(folder, REMOVED)
    os.rename(folder, moved_away)
    shutil.rmtree(moved_away)


def put_right(parent: Path) -> None:
    """Remove leftovers of killed saves and removals in `parent`; bring back folders moved aside.

    Folders of running saves stay (`claimed`): other engines may save beside this one. A leftover
    that cannot be removed only causes a warning: it takes space, but saves can go on.
    """
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if path.name[0] != "." or not path.name.endswith((PARTIAL, REPLACED, REMOVED)):
            continue
        original = path.with_name(path.name[1:].rpartition(".")[0])
        if path.name.endswith(REPLACED) and not os.path.lexists(original):
            os.rename(path, original)
            continue
        try:
            if path.is_symlink():  # a link had the name of a checkpoint
                os.unlink(path)
            else:
                with claimed(path) as is_free:
                    if is_free:
                        shutil.rmtree(path)
        except OSError as error:
            _log.warning("%s: left over, and cannot be removed (%s)", path, os_reason(error))


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Until this context or the process ends, `put_right` leaves `folder` alone (a file lock).

    Yields False if another one has claimed it before.
    """
    handle, is_free = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # a file system without locks has nobody to ask
            is_free = not isinstance(error, BlockingIOError)
        yield is_free
    finally:
        os.close(handle)
