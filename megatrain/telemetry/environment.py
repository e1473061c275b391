"""The machine and the versions of a run, saved with its results so that they can be repeated."""

import os
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from megatrain.telemetry.cores import usable_cores
from megatrain.telemetry.gpu import find_gpu
from megatrain.telemetry.memory import host_limit_bytes

_PACKAGES = ("megatrain", "torch", "transformers", "datasets", "tokenizers", "safetensors", "numpy")


def environment(device: str) -> dict[str, Any]:
    """Versions, machine and GPU, as plain JSON values; holds no user, host or file names."""
    gpu = find_gpu(device)
    return {
        "python": platform.python_version(),
        "commit": commit(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "system": platform.system(),
        "kernel": platform.release(),
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "usable_cores": usable_cores(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "host_limit_bytes": host_limit_bytes(),
        "device": device,
        "gpu": None if gpu is None else vars(gpu),
    }


def commit() -> str | None:
    """The commit of the checkout with this file; without a checkout, MEGATRAIN_COMMIT."""
    if "MEGATRAIN_COMMIT" in os.environ:
        return os.environ["MEGATRAIN_COMMIT"]
    here = Path(__file__)
    try:
        # An installed package may lie in a checkout of something else.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The system's name of the processor."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
