"""How a GPU is doing, as its driver tells: link, power, what slows it, who else is on it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.base.units import gib
from megatrain.telemetry.gpu import driver

# nvmlClocksEventReasons (nvml.h); those of an idle GPU and of settings that cost nothing left out.
_SLOWED_BY = {
    0x02: "clocks set by an application",
    0x08: "the hardware slows down (power or temperature)",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake (hardware)",
}


@dataclass(frozen=True)
class GpuState:
    """One moment of a GPU; None where the driver does not tell.

    Attributes:
        pcie_generation: now; idle links rest at a lower one, so it is read under load.
        slowed_by: reasons for low clocks that somebody can change.
        other_processes: process numbers and bytes of those that compute on it besides this one
            (none are seen from inside most containers).
        used_bytes: by everybody, the driver's own included.
        cuda_version: the newest that the driver can run, 13000 for 13.0.
        numa_node: of the host memory that it is nearest to.
    """

    name: str
    driver: str
    cuda_version: int | None
    pcie_generation: int | None
    pcie_generation_most: int | None
    pcie_lanes: int | None
    pcie_lanes_most: int | None
    power_limit_watts: float | None
    power_default_watts: float | None
    slowed_by: tuple[str, ...]
    other_processes: tuple[tuple[int, int], ...]
    used_bytes: int | None
    numa_node: int | None


def gpu_state(device: str) -> GpuState | None:
    """The state of the GPU that torch calls `device`; None without one or without NVML."""
    with driver(device) as asked:
        if asked is None:
            return None
        nvml, handle = asked

        def ask(question: str, *more: Any) -> Any:
            return _answer(nvml, lambda: getattr(nvml, question)(handle, *more))

        memory = ask("nvmlDeviceGetMemoryInfo")
        pci = ask("nvmlDeviceGetPciInfo")
        return GpuState(
            name=str(ask("nvmlDeviceGetName")),
            driver=str(_answer(nvml, lambda: nvml.nvmlSystemGetDriverVersion())),
            cuda_version=_answer(nvml, lambda: nvml.nvmlSystemGetCudaDriverVersion_v2()),
            pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            pcie_generation_most=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            pcie_lanes=ask("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_lanes_most=ask("nvmlDeviceGetMaxPcieLinkWidth"),
            power_limit_watts=_thousandth(ask("nvmlDeviceGetEnforcedPowerLimit")),
            power_default_watts=_thousandth(ask("nvmlDeviceGetPowerManagementDefaultLimit")),
            slowed_by=slowed_by(ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0),
            other_processes=_others(ask("nvmlDeviceGetComputeRunningProcesses") or ()),
            used_bytes=None if memory is None else int(memory.used),
            numa_node=None if pci is None else numa_node(pci.busId),
        )


def held_by_others(device: str) -> str:
    """` (other processes hold ...)`, for messages about memory; nothing where none are seen."""
    state = gpu_state(device)
    if state is None or not state.other_processes:
        return ""
    held = sum(num_bytes for _, num_bytes in state.other_processes)
    pids = ", ".join(str(pid) for pid, _ in state.other_processes)
    return f" (other processes hold {gib(held)}: {pids})"


def slowed_by(reasons: int) -> tuple[str, ...]:
    """The names of NVML's clock event reasons that lower the clocks without need."""
    return tuple(name for bit, name in _SLOWED_BY.items() if reasons & bit)


def numa_node(bus_id: str | bytes) -> int | None:
    """The NUMA node of a PCI device such as `00000000:18:00.0`; None where there is one only."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.lower().partition(":")
    path = Path("/sys/bus/pci/devices") / f"{domain[-4:]}:{rest}" / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _answer(nvml: Any, question: Callable[[], Any]) -> Any:
    try:
        return question()
    except (nvml.NVMLError, AttributeError):  # not on this GPU, or not in this driver's library
        return None


def _thousandth(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _others(processes: Any) -> tuple[tuple[int, int], ...]:
    return tuple((p.pid, p.usedGpuMemory or 0) for p in processes if p.pid != os.getpid())
