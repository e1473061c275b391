"""What a run ran on: written beside its results, so that they can be repeated."""

import os
import platform
import sys
from importlib import metadata
from typing import Any

import psutil

from megatrain.telemetry.gpu import find_gpu
from megatrain.telemetry.memory import host_limit_bytes

_PACKAGES = ("megatrain", "torch", "transformers", "datasets", "tokenizers", "safetensors", "numpy")


def environment(device: str) -> dict[str, Any]:
    """Versions, machine and GPU, as plain JSON values; holds no user, host or file names."""
    gpu = find_gpu(device)
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "system": platform.system(),
        "kernel": platform.release(),
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "usable_cores": usable_cores(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "host_limit_bytes": host_limit_bytes(),
        "device": device,
        "gpu": None if gpu is None else vars(gpu),
    }


def usable_cores() -> int:
    """Logical cores this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        return platform.processor()
    return platform.processor()
