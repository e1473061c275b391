"""A file that a whole run reads from: kept open, and read in calls that can fail.

A mapped file that somebody cuts short kills the process with SIGBUS; a read says so, and the run
can save what it has learnt. The open file also stays readable when its name is deleted.
"""

import os
from pathlib import Path

from megatrain.errors import RunFailed


class WatchedFile:
    """Bytes of a file which must stay as they were when it was opened.

    Attributes:
        identity: its size, and when it was written (ns).
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError."""
        self._path = path
        self._file = path.open("rb", buffering=0)
        self.identity = self._identity()

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Exactly these bytes; any thread may ask.

        Raises:
            RunFailed: the file has been changed or can no longer be read.
        """
        try:
            data = os.pread(self._file.fileno(), num_bytes, offset)
            while 0 < len(data) < num_bytes:  # one call reads 2 GiB at most
                more = os.pread(self._file.fileno(), num_bytes - len(data), offset + len(data))
                if not more:
                    break
                data += more
            unchanged = self._identity() == self.identity
        except OSError as error:
            raise RunFailed(f"{self._path}: cannot be read any more: {error.strerror}") from error
        if len(data) < num_bytes or not unchanged:
            raise RunFailed(
                f"{self._path}: changed by another program while the run was reading it; "
                "the next start makes it again"
            )
        return data

    def _identity(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns
