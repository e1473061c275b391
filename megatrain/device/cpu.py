"""The CPU as a device, which runs work in program order; and host memory for all devices."""

import sys
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from megatrain import kernels
from megatrain.base import huge_pages
from megatrain.base.units import size
from megatrain.device.base import Abilities, Buffer, Buffers, Device, Work
from megatrain.device.disk import move
from megatrain.errors import DoesNotFit, InputError, explained
from megatrain.telemetry.host import host_available_bytes, usable_cores

# On CPUs with no more than AVX2 torch computes bf16 in plain loops.
_IS_SLOW = torch.backends.cpu.get_cpu_capability() in ("NO AVX", "AVX2")
_SLOW = (torch.bfloat16,) if _IS_SLOW else ()

_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux 4.14, for which Python has no name


def allocating(name: str, num_bytes: int, limit_bytes: int | None) -> AbstractContextManager[None]:
    """A context for an allocation of host memory. Raises DoesNotFit: too little is free."""
    free_bytes = host_available_bytes(limit_bytes)
    remedy = "close other programs or train a smaller model"
    if limit_bytes is not None:
        remedy = f"raise host_memory ({size(limit_bytes)}), {remedy}"
    problem = f"no host memory for {name}: {size(num_bytes)} wanted"
    if num_bytes > free_bytes:  # Linux would give the mapping and kill the process that fills it
        raise DoesNotFit(f"{problem}, {size(free_bytes)} free; {remedy}")
    return explained(problem, remedy, of=(OSError, RuntimeError), into=DoesNotFit)


def host_range(name: str, numel: int, dtype: torch.dtype, limit_bytes: int | None = None) -> Tensor:
    """Allocate `numel` zeros of `dtype` as a mapping of their own, with every page present.

    Args: `limit_bytes`: the most that the process may take in all; None: the machine's limit.

    Raises DoesNotFit: too little memory is free, or the system refuses it.
    """
    num_bytes = max(numel, 1) * dtype.itemsize
    with allocating(name, num_bytes, limit_bytes):
        mapping = huge_pages.mapping(num_bytes)
    # A forked child would copy pinned pages; with this advice the child sees zeros. (With no pages
    # here, the child's own memory could get this address, and be freed when it drops the tensor.)
    if sys.platform == "linux":
        mapping.madvise(_WIPE_ON_FORK)
    flat = torch.frombuffer(mapping, dtype=torch.uint8)
    kernels.first_touch(flat, threads=usable_cores())
    return flat.view(dtype)[:numel]


class CpuDevice(Device):
    """Runs each piece of work at once, in the order in which it is put on any stream."""

    kind = "cpu"
    torch_device = torch.device("cpu")
    can = Abilities(shares_host_memory=True, reads_in_place=True, slow_dtypes=_SLOW)
    _host_limit: int | None = None

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        return Buffer(name, torch.empty(numel, dtype=dtype))

    def host(self, name: str, numel: int, dtype: torch.dtype, *, pinned: bool) -> Buffer:
        return Buffer(name, host_range(name, numel, dtype, self._host_limit))

    def run(
        self, stream: str, name: str, work: Work, reads: Buffers = (), writes: Buffers = ()
    ) -> Any:
        return work()

    def copy(self, stream: str, to: Buffer, source: Buffer, numel: int | None = None) -> None:
        move(to, source, numel)

    def fetch(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source)

    def record(self, stream: str) -> object:
        return True  # every event has passed when it is recorded

    def mark(self, stream: str) -> float:
        return time.perf_counter()

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # not those of GPUs, as torch.manual_seed does

    def limit(self, device_bytes: int | None, host_bytes: int | None) -> None:
        if device_bytes is not None:
            raise InputError(
                f"device_memory limits a GPU's own memory, but the device is {self.kind}; set "
                "host_memory"
            )
        self._host_limit = host_bytes
