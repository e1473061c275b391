"""Host memory: what this process uses and what it is allowed."""

import resource
import sys
from pathlib import Path

import psutil

_CGROUP_FILES = (
    "/sys/fs/cgroup/memory.max",  # version 2
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",  # version 1
)


def process_bytes() -> int:
    """Resident memory of this process and its children (data workers), in bytes."""
    process = psutil.Process()
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return int(total)


def peak_process_bytes() -> int:
    """The largest resident memory this process has had, in bytes, children not counted."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def host_limit_bytes() -> int:
    """The smaller of the machine's memory and the cgroup's limit, in bytes."""
    limit = psutil.virtual_memory().total
    for name in _CGROUP_FILES:
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limit = min(limit, int(text))
    return int(limit)


def host_available_bytes() -> int:
    """What can still be allocated without swapping or being killed, in bytes."""
    allowed = host_limit_bytes() - process_bytes()
    return max(0, min(int(psutil.virtual_memory().available), allowed))
