"""A device that passes work on to another device, and records when it ran."""

import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

from megatrain.device import base
from megatrain.device.base import Buffer, Buffers, Device, Work
from megatrain.device.disk import move
from megatrain.errors import RunFailed
from megatrain.telemetry.timeline import Span

if TYPE_CHECKING:
    _Passing = Device
else:
    _Passing = object  # methods of Device would hide `__getattr__`


class Recording(_Passing):
    """Passes all work on to `device`; between `start` and `stop` it times the work.

    Timing takes two events for each piece of work: some milliseconds in a step of seconds.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._records = self._closed = False
        self._marks: list[tuple[str, str, Any, Any, tuple[str, ...], int]] = []  # as in Span
        self._host_spans: list[Span] = []
        self._waits: defaultdict[str, list[str]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def start(self) -> None:
        """Begin to time work; this moment is second 0."""
        self._marks, self._host_spans, self._waits = [], [], defaultdict(list)
        self._device.synchronize(self._device.record("compute"), "recording starts")
        self._origin, self._origin_host = self._device.mark("compute"), time.perf_counter()
        self._records = True

    def stop(self) -> list[Span]:
        """Wait until all work is done; return the spans of all work since `start`."""
        self._records = False
        for stream in (*base.DEVICE_STREAMS, *base.HOST_STREAMS):
            self._device.synchronize(self._device.record(stream), "recording stops")
        second_of = partial(self._device.seconds, self._origin)
        spans = [
            Span(stream, name, second_of(begin), second_of(end), after, num_bytes)
            for stream, name, begin, end, after, num_bytes in self._marks
        ]
        return sorted([*spans, *self._host_spans], key=lambda span: span.start)

    def run(
        self, stream: str, name: str, work: Work, reads: Buffers = (), writes: Buffers = ()
    ) -> Any:
        if self._closed:
            raise RunFailed("the engine is closed; make a new one")
        if not self._records:
            return self._device.run(stream, name, work, reads, writes)
        after = tuple(self._waits.pop(stream, ()))
        if stream in base.HOST_STREAMS:
            num_bytes = update_bytes(reads, writes) if stream == base.UPDATE else 0
            if stream in base.DISK_STREAMS:
                num_bytes = sum(buffer.data.nbytes for buffer in reads)

            def timed() -> Any:
                begin = time.perf_counter() - self._origin_host
                result = work()
                end = time.perf_counter() - self._origin_host
                self._host_spans.append(Span(stream, name, begin, end, after, num_bytes))
                return result

            return self._device.run(stream, name, timed, reads, writes)
        begin = self._device.mark(stream)
        result = self._device.run(stream, name, work, reads, writes)
        self._marks.append((stream, name, begin, self._device.mark(stream), after, 0))
        return result

    def copy(self, stream: str, to: Buffer, source: Buffer, numel: int | None = None) -> None:
        if not self._records:
            return self._device.copy(stream, to, source, numel)
        name = f"{source.name} -> {to.name}"
        if stream in base.HOST_STREAMS:
            return self.run(stream, name, partial(move, to, source, numel), [source], [to])
        after, begin = tuple(self._waits.pop(stream, ())), self._device.mark(stream)
        self._device.copy(stream, to, source, numel)
        end, num_bytes = self._device.mark(stream), source.data[:numel].nbytes
        self._marks.append((stream, name, begin, end, after, num_bytes))
        return None

    def wait(self, stream: str, event: Any | None, why: str) -> None:
        if self._records and event is not None:
            self._waits[stream].append(why)
        self._device.wait(stream, event, why)

    def close(self) -> None:
        self._closed = True
        self._device.close()


def update_bytes(reads: Buffers, writes: Buffers) -> int:
    """Bytes that an update moves: it reads gradients, and reads and writes all other planes."""
    numel = max((plane.data.numel() for plane in writes), default=0)  # gradients may be longer
    gradients = sum(buffer.data[:numel].nbytes for buffer in reads)
    return gradients + 2 * sum(plane.data.nbytes for plane in writes)
