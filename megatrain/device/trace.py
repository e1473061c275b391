"""A device that computes nothing."""

from typing import Any

import torch

from megatrain.device import base
from megatrain.device.base import Buffer, Device

CALLER = "caller"  # the thread that puts work on streams is a stream, too


class MetaDevice(Device):
    """Computes nothing: its buffers have no memory, and its streams no order."""

    kind, can = "trace", base.Abilities()
    torch_device = torch.device("meta")

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        return Buffer(name, torch.empty(numel, dtype=dtype, device="meta"))

    def host(self, name: str, numel: int, dtype: torch.dtype, *, pinned: bool) -> Buffer:
        return Buffer(name, torch.empty(numel, dtype=dtype, device="meta"))

    def synchronize(self, event: Any, why: str) -> None:
        self.wait(CALLER, event, why)

    def read(self, buffer: Buffer) -> list[float]:
        self.run(CALLER, f"read {buffer.name}", lambda: None, [buffer])
        return [0.0] * buffer.data.numel()
