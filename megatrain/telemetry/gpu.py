"""The NVIDIA GPUs of this machine, as the driver reports them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from megatrain.base.units import gib
from megatrain.telemetry.known_gpus import by_driver_name

T = TypeVar("T")


@dataclass(frozen=True)
class Gpu:
    """One GPU: product name, memory in bytes, driver version."""

    name: str
    memory_bytes: int
    driver: str


@dataclass(frozen=True)
class GpuState:
    """The state of a GPU at one moment; None where the driver does not report it.

    Attributes:
        pcie_generation: the current one; idle links show a lower one, so read it under load.
        other_processes: numbers and bytes of other processes that compute on it
            (none are seen from inside most containers).
        used_bytes: memory used by all processes and the driver.
    """

    name: str
    driver: str
    pcie_generation: int | None
    pcie_generation_most: int | None
    pcie_lanes: int | None
    pcie_lanes_most: int | None
    other_processes: tuple[tuple[int, int], ...]
    used_bytes: int | None


def find_gpu(device: str) -> Gpu | None:
    """The GPU that torch calls `device` (`cuda` or `cuda:N`); None without one or without NVML."""
    return _asked(
        device,
        lambda nvml, handle: Gpu(
            name=nvml.nvmlDeviceGetName(handle),
            memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
            driver=nvml.nvmlSystemGetDriverVersion(),
        ),
    )


def gpu_identity(device: str) -> tuple[str, str] | None:
    """The GPU's unique number and the driver's version; None without either."""
    return _asked(
        device,
        lambda nvml, handle: (nvml.nvmlDeviceGetUUID(handle), nvml.nvmlSystemGetDriverVersion()),
    )


def used_bytes(device: str) -> int | None:
    """Device memory that all processes take now, in bytes; None if it cannot be read."""
    return _asked(device, lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).used))


def gpu_state(device: str) -> GpuState | None:
    """The state of the GPU that torch calls `device`; None without one or without NVML."""
    with driver(device) as nvml_and_handle:
        if nvml_and_handle is None:
            return None
        nvml, handle = nvml_and_handle

        def ask(question: str) -> Any:
            try:
                return getattr(nvml, question)(handle)
            except (nvml.NVMLError, AttributeError):  # unknown to this GPU or this library
                return None

        memory = ask("nvmlDeviceGetMemoryInfo")
        processes = ask("nvmlDeviceGetComputeRunningProcesses") or ()
        return GpuState(
            name=str(ask("nvmlDeviceGetName")),
            driver=str(nvml.nvmlSystemGetDriverVersion()),
            pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            pcie_generation_most=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            pcie_lanes=ask("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_lanes_most=ask("nvmlDeviceGetMaxPcieLinkWidth"),
            other_processes=tuple(
                (p.pid, p.usedGpuMemory or 0) for p in processes if p.pid != os.getpid()
            ),
            used_bytes=None if memory is None else int(memory.used),
        )


def held_by_others(device: str) -> str:
    """` (other processes hold ...)`, for messages about memory; empty if none are seen."""
    state = gpu_state(device)
    if state is None or not state.other_processes:
        return ""
    held = sum(num_bytes for _, num_bytes in state.other_processes)
    pids = ", ".join(str(pid) for pid, _ in state.other_processes)
    return f" (other processes hold {gib(held)}: {pids})"


def _asked(device: str, question: Callable[[Any, Any], T]) -> T | None:
    """The answer of NVML about the GPU; None without a GPU or without an answer."""
    with driver(device) as nvml_and_handle:
        if nvml_and_handle is None:
            return None
        nvml, handle = nvml_and_handle
        try:
            return question(nvml, handle)
        except nvml.NVMLError:
            return None


@contextmanager
def driver(device: str) -> Iterator[tuple[Any, Any] | None]:
    """NVML and its handle of the GPU that torch calls `device`; None where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, or no driver
        yield None
        return
    try:
        handle = None
        with suppress(pynvml.NVMLError, ValueError):
            handle = _handle(pynvml, int(device.partition(":")[2] or 0))
        yield (pynvml, handle) if handle is not None and device.startswith("cuda") else None
    finally:
        pynvml.nvmlShutdown()


def bf16_peak_tflops(gpu_name: str) -> float | None:
    """Dense bf16 peak of a driver's product name; None when `gpus.json` does not list it."""
    known = by_driver_name(gpu_name)
    return None if known is None else known.bf16_tflops


def _handle(pynvml: Any, index: int) -> Any:
    """NVML's handle of torch's GPU: NVML also counts GPUs hidden by CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = [item.strip() for item in visible.split(",") if item.strip()]
    if index >= len(chosen):
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    if chosen[index].isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(chosen[index]))
    return pynvml.nvmlDeviceGetHandleByUUID(chosen[index])
