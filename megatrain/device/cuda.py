"""A GPU of NVIDIA, or of AMD by torch for ROCm. Only this file uses torch.cuda.

Host streams are threads. A device stream waits for one through a counter in pinned memory
(`driver/`), so the thread that launches kernels never blocks on an update.
"""

import gc
import logging
import os
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain.base.units import MIB, gib
from megatrain.compat.torch import can_compile
from megatrain.device.base import COMPUTE, HOST_STREAMS, Abilities, Buffer, Buffers, Device, Work
from megatrain.device.cpu import host_range
from megatrain.device.disk import move
from megatrain.device.host_stream import HostStream, LaunchThrottle
from megatrain.errors import DoesNotFit, InputError, RunFailed
from megatrain.machine import CONTEXT_BYTES, mapping_bytes
from megatrain.telemetry.gpu import find_driver
from megatrain.telemetry.host import host_available_bytes, host_limit_bytes

_log = logging.getLogger(__name__)

_FETCH = "fetch"  # a device stream that waits for no other: copies within work of host streams

_FEW_CONNECTIONS = (
    "CUDA was in use before megatrain was imported, with 8 connections: streams of ranks hold "
    "each other up; import megatrain first, or set CUDA_DEVICE_MAX_CONNECTIONS=32"
)

_UNPINNED_FACTOR = 5.5  # 55.5 GB/s against 10 from pageable memory (H200, PCIe 5 x16)

_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class HostEvent:
    """The event that a host stream's counter has reached `count`."""

    worker: HostStream
    count: int


