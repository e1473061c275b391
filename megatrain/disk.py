"""What must have reached the disk before something else does."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Put a file or the names in a folder on the disk.

    A rename must not get there before what it names.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
