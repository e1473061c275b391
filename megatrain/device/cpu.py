"""The CPU as a device: real numbers, in program order."""

import time
from typing import Any

import torch
from torch import Tensor

from megatrain.device.base import Buffer, Buffers, Device, Work
from megatrain.device.disk import move
from megatrain.device.host_mappings import host_range
from megatrain.errors import InputError


class _Passed:
    """Every event of this device has passed when it is recorded."""


class CpuDevice(Device):
    """Runs each piece of work at once, in the order in which it is put on any stream."""

    kind = "cpu"
    torch_device = torch.device("cpu")
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

    def record(self, stream: str) -> _Passed:
        return _Passed()

    def mark(self, stream: str) -> float:
        return time.perf_counter()

    def wait(self, stream: str, event: object | None, why: str) -> None:
        return None

    def synchronize(self, event: object | None, why: str) -> None:
        return None

    def read(self, buffer: Buffer) -> list[float]:
        return buffer.data.tolist()

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # not those of GPUs, as torch.manual_seed does

    def limit(self, device_bytes: int | None, host_bytes: int | None) -> None:
        if device_bytes is not None:
            raise InputError("device_memory limits a GPU, but the device is cpu; set host_memory")
        self._host_limit = host_bytes
