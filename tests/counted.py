"""The CPU as a device whose memory is counted, and may be limited."""

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from megatrain.compat.torch import TorchDispatchMode, memory_of
from megatrain.device import Buffer, CpuDevice
from megatrain.device.base import COMPUTE


class CountedDevice(CpuDevice):
    """Counts what is alive of that which `empty` has given and work on COMPUTE has made.

    Attributes:
        most_bytes: of the device; beyond, it has no memory. None: any number.
        peak_bytes: of the device, so far.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self.most_bytes, self.peak_bytes, self._live = most_bytes, 0, 0
        self._known: set[int] = set()

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        buffer = super().empty(name, numel, dtype)
        self.count(buffer.data)
        return buffer

    def host(self, *arguments: Any, **settings: Any) -> Buffer:
        buffer = super().host(*arguments, **settings)
        self._known.add(memory_of(buffer.data))  # none of the device's, whatever looks at it
        return buffer

    def run(self, stream: str, *arguments: Any, **settings: Any) -> Any:
        if stream != COMPUTE:
            return super().run(stream, *arguments, **settings)
        with Watch(self):
            return super().run(stream, *arguments, **settings)

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's memory as long as it lives. Raises torch.OutOfMemoryError."""
        storage, key = tensor.untyped_storage(), memory_of(tensor)
        if key in self._known:
            return
        self._known.add(key)
        self._live += storage.nbytes()
        finalize(storage, self._gone, key, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self._live)
        if self.most_bytes is not None and self._live > self.most_bytes:
            raise torch.OutOfMemoryError(f"out of memory. Tried to allocate {storage.nbytes()}")

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._live -= num_bytes


class Watch(TorchDispatchMode):
    """Counts what operations make."""

    def __init__(self, device: CountedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {memory_of(tensor) for tensor in tensors((*args, *kwargs.values()))}
        out = func(*args, **kwargs)
        for tensor in tensors([out]):
            if not tensor.is_meta and memory_of(tensor) not in known:
                self._device.count(tensor)
        return out


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those of an operation, in lists or not; torch's pytree takes as long as the operations."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)
