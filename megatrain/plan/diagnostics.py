"""What is wrong or slow on a machine, and what to do about it. Facts in, sentences out."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megatrain.base.units import GIB, gib
from megatrain.plan.facts import Facts
from megatrain.telemetry.gpu_state import GpuState
from megatrain.telemetry.known_gpus import pcie_gbps

# Below, updates are bound by the cores rather than by the memory that they share.
_FEW_CORES = 8
_LITTLE_DISK_BYTES = 100 * GIB
# The data loader's workers hand on rows through it.
_LITTLE_SHM_BYTES = 64 << 20
_LOW_POWER = 0.95  # of the default limit
_SLOW_BUS = 0.7  # of what the link carries on paper; 0.87 is usual

Rates = Mapping[str, float | None]


@dataclass(frozen=True)
class Diagnostic:
    """One thing to know: `wrong` costs speed or stops a run, a mere note does not."""

    wrong: bool
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def findings(facts: Facts, rates: Rates, *, pinning: bool | None) -> list[Diagnostic]:
    """Everything found, what is wrong first.

    Args:
        rates: measurements by name (plan/doctor.py); None or missing: not measured.
        pinning: whether host memory could be pinned; None: not tried.
    """
    found: list[Diagnostic] = []
    for look in _HOST_LOOKS:
        found += look(facts)
    if facts.gpu is not None:
        for gpu_look in _GPU_LOOKS:
            found += gpu_look(facts, facts.gpu)
        found += _bus(facts.gpu, rates)
    found += _pinning(facts, rates, pinning)
    return sorted(found, key=lambda finding: not finding.wrong)


def _cores(facts: Facts) -> Iterator[Diagnostic]:
    quota = facts.quota_cores
    if quota is not None and quota < facts.cores:
        yield Diagnostic(
            True,
            f"the cgroup allows {quota:.3g} cores' time, and {facts.cores} cores are visible",
            "raise the container's CPU limit (docker run --cpus)",
        )
    cores = facts.cores if quota is None else min(facts.cores, quota)
    if cores < _FEW_CORES:
        yield Diagnostic(
            True,
            f"{cores:.3g} cores for the optimizer's update",
            "allow this process more cores (taskset, the container's cpuset), or take more tokens "
            "a step, behind which updates hide",
        )


def _host_memory(facts: Facts) -> Iterator[Diagnostic]:
    if facts.allowed_bytes < 0.95 * facts.memory_bytes:
        yield Diagnostic(
            True,
            f"this process may use {gib(facts.allowed_bytes)} of the machine's "
            f"{gib(facts.memory_bytes)} of memory",
            "raise the container's memory limit (docker run --memory)",
        )
    if facts.free_bytes < 0.8 * facts.allowed_bytes:
        yield Diagnostic(
            False,
            f"{gib(facts.allowed_bytes - facts.free_bytes)} of host memory are in use",
            "close other programs before a large run",
        )


def _huge_pages(facts: Facts) -> Iterator[Diagnostic]:
    if facts.huge_pages == "never":
        yield Diagnostic(
            True,
            "transparent huge pages are off, so that pinning and updates take longer",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _kernels(facts: Facts) -> Iterator[Diagnostic]:
    if not facts.native_kernels:
        yield Diagnostic(
            True,
            f"host kernels: {facts.kernels}; the update is several times slower",
            "install a C++ compiler and CMake, then pip install megatrain again (make native in a "
            "checkout)",
        )


def _disk(facts: Facts) -> Iterator[Diagnostic]:
    if facts.disk_free_bytes < _LITTLE_DISK_BYTES:
        yield Diagnostic(
            True,
            f"{gib(facts.disk_free_bytes)} are free in {facts.folder}",
            "a checkpoint takes 12 bytes a parameter (84 GiB for 7.6 billion): put output.folder "
            "on a larger disk",
        )


def _shared_memory(facts: Facts) -> Iterator[Diagnostic]:
    if facts.shm_free_bytes is not None and facts.shm_free_bytes < _LITTLE_SHM_BYTES:
        yield Diagnostic(
            True,
            f"/dev/shm has {facts.shm_free_bytes >> 20} MiB free, too little for data workers",
            "docker run --shm-size=1g",
        )


def _no_gpu(facts: Facts) -> Iterator[Diagnostic]:
    if facts.gpu is None and facts.torch_cuda is None:
        remedy = "where there is a GPU, install a CUDA build of torch; else plan for one by --gpu"
        yield Diagnostic(False, "torch is a build without CUDA", remedy)
    elif facts.gpu is None:
        yield Diagnostic(
            False, "the driver shows no GPU", "check nvidia-smi, and the container's --gpus"
        )


def _compiler(facts: Facts, gpu: GpuState) -> Iterator[Diagnostic]:
    if not facts.compiles:
        yield Diagnostic(
            True,
            "no Triton or no C compiler, so layers stay eager and no tile rests on the GPU",
            "install gcc and triton",
        )


def _numa(facts: Facts, gpu: GpuState) -> Iterator[Diagnostic]:
    if gpu.numa_node is not None and facts.allowed_nodes and gpu.numa_node not in (
        facts.allowed_nodes
    ):  # fmt: skip
        node = gpu.numa_node
        yield Diagnostic(
            True,
            f"the GPU is at NUMA node {node} and this process may only run on "
            f"{', '.join(map(str, facts.allowed_nodes))}",
            f"numactl --cpunodebind={node} --membind={node} megatrain ...",
        )


def _link(facts: Facts, gpu: GpuState) -> Iterator[Diagnostic]:
    for now, most, name in (
        (gpu.pcie_generation, gpu.pcie_generation_most, "generation"),
        (gpu.pcie_lanes, gpu.pcie_lanes_most, "lanes"),
    ):
        if now and most and now < most:
            yield Diagnostic(
                True,
                f"under load the PCIe link has {name} {now} of {most}",
                "seat the card in a slot wired for it, look for a riser cable, and at the "
                "firmware's link settings",
            )


def _power(facts: Facts, gpu: GpuState) -> Iterator[Diagnostic]:
    limit, default = gpu.power_limit_watts, gpu.power_default_watts
    if limit and default and limit < _LOW_POWER * default:
        yield Diagnostic(
            True,
            f"the GPU's power limit is {limit:.0f} W, its default {default:.0f} W",
            f"sudo nvidia-smi --power-limit={default:.0f}",
        )
    for reason in gpu.slowed_by:
        remedy = "sudo nvidia-smi --reset-applications-clocks" if "application" in reason else (
            "look at cooling and power supply (nvidia-smi -q -d PERFORMANCE)"
        )  # fmt: skip
        yield Diagnostic(True, f"the GPU's clocks are lowered: {reason}", remedy)


def _others(facts: Facts, gpu: GpuState) -> Iterator[Diagnostic]:
    if gpu.other_processes:
        pids = ", ".join(str(pid) for pid, _ in gpu.other_processes)
        held = sum(num_bytes for _, num_bytes in gpu.other_processes)
        yield Diagnostic(
            True,
            f"other processes ({pids}) hold {gib(held)} of the GPU's memory",
            "end them, or choose another GPU (CUDA_VISIBLE_DEVICES)",
        )


def _driver(facts: Facts, gpu: GpuState) -> Iterator[Diagnostic]:
    if facts.torch_cuda is None or gpu.cuda_version is None:
        return
    major, minor = (int(part) for part in facts.torch_cuda.split(".")[:2])
    if gpu.cuda_version // 1000 < major:
        yield Diagnostic(
            True,
            f"driver {gpu.driver} runs CUDA {gpu.cuda_version // 1000}, and torch was built with "
            f"{major}.{minor}",
            "update the driver, or install a torch built for the older CUDA",
        )


def _bus(gpu: GpuState, rates: Rates) -> Iterator[Diagnostic]:
    reached = rates.get("to_device_pinned_gbps")
    generation, lanes = gpu.pcie_generation, gpu.pcie_lanes
    if reached and generation and lanes and reached < _SLOW_BUS * pcie_gbps(generation, lanes):
        yield Diagnostic(
            True,
            f"copies to the GPU reach {reached:.1f} GB/s of {pcie_gbps(generation, lanes):.0f} on "
            f"its PCIe {generation} x{lanes} link",
            "look for other traffic on the link, a switch that several GPUs share, or IOMMU "
            "settings of a virtual machine",
        )


def _pinning(facts: Facts, rates: Rates, pinning: bool | None) -> Iterator[Diagnostic]:
    pinned, pageable = rates.get("to_device_pinned_gbps"), rates.get("to_device_pageable_gbps")
    factor = f" ({pinned / pageable:.1f} times)" if pinned and pageable else ""
    remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1; LimitMEMLOCK in systemd)"
    if pinning is False:
        yield Diagnostic(
            True, "host memory cannot be pinned: copies are several times slower", remedy
        )
    elif facts.memlock_bytes is not None and facts.memlock_bytes < facts.allowed_bytes:
        yield Diagnostic(
            False,
            f"the locked-memory limit is {facts.memlock_bytes >> 10} KiB; where the driver keeps "
            f"to it, host memory stays unpinned and copies slower{factor}",
            remedy,
        )


_HOST_LOOKS: tuple[Callable[[Facts], Iterator[Diagnostic]], ...] = (
    _cores, _host_memory, _huge_pages, _kernels, _disk, _shared_memory, _no_gpu,
)  # fmt: skip
_GPU_LOOKS: tuple[Callable[[Facts, GpuState], Iterator[Diagnostic]], ...] = (
    _compiler, _numa, _link, _power, _others, _driver,
)  # fmt: skip
