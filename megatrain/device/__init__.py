"""Devices that compute, each with its streams, events and buffers (`base.py`)."""

import re

import torch

from megatrain.device.base import Buffer, Device, available_bytes, free_bytes
from megatrain.device.cpu import CpuDevice
from megatrain.device.mps import MpsDevice
from megatrain.device.recording import Recording
from megatrain.errors import InputError

IN_HOST_MEMORY = ("cpu", "mps")
"""torch's names of devices that compute in host memory, so `device_memory` cannot limit them."""


def find_device(name: str | None = None, local_rank: int | None = None) -> torch.device:
    """Return the device `cpu`, `cuda`, `cuda:N` or `mps`; None, `auto`: `cuda` if there is a GPU.

    `cuda` is a GPU of NVIDIA or AMD: torch's current one, or that with the number `local_rank` (a
    rank's number on this machine). `mps` is Apple's GPU.

    Raises InputError: there is no such device, or its GPU is missing.
    """
    gpus = torch.get_device_module("cuda")
    if name in (None, "auto"):
        name = "cuda" if gpus.is_available() else "cpu"
    if re.fullmatch(r"cpu(:0)?|mps|cuda(:\d+)?", str(name)) is None:
        raise InputError(f"no device {name!r}; write cpu, cuda, cuda:N or mps")
    parsed = torch.device(str(name))
    if parsed.type == "cpu":
        return parsed
    if parsed.type == "mps":
        usable = torch.backends.mps.is_available() and torch.__version__ >= "2.13"
        if not usable or local_rank is not None:
            raise InputError(
                "device mps needs an Apple GPU that torch sees, torch 2.13, and one process alone; "
                "take device cpu"
            )
        return parsed
    if not gpus.is_available():
        raise InputError(
            f"device {name!r} was asked for, but torch sees no GPU here; install a CUDA build of "
            "torch and check nvidia-smi, or take device cpu"
        )
    index = local_rank if parsed.index is None else parsed.index
    if index is None:
        index = gpus.current_device()
    if index >= gpus.device_count():
        raise InputError(
            f"device cuda:{index} was asked for, but torch sees {gpus.device_count()} GPUs here; "
            "start one rank for each (engine.devices, --nproc-per-node), or take another number"
        )
    return torch.device("cuda", index)


def open_device(name: str | None = None, local_rank: int | None = None) -> Device:
    """Open the device of `find_device` for work. Raises InputError: there is none."""
    device = find_device(name, local_rank)
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "mps":
        return MpsDevice()
    from megatrain.device import cuda

    return cuda.CudaDevice(device.index, shared=local_rank is not None)


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """A GPU's compute capability, (0, 0) for Apple's; None for other devices."""
    if device.type == "mps":
        return 0, 0
    gpus = torch.get_device_module("cuda")
    return gpus.get_device_capability(device) if device.type == "cuda" else None
