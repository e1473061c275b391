"""One run in a folder at a time."""

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.errors import InputError
from megatrain.run_folder.layout import LOCK, require_plain

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an existing run folder.

    The kernel gives it back when the process ends, however it ends, so nothing is ever stale. The
    file stays: to delete it would let a third process lock another file of the same name.

    Raises:
        InputError: another process holds it.
    """
    path = folder / LOCK
    require_plain(path)
    with path.open("a+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = " ".join(file.read(200).split()) or "another process"
            raise InputError(
                f"{folder}: {holder} is writing there; wait until it ends or choose another folder"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("%s: no locks there (%s); start no second run in it", folder, error)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
