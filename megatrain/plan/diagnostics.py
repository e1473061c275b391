"""The machine's limits and state, as the system reports them, and their faults."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from megatrain import kernels
from megatrain.autoplace.auto import can_compile
from megatrain.base.units import GIB, gib
from megatrain.telemetry.gpu import GpuState, gpu_state, pcie_gbps
from megatrain.telemetry.host import (
    cgroup_files,
    cpu_name,
    host_available_bytes,
    host_limit_bytes,
    usable_cores,
)

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# With fewer cores, updates are bound by the cores rather than by their shared memory.
_FEW_CORES = 8
_LITTLE_DISK_BYTES = 100 * GIB
_SLOW_BUS = 0.7  # share of the link's nominal rate; 0.87 is usual


@dataclass(frozen=True)
class Facts:
    """Facts about a machine; None where the system does not report one.

    Attributes:
        quota_cores: processor time that the cgroup allows, in cores.
        allowed_bytes: host memory allowed by cgroup and MEGATRAIN_HOST_MEMORY.
        huge_pages: `always`, `madvise` or `never`.
        kernels: a description of the host kernels in use.
        torch_cuda: the CUDA version that torch was built with; None: a CPU build.
    """

    cpu: str
    cores: int
    quota_cores: float | None
    memory_bytes: int
    allowed_bytes: int
    free_bytes: int
    huge_pages: str | None
    folder: str
    disk_free_bytes: int
    kernels: str
    native_kernels: bool
    compiles: bool
    torch_cuda: str | None
    gpu: GpuState | None


def collect(device: str, folder: Path) -> Facts:
    """The facts about this machine and `folder`, where runs are written, or its existing parent."""
    huge_pages = ""
    with suppress(OSError):  # no Linux
        huge_pages = _HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    place = folder.resolve()
    while not place.is_dir():
        place = place.parent
    return Facts(
        cpu=cpu_name(),
        cores=usable_cores(),
        quota_cores=_quota(),
        memory_bytes=psutil.virtual_memory().total,
        allowed_bytes=host_limit_bytes(),
        free_bytes=host_available_bytes(),
        huge_pages=huge_pages or None,
        folder=str(place),
        disk_free_bytes=shutil.disk_usage(place).free,
        kernels=kernels.implementation,
        native_kernels=kernels.is_native,
        compiles=can_compile(),
        torch_cuda=torch.version.cuda,
        gpu=gpu_state(device),
    )


def _quota() -> float | None:
    """Cores that a cgroup (version 2) allows, from `max 100000` or microseconds per period."""
    limits = [text.split() for text in cgroup_files("cpu.max")]
    cores = [int(two[0]) / int(two[1]) for two in limits if len(two) == 2 and two[0].isdigit()]
    return min(cores, default=None)


@dataclass(frozen=True)
class Diagnostic:
    """A finding: one that is `wrong` costs speed or stops a run, another is only a note."""

    wrong: bool
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def findings(facts: Facts, rates: Mapping[str, float | None]) -> list[Diagnostic]:
    """All findings about a machine, faults first.

    Args:
        rates: measurements by name (plan/rates.py); None or missing: not measured.
    """
    wrong = [*_of_host(facts), *(() if facts.gpu is None else _of_gpu(facts, facts.gpu, rates))]
    diagnostics = [Diagnostic(True, what, remedy) for what, remedy in wrong]
    if facts.gpu is None:
        remedy = "where there is one, install a CUDA build of torch, and check nvidia-smi and the "
        remedy += "container's --gpus; else plan for one by --gpu"
        cpu_build = "torch is a build without CUDA" if facts.torch_cuda is None else None
        diagnostics.append(Diagnostic(False, cpu_build or "the driver shows no GPU", remedy))
    return diagnostics


def _of_host(facts: Facts) -> Iterator[tuple[str, str]]:
    cores = min(facts.cores, facts.quota_cores or facts.cores)
    if cores < _FEW_CORES or cores < facts.cores:
        yield (
            f"{cores:.3g} cores' time for the optimizer's update, {facts.cores} cores are visible",
            "allow this process more cores (taskset, docker run --cpus), or take more tokens a "
            "step, behind which updates hide",
        )
    if facts.allowed_bytes < 0.95 * facts.memory_bytes:
        yield (
            f"this process may use {gib(facts.allowed_bytes)} of the machine's "
            f"{gib(facts.memory_bytes)} of memory",
            "raise the container's memory limit (docker run --memory)",
        )
    if facts.huge_pages == "never":
        yield (
            "transparent huge pages are off, so that pinning and updates take longer",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if not facts.native_kernels:
        yield (
            f"host kernels: {facts.kernels}; the update is several times slower",
            "install a C++ compiler and CMake, then pip install megatrain again (make native in a "
            "checkout)",
        )
    if facts.disk_free_bytes < _LITTLE_DISK_BYTES:
        yield (
            f"{gib(facts.disk_free_bytes)} are free in {facts.folder}",
            "a checkpoint takes 12 bytes a parameter (84 GiB for 7.6 billion): put output.folder "
            "on a larger disk",
        )


def _of_gpu(
    facts: Facts, gpu: GpuState, rates: Mapping[str, float | None]
) -> Iterator[tuple[str, str]]:
    if not facts.compiles:
        yield (
            "no Triton or no C compiler, so layers stay eager and no tile rests on the GPU",
            "install gcc and triton",
        )
    yield from _of_bus(gpu, rates)
    if gpu.other_processes:
        pids = ", ".join(str(pid) for pid, _ in gpu.other_processes)
        held = sum(num_bytes for _, num_bytes in gpu.other_processes)
        yield (
            f"other processes ({pids}) hold {gib(held)} of the GPU's memory",
            "end them, or choose another GPU (CUDA_VISIBLE_DEVICES)",
        )


def _of_bus(gpu: GpuState, rates: Mapping[str, float | None]) -> Iterator[tuple[str, str]]:
    if rates.get("to_device_pageable_gbps"):
        yield (
            "host memory cannot be pinned: copies are several times slower",
            "ulimit -l unlimited (docker run --ulimit memlock=-1; LimitMEMLOCK in systemd)",
        )
    generation, lanes = gpu.pcie_generation, gpu.pcie_lanes
    reached = rates.get("to_device_pinned_gbps")
    for now, most, name in (
        (generation, gpu.pcie_generation_most, "generation"),
        (lanes, gpu.pcie_lanes_most, "lanes"),
    ):
        if now and most and now < most:
            yield (
                f"under load the PCIe link has {name} {now} of {most}",
                "seat the card in a slot wired for it, look for a riser cable, and at the "
                "firmware's link settings",
            )
    if reached and generation and lanes and reached < _SLOW_BUS * pcie_gbps(generation, lanes):
        yield (
            f"copies to the GPU reach {reached:.1f} GB/s of {pcie_gbps(generation, lanes):.0f} on "
            f"its PCIe {generation} x{lanes} link",
            "look for other traffic on the link, a switch that several GPUs share, or IOMMU "
            "settings of a virtual machine",
        )