class CudaDevice(Device):
    """One GPU with a compute stream, two copy streams and a thread for each host stream."""

    kind = "cuda"

    def __init__(self, index: int = 0, *, shared: bool = False) -> None:
        """Args: `shared`: True if this is one of several ranks, which need more streams."""
        if shared and "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
            if torch.cuda.is_initialized():
                _log.warning(_FEW_CONNECTIONS)
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        self.torch_device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.can = Abilities(
            shares_host_memory=bool(getattr(properties, "is_integrated", False)),
            reads_in_place=True,
            counts_memory=True,
            compiles=can_compile(),
            overlaps=True,
            attends_with_sums=True,
            generators=(self.torch_device,),
        )
        torch.cuda.set_device(self.torch_device)
        # Free what an earlier engine has left in reference cycles and in torch's cache.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._limit: int | None = None
        self._host_limit: int | None = None
        compute = torch.cuda.current_stream()
        self._streams: dict[str, torch.cuda.Stream] = {COMPUTE: compute}
        self._counters = host_range("host stream counters", 64 * len(HOST_STREAMS), torch.int32)
        self._pace = LaunchThrottle(lambda: _recorded(compute))
        self._pinned: dict[int, Tensor] = {}  # by address
        self._pinning_failed = False
        # The GPU can only see the counters if they are pinned.
        self._waits_on_counters = self._pin("host stream counters", self._counters)
        self._workers = {
            name: HostStream(name, self._counters[64 * i : 64 * i + 1])
            for i, name in enumerate(HOST_STREAMS)
        }
        self._driver = find_driver()
        # cuDNN's attention is the fastest on Hopper (1.8 times flash at 1024 tokens).
        self._attention = sdpa_kernel(_ATTENTION, set_priority=True)
        self._attention.__enter__()
        # Memory that is unmapped while pinned spoils later registrations at its address, so a
        # device that nobody has closed closes when it is collected, or when Python ends.
        self._closing = weakref.finalize(
            self, _close, self._workers, self._pinned, self._attention, self.torch_device
        )

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        try:
            return Buffer(name, torch.empty(numel, dtype=dtype, device=self.torch_device))
        except torch.cuda.OutOfMemoryError as error:
            free = self.memory()["device_free_bytes"]
            raise DoesNotFit(
                f"no device memory for {name}: {gib(numel * dtype.itemsize)} wanted, {gib(free)} "
                "free; use fewer slots or smaller micro-batches"
            ) from error

    def host(self, name: str, numel: int, dtype: torch.dtype, *, pinned: bool) -> Buffer:
        flat = host_range(name, numel, dtype, self._host_limit)
        if pinned and numel:
            self._pin(name, flat)
        return Buffer(name, flat)

    def in_place(self, buffer: Buffer) -> Buffer:
        flat = buffer.data
        if not len(flat):
            return replace(buffer, data=flat.to(self.torch_device))
        address = flat.data_ptr()
        if not any(0 <= address - start < pinned.nbytes for start, pinned in self._pinned.items()):
            raise InputError(
                f"placement.slots is 0, but {buffer.name} is not pinned, so the GPU cannot read it "
                "in place; raise the locked-memory limit (ulimit -l unlimited), or take slots: 1"
            )
        # With unified addressing the GPU has pinned bytes at the same address. The tensor refers to
        # `array`, which keeps `flat` alive.
        array = SimpleNamespace(flat=flat, __cuda_array_interface__={
            "shape": (flat.nbytes,), "typestr": "|u1", "data": (address, False), "version": 3
        })  # fmt: skip
        mapped = torch.as_tensor(array, device=self.torch_device)
        return replace(buffer, data=mapped.view(flat.dtype))

    def free(self, buffer: Buffer) -> None:
        if buffer.data.data_ptr() in self._pinned:
            torch.cuda.synchronize(self.torch_device)
            _unpin(self._pinned.pop(buffer.data.data_ptr()))

    def _pin(self, name: str, flat: Tensor) -> bool:
        """Pin a range of host memory. False: that is not allowed, so copies are slower."""
        status = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.nbytes, 0))
        if status == 0:
            self._pinned[flat.data_ptr()] = flat
            self._apply_limit()
            return True
        with suppress(RuntimeError):  # clears the error, which would else fail the next launch
            torch.ones(1, device=self.torch_device).add_(1)
        if not self._pinning_failed:
            self._pinning_failed = True
            _log.warning(
                "Host memory cannot be pinned (%s for %s, CUDA error %d): copies are about %.1f "
                "times slower and overlap with nothing; raise the locked-memory limit (ulimit -l "
                "unlimited)",
                gib(flat.nbytes), name, status, _UNPINNED_FACTOR,
            )  # fmt: skip
        return False

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.torch_device)
        return self._streams[name]

    def run(
        self, stream: str, name: str, work: Work, reads: Buffers = (), writes: Buffers = ()
    ) -> Any:
        if stream in self._workers:
            return self._workers[stream].put(work)
        pace = self._pace.piece(name) if stream == COMPUTE else nullcontext()
        with pace, torch.cuda.stream(self._stream(stream)):
            return work()

    def copy(self, stream: str, to: Buffer, source: Buffer, numel: int | None = None) -> None:
        if stream in self._workers:
            return self._workers[stream].put(lambda: move(to, source, numel))
        queue = self._stream(stream)
        if self._pinning_failed and source.data.device.type == "cpu":
            # CUDA may read pageable memory at once, whatever the stream has to wait for.
            queue.synchronize()
        with torch.cuda.stream(queue):
            to.data[:numel].copy_(source.data[:numel], non_blocking=True)
        return None

    def fetch(self, to: Tensor, source: Tensor) -> None:
        queue = self._stream(_FETCH)
        with torch.cuda.stream(queue):
            to.copy_(source, non_blocking=True)
        queue.synchronize()

    def record(self, stream: str) -> Any:
        if stream in self._workers:
            worker = self._workers[stream]
            return HostEvent(worker, worker.mark())
        return _recorded(self._stream(stream))

    def mark(self, stream: str) -> torch.cuda.Event:
        return self._stream(stream).record_event(torch.cuda.Event(enable_timing=True))

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000

    def wait(self, stream: str, event: Any | None, why: str) -> None:
        if event is None:
            return
        if stream in self._workers:
            self._workers[stream].put(lambda: self._block(event))
        elif isinstance(event, HostEvent):
            self._wait_for_counter(stream, event)
        else:
            self._stream(stream).wait_event(event)

    def _wait_for_counter(self, stream: str, event: HostEvent) -> None:
        """Let a device stream wait for a host stream; if the driver cannot, block this thread."""
        if event.worker.passed(event.count):
            return
        self._pace.note_wait(event.worker, event.count)
        if self._waits_on_counters:
            queue, counter = self._stream(stream).cuda_stream, event.worker.counter.data_ptr()
            status = self._driver.wait(queue, counter, event.count)
            if status == 0:
                return
            if status not in self._driver.unsupported:
                raise RunFailed(f"the driver refused a stream wait (StreamWaitValue32: {status})")
            self._waits_on_counters = False
            _log.warning(
                "This driver's streams cannot wait for host memory (StreamWaitValue32: %d): the "
                "thread that launches work waits for updates, so steps take longer",
                status,
            )
        event.worker.wait(event.count)

    @staticmethod
    def _block(event: Any) -> None:
        if isinstance(event, HostEvent):
            event.worker.wait(event.count)
        else:
            event.synchronize()

    def synchronize(self, event: Any | None, why: str) -> None:
        if event is not None:
            self._block(event)
        for worker in self._workers.values():
            worker.check()

    def seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def limit(self, device_bytes: int | None, host_bytes: int | None) -> None:
        self._host_limit, self._limit = host_bytes, device_bytes
        self._apply_limit()

    def _apply_limit(self) -> None:
        """Limit torch's memory to the device's limit without the driver's own memory."""
        _, total = torch.cuda.mem_get_info(self.torch_device)
        allowed = total if self._limit is None else self._limit - self._context_bytes
        if allowed < MIB:
            raise DoesNotFit(
                f"device_memory is {gib(self._limit or 0)}, of which the driver takes "
                f"{gib(self._context_bytes)} for the process and to map pinned memory; allow more"
            )
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), self.torch_device)

    @property
    def _context_bytes(self) -> int:
        """Bytes that the driver takes besides torch's memory, as far as that is known."""
        return CONTEXT_BYTES + mapping_bytes(sum(flat.nbytes for flat in self._pinned.values()))

    def memory(self) -> dict[str, int]:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        if self.can.shares_host_memory:  # the driver counts the page cache as taken
            total = min(total, host_limit_bytes())
            free = min(total, host_available_bytes(self._host_limit))
        reserved = torch.cuda.memory_reserved(self.torch_device)
        if self._limit is not None:
            total = min(total, self._limit)
            free = min(free, max(0, total - self._context_bytes - reserved))
        return {
            "device_bytes": reserved,
            "device_peak_bytes": torch.cuda.max_memory_reserved(self.torch_device),
            "device_used_bytes": torch.cuda.memory_allocated(self.torch_device),
            "device_used_peak_bytes": torch.cuda.max_memory_allocated(self.torch_device),
            "device_total_bytes": total,
            "device_free_bytes": free,
            "device_context_bytes": self._context_bytes,
        }

    def close(self) -> None:
        self._closing()


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    return stream.record_event(torch.cuda.Event(blocking=True))


def _close(
    workers: dict[str, HostStream],
    pinned: dict[int, Tensor],
    attention: AbstractContextManager,
    device: torch.device,
) -> None:
    """End a device's threads, leave its `sdpa_kernel` (`attention`), and unpin its memory."""
    for worker in workers.values():
        worker.close()
    torch.cuda.synchronize(device)
    attention.__exit__(None, None, None)
    for flat in pinned.values():
        _unpin(flat)
    pinned.clear()


def _unpin(flat: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(flat.data_ptr())
