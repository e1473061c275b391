"""This host: its processor, and the cores and memory that a process may use and does use."""

import os
import platform
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from megatrain.base.units import parse_bytes
from megatrain.errors import explained
from megatrain.telemetry.gpu import find_gpu

HOST_MEMORY = "MEGATRAIN_HOST_MEMORY"
CHILDREN_SECONDS = 1.0  # between two scans of a process's children, each of which takes 4 ms
_SPARE_CORES = 2  # for the thread that launches work, and for the data loader
_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cpu_name() -> str:
    """The system's name of the processor."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def usable_cores() -> int:
    """The number of logical cores on which this process may run, by its affinity (`taskset`)."""
    if hasattr(os, "sched_getaffinity"):  # not on a Mac
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def update_threads() -> int:
    """The number of the optimizer's host threads, if the placement does not set it."""
    return max(1, usable_cores() - _SPARE_CORES)


def cgroup_files(name: str, controller: str = "") -> Iterator[str]:
    """The contents of the files `name` (`memory.max`) in the process's cgroup and its parents.

    A batch job or a service is in a nested cgroup. Version 1 has a folder for each `controller`.
    """
    folders, lines = [_CGROUPS / controller], []
    with suppress(OSError):  # no Linux
        lines = _OWN_CGROUP.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        parts = PurePosixPath(path).parts[1:]
        if controller in controllers.split(",") and ".." not in parts:
            folders += (folders[0].joinpath(*parts[:n]) for n in range(1, len(parts) + 1))
    for folder in folders:
        with suppress(OSError):
            yield (folder / name).read_text().strip()


class ProcessTree:
    """The memory of a process and its children. Pages that children share count in part (PSS):

    16 compile workers of torch, forked and idle, had 3.5 GiB resident and a PSS of 0.25 GiB.
    """

    def __init__(self, process: int) -> None:
        """Raises psutil.NoSuchProcess."""
        self._process = psutil.Process(process)
        self._children_bytes, self._due = 0, 0.0

    def num_bytes(self) -> int:
        """Resident memory now, pinned memory included; raises psutil.NoSuchProcess."""
        if time.monotonic() >= self._due:
            self._children_bytes = 0
            for child in self._process.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    memory = child.memory_full_info()
                    self._children_bytes += getattr(memory, "pss", memory.rss)  # PSS: only Linux
            self._due = time.monotonic() + CHILDREN_SECONDS
        return int(self._process.memory_info().rss) + self._children_bytes


_tree = cache(ProcessTree)  # by process id, as a fork has a tree of its own


def process_bytes() -> int:
    """Memory of this process and its children (compile workers), in bytes."""
    return _tree(os.getpid()).num_bytes()


def host_limit_bytes() -> int:
    """The smallest of the machine's memory and the limits of its cgroups, in bytes.

    A virtual machine may report less memory than it will get: MEGATRAIN_HOST_MEMORY in the
    environment then has the size (`503GiB`). Raises InputError: that is no size.
    """
    if HOST_MEMORY in os.environ:
        with explained(f"{HOST_MEMORY} in the environment", of=ValueError):
            return parse_bytes(os.environ[HOST_MEMORY])
    limits = [*cgroup_files("memory.max"), *cgroup_files("memory.limit_in_bytes", "memory")]
    total = int(psutil.virtual_memory().total)
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def host_available_bytes(limit_bytes: int | None = None) -> int:
    """Bytes that can still be allocated without swapping or being killed.

    Args: `limit_bytes`: a limit for this process and its children together; None: no limit.
    """
    limit = host_limit_bytes()
    allowed = (limit if limit_bytes is None else min(limit, limit_bytes)) - process_bytes()
    if HOST_MEMORY not in os.environ:
        allowed = min(int(psutil.virtual_memory().available), allowed)
    return max(0, allowed)


_PACKAGES = ("megatrain", "torch", "transformers", "datasets", "tokenizers", "safetensors", "numpy")


def environment(device: str) -> dict[str, Any]:
    """Versions, machine and GPU as plain JSON values, without names of users, hosts or files."""
    gpu = find_gpu(device)
    return {
        "python": platform.python_version(),
        "commit": commit(),
        "packages": package_versions(_PACKAGES),
        "system": platform.system(),
        "kernel": platform.release(),
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "usable_cores": usable_cores(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "host_limit_bytes": host_limit_bytes(),
        "device": device,
        "gpu": gpu and {name: vars(gpu)[name] for name in ("name", "memory_bytes", "driver")},
    }


def package_versions(names: Sequence[str]) -> dict[str, str | None]:
    """The versions of these packages; None: the package is not installed."""
    versions = dict[str, str | None].fromkeys(names)
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def commit() -> str | None:
    """MEGATRAIN_COMMIT of the environment, or the commit of the checkout; None: unknown."""
    if "MEGATRAIN_COMMIT" in os.environ:
        return os.environ["MEGATRAIN_COMMIT"]
    package_file = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package_file.parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        # An installed package may be in a checkout of another project.
        git("ls-files", "--error-unmatch", package_file.name)
        return git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None
