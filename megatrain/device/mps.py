"""Apple's GPU by torch's mps, in the memory that it shares with the CPU. Untested on hardware.

Device streams are torch's one queue, in program order; host streams wait until the queue is empty.
A pinned host range is memory of torch's GPU with an alias for the CPU, so layers read it in place.
"""

from dataclasses import replace
from typing import Any

import torch

from megatrain.compat.torch import host_alias
from megatrain.device.base import HOST_STREAMS, Buffer, Buffers, Work
from megatrain.device.cpu import CpuDevice, allocating

_gpu: Any = torch.get_device_module("mps")


class MpsDevice(CpuDevice):
    """Runs work in program order, as the CPU does, on Apple's GPU."""

    kind = "mps"
    torch_device = torch.device("mps")
    can = replace(CpuDevice.can, compiles=False, slow_dtypes=(), generators=(torch_device,))

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}  # of the GPU, by the alias's address

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        with allocating(name, numel * dtype.itemsize, self._host_limit):
            return Buffer(name, torch.empty(numel, dtype=dtype, device=self.torch_device))

    def host(self, name: str, numel: int, dtype: torch.dtype, *, pinned: bool) -> Buffer:
        if not (pinned and numel):
            return super().host(name, numel, dtype, pinned=pinned)
        storage = self.empty(name, numel, dtype).data.untyped_storage()
        flat = host_alias(storage, dtype)
        self._storages[flat.data_ptr()] = storage
        return Buffer(name, flat.zero_())

    def in_place(self, buffer: Buffer) -> Buffer:
        flat = buffer.data
        storage = self._storages[flat.untyped_storage().data_ptr()]
        moved = torch.empty(0, dtype=flat.dtype, device=self.torch_device)
        return replace(buffer, data=moved.set_(storage, flat.storage_offset(), flat.shape, (1,)))

    def free(self, buffer: Buffer) -> None:
        self._storages.pop(buffer.data.data_ptr(), None)

    def run(
        self, stream: str, name: str, work: Work, reads: Buffers = (), writes: Buffers = ()
    ) -> Any:
        if stream in HOST_STREAMS:  # torch does not order the GPU's work with the CPU's alias
            _gpu.synchronize()
        return work()

    def mark(self, stream: str) -> float:
        _gpu.synchronize()
        return super().mark(stream)

    def synchronize(self, event: object | None, why: str) -> None:
        _gpu.synchronize()

    def seed(self, seed: int) -> None:
        _gpu.manual_seed(seed)

    def close(self) -> None:
        _gpu.synchronize()
        self._storages.clear()
