"""The NVIDIA GPUs of this machine as the driver names them, and their published peaks."""

import json
import os
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU: product name, memory in bytes, driver version."""

    name: str
    memory_bytes: int
    driver: str


def find_gpu(device: str) -> Gpu | None:
    """The GPU that torch calls `device` (`cuda` or `cuda:N`); None without one or without NVML."""
    if not device.startswith("cuda"):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = _handle(pynvml, int(device.partition(":")[2] or 0))
        return Gpu(
            name=pynvml.nvmlDeviceGetName(handle),
            memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
            driver=pynvml.nvmlSystemGetDriverVersion(),
        )
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def bf16_peak_tflops(gpu_name: str) -> float | None:
    """Dense bf16 peak from `gpus.json` (each entry names its source); None when not listed."""
    if re.search(r"\b(Laptop|Max-Q)\b", gpu_name):  # same name, far lower clocks
        return None
    for name, peak in _peaks():
        if re.search(rf"\b{re.escape(name)}\b", gpu_name):
            return peak
    return None


@cache
def _peaks() -> list[tuple[str, float]]:
    table = json.loads(resources.files("megatrain.telemetry").joinpath("gpus.json").read_text())
    return [(entry["name"], float(entry["bf16_tflops"])) for entry in table["gpus"]]


def _handle(pynvml: Any, index: int) -> Any:
    """NVML counts all GPUs; torch counts those that CUDA_VISIBLE_DEVICES leaves."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = [item.strip() for item in visible.split(",") if item.strip()]
    if index >= len(chosen):
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    if chosen[index].isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(chosen[index]))
    return pynvml.nvmlDeviceGetHandleByUUID(chosen[index])
