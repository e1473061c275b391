"""Host memory: this process's use and limits."""

import os
import resource
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from megatrain.base.units import parse_bytes
from megatrain.errors import InputError
from megatrain.telemetry.cgroups import cgroup_files

HOST_MEMORY = "MEGATRAIN_HOST_MEMORY"
CHILDREN_SECONDS = 1.0  # between two scans of a process's children, each of which takes 4 ms


class ProcessTree:
    """A process and its children, in any session.

    Pages shared by children count proportionally (PSS): 16 compile workers of torch,
    forked and idle, had 3.5 GiB resident and a PSS of 0.25 GiB.
    """

    def __init__(self, process: int) -> None:
        """Raises psutil.NoSuchProcess."""
        self._process = psutil.Process(process)
        self._children, self._due = 0, 0.0

    def num_bytes(self) -> int:
        """Resident memory now, pinned memory included; raises psutil.NoSuchProcess."""
        if time.monotonic() >= self._due:
            self._children = self._children_bytes()
            self._due = time.monotonic() + CHILDREN_SECONDS
        return int(self._process.memory_info().rss) + self._children

    def _children_bytes(self) -> int:
        total = 0
        for child in self._process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                memory = child.memory_full_info()
                total += getattr(memory, "pss", memory.rss)  # only Linux has PSS
        return total


_tree = cache(ProcessTree)  # a forked process has its own


def process_bytes() -> int:
    """Memory of this process and its children (compile workers), in bytes."""
    return _tree(os.getpid()).num_bytes()


def peak_process_bytes() -> int:
    """The largest resident memory this process has had, in bytes, children not counted."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Not for Linux, where this is at least the peak of the parent process.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def host_limit_bytes() -> int:
    """The smallest of the machine's memory and the limits of its cgroups, in bytes.

    A virtual machine may get memory only as it is used, and show less than it will have:
    MEGATRAIN_HOST_MEMORY in the environment says how much that is (`503GiB`).

    Raises:
        InputError: MEGATRAIN_HOST_MEMORY is not a size.
    """
    if HOST_MEMORY in os.environ:
        try:
            return parse_bytes(os.environ[HOST_MEMORY])
        except ValueError as error:
            raise InputError(f"{HOST_MEMORY} in the environment is {error}") from error
    limits = [*cgroup_files("memory.max"), *cgroup_files("memory.limit_in_bytes", "memory")]
    total = int(psutil.virtual_memory().total)
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def host_available_bytes(limit_bytes: int | None = None) -> int:
    """Bytes that can still be allocated without swapping or being killed.

    Args:
        limit_bytes: a limit for this process and its children together; None: no limit.

    Raises:
        InputError: MEGATRAIN_HOST_MEMORY is not a size.
    """
    allowed = host_limit_bytes()
    allowed = (allowed if limit_bytes is None else min(allowed, limit_bytes)) - process_bytes()
    if HOST_MEMORY in os.environ:
        return max(0, allowed)
    return max(0, min(int(psutil.virtual_memory().available), allowed))
