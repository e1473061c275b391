"""The NVIDIA GPUs of this machine as the driver names them, and their published peaks."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from megatrain.telemetry.known_gpus import by_driver_name

T = TypeVar("T")


@dataclass(frozen=True)
class Gpu:
    """One GPU: product name, memory in bytes, driver version."""

    name: str
    memory_bytes: int
    driver: str


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
    """Device memory that all processes together take now; None where it cannot be asked."""
    return _asked(device, lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).used))


def _asked(device: str, question: Callable[[Any, Any], T]) -> T | None:
    """What NVML answers of the GPU; None without one, or where the driver does not tell."""
    with driver(device) as found:
        if found is None:
            return None
        try:
            return question(*found)
        except found[0].NVMLError:
            return None


@contextmanager
def driver(device: str) -> Iterator[tuple[Any, Any] | None]:
    """NVML and its handle of the GPU that torch calls `device`; None where there is none."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        try:
            handle = _handle(pynvml, int(device.partition(":")[2] or 0))
        except (pynvml.NVMLError, ValueError):
            handle = None
        yield None if handle is None or not device.startswith("cuda") else (pynvml, handle)
    finally:
        pynvml.nvmlShutdown()


def bf16_peak_tflops(gpu_name: str) -> float | None:
    """Dense bf16 peak of a driver's product name; None when `gpus.json` does not list it."""
    known = by_driver_name(gpu_name)
    return None if known is None else known.bf16_tflops


def _handle(pynvml: Any, index: int) -> Any:
    """NVML counts all GPUs; torch counts those that CUDA_VISIBLE_DEVICES leaves."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = [item.strip() for item in visible.split(",") if item.strip()]
    if index >= len(chosen):
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    if chosen[index].isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(chosen[index]))
    return pynvml.nvmlDeviceGetHandleByUUID(chosen[index])
