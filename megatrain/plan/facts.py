"""What the system says about itself: limits, memory, disks, processors, the GPU's state."""

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from megatrain import kernels
from megatrain.autoplace.auto import can_compile
from megatrain.telemetry.cgroups import cgroup_files
from megatrain.telemetry.cores import usable_cores
from megatrain.telemetry.environment import cpu_name
from megatrain.telemetry.gpu_state import GpuState, gpu_state
from megatrain.telemetry.memory import host_available_bytes, host_limit_bytes

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Facts:
    """Plain values; None where the system does not tell.

    Attributes:
        quota_cores: processor time that the cgroup allows, in cores.
        allowed_bytes: of host memory, by cgroup and MEGATRAIN_HOST_MEMORY.
        memlock_bytes: that may be locked; None: no limit.
        huge_pages: `always`, `madvise` or `never`.
        allowed_nodes: NUMA nodes of the cores that this process may run on.
        kernels: which host kernels are in use, for people.
        torch_cuda: the CUDA version that torch was built with; None: a CPU build.
    """

    cpu: str
    cores: int
    quota_cores: float | None
    memory_bytes: int
    allowed_bytes: int
    free_bytes: int
    memlock_bytes: int | None
    huge_pages: str | None
    shm_free_bytes: int | None
    folder: str
    disk_free_bytes: int
    allowed_nodes: tuple[int, ...]
    kernels: str
    native_kernels: bool
    compiles: bool
    torch_cuda: str | None
    gpu: GpuState | None


def collect(device: str, folder: Path) -> Facts:
    """The facts about this machine and `folder`, where runs are written."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    place = existing(folder)
    return Facts(
        cpu=cpu_name(),
        cores=usable_cores(),
        quota_cores=_quota(),
        memory_bytes=psutil.virtual_memory().total,
        allowed_bytes=host_limit_bytes(),
        free_bytes=host_available_bytes(),
        memlock_bytes=None if locked == resource.RLIM_INFINITY else locked,
        huge_pages=_huge_pages(),
        shm_free_bytes=_free(Path("/dev/shm")),
        folder=str(place),
        disk_free_bytes=shutil.disk_usage(place).free,
        allowed_nodes=_allowed_nodes(),
        kernels=kernels.implementation,
        native_kernels=kernels.is_native,
        compiles=can_compile(),
        torch_cuda=torch.version.cuda,
        gpu=gpu_state(device),
    )


def existing(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists already."""
    path = folder.resolve()
    while not path.is_dir():
        path = path.parent
    return path


def _quota() -> float | None:
    """cgroup version 2: `max 100000`, or microseconds allowed in each period."""
    limits = [text.split() for text in cgroup_files("cpu.max")]
    cores = [int(two[0]) / int(two[1]) for two in limits if len(two) == 2 and two[0].isdigit()]
    return min(cores, default=None)


def _huge_pages() -> str | None:
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _allowed_nodes() -> tuple[int, ...]:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    nodes = []
    for path in sorted(_NODES.glob("node[0-9]*")):
        try:
            cores = parse_cores((path / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cores & allowed:
            nodes.append(int(path.name.removeprefix("node")))
    return tuple(nodes)


def parse_cores(text: str) -> set[int]:
    """Linux's core lists: `0-3,8,10-11`."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if part:
            cores |= set(range(int(first), int(last or first) + 1))
    return cores
