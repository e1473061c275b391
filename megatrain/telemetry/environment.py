"""The machine and the versions of a run, saved with its results so that they can be repeated."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from megatrain.telemetry.gpu import find_gpu
from megatrain.telemetry.host import cpu_name, host_limit_bytes, usable_cores

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

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        # An installed package may lie in a checkout of something else.
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
