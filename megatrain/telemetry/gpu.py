"""The NVIDIA GPUs of this machine as the driver names them, and their published peaks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatrain.telemetry.known_gpus import by_driver_name


@dataclass(frozen=True)
class Gpu:
    """One GPU: product name, memory in bytes, driver version."""

    name: str
    memory_bytes: int
    driver: str


def find_gpu(device: str) -> Gpu | None:
    """The GPU that torch calls `device` (`cuda` or `cuda:N`); None without one or without NVML."""
    with driver(device) as asked:
        if asked is None:
            return None
        nvml, handle = asked
        try:
            return Gpu(
                name=nvml.nvmlDeviceGetName(handle),
                memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
                driver=nvml.nvmlSystemGetDriverVersion(),
            )
        except nvml.NVMLError:
            return None


def gpu_identity(device: str) -> tuple[str, str] | None:
    """The GPU's unique number and the driver's version; None without either."""
    with driver(device) as asked:
        if asked is None:
            return None
        nvml, handle = asked
        try:
            return nvml.nvmlDeviceGetUUID(handle), nvml.nvmlSystemGetDriverVersion()
        except nvml.NVMLError:
            return None


def used_bytes(device: str) -> int | None:
    """Device memory that all processes together take now; None where it cannot be asked."""
    with driver(device) as asked:
        if asked is None:
            return None
        nvml, handle = asked
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except nvml.NVMLError:
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
