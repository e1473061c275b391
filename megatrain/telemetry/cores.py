"""The cores this process may run on: its affinity (`taskset`, a container's) counts."""

import os
import sys

# Cores left to the thread that launches work and to the data loader.
_SPARE_CORES = 2


def usable_cores() -> int:
    """Logical cores this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def update_threads() -> int:
    """Number of the optimizer's host threads, if the placement does not set it."""
    return max(1, usable_cores() - _SPARE_CORES)
