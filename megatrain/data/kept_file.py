"""Files that runs write and read again; each read is checked against checksums.

Nothing is memory-mapped. A mapped file that somebody cuts short kills the process with SIGBUS, and
a page that was right when it was mapped need not stay so; a read fails in one line, and the run can
save what it has learnt. The open file also stays readable when its name is deleted.
"""

import os
import zlib
from array import array
from functools import partial
from pathlib import Path

from megatrain.base.units import KIB
from megatrain.base.whole_files import fill
from megatrain.errors import RunFailed, explained

# Bytes for one checksum: a row of 4,096 tokens touches two blocks at most, sums take 0.01 %.
BLOCK_BYTES = 32 * KIB


def block_sums(path: Path) -> bytes:
    """CRC-32 of each block of a file's bytes. It detects every flip of up to three bits."""
    with path.open("rb") as file:
        return array("I", map(zlib.crc32, iter(partial(file.read, BLOCK_BYTES), b""))).tobytes()


class KeptFile:
    """A file to read, whose bytes must be as they were written.

    Attributes:
        identity: its size, and when it was written (ns).
    """

    def __init__(self, path: Path, sums: bytes | None = None) -> None:
        """Open the file. Raises OSError.

        Args: `sums`: its `block_sums`; None: the reader has checksums of its own.
        """
        self._path, self._sums = path, None if sums is None else array("I", sums)
        self._file = path.open("rb", buffering=0)
        status = os.fstat(self._file.fileno())
        self.identity = status.st_size, status.st_mtime_ns

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Read exactly these bytes; any thread may call it.

        Raises RunFailed: they cannot be read, or a block that has some of them is not as written.
        """
        if self._sums is None:
            return self._read(offset, num_bytes)
        first = offset // BLOCK_BYTES
        start = first * BLOCK_BYTES
        stop = min(-(-(offset + num_bytes) // BLOCK_BYTES) * BLOCK_BYTES, self.identity[0])
        data = self._read(start, max(stop, offset + num_bytes) - start)
        for block, at in enumerate(range(0, len(data), BLOCK_BYTES), first):
            if zlib.crc32(data[at : at + BLOCK_BYTES]) != self._sums[block]:
                raise self._damage(f"block {block}", start + at, BLOCK_BYTES)
        return data[offset - start :][:num_bytes]

    def _damage(self, what: str, offset: int, num_bytes: int) -> RunFailed:
        return RunFailed(
            f"{self._path}: {what} ({num_bytes:,} bytes at byte {offset:,}) is not as it was "
            "written: the disk or memory is faulty, or another program has changed it; delete "
            f"{self._path.parent}, and the next start makes it again"
        )

    def _read(self, offset: int, num_bytes: int) -> memoryview:
        data, descriptor = memoryview(bytearray(num_bytes)), self._file.fileno()
        problem = f"{self._path}: cannot be read any more"
        with explained(problem, of=(OSError, EOFError), into=RunFailed):
            if os.fstat(descriptor).st_size != self.identity[0]:
                raise self._damage("its size", 0, self.identity[0])
            fill(data, descriptor, offset)
        return data
