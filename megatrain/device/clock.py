"""A trace device that also keeps time: what a schedule takes, with nothing computed.

A piece of work starts when its stream has come to it, the caller has put it there, and the events
that its stream waits for have passed. The caller is a stream of its own, which only `synchronize`
holds up. So updates run on under what the caller puts on next, as they do on a real device.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatrain.device.base import Buffer
from megatrain.device.trace import CALLER, TraceDevice, TraceEvent
from megatrain.telemetry.timeline import Span


@dataclass(frozen=True)
class TimedEvent(TraceEvent):
    """An event and the seconds at which it passes."""

    seconds: float


class Costs(Protocol):
    """What work takes."""

    def run(
        self,
        stream: str,
        name: str,
        work: Callable[[], Any],
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
    ) -> tuple[float, int, Any]:
        """Seconds, bytes of host memory moved, and what `Device.run` returns."""

    def copy(self, stream: str, num_bytes: int) -> float:
        """Seconds of a copy."""

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory, on the meta device."""

    def host(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory, on the meta device."""


class ClockDevice(TraceDevice):
    """Keeps time by `costs`.

    Attributes:
        spans: what ran when, in the order in which it was put on.
        now: seconds at which the caller is.
    """

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.spans: list[Span] = []
        self._costs = costs
        self._at: defaultdict[str, float] = defaultdict(float)
        self._after: defaultdict[str, list[str]] = defaultdict(list)

    @property
    def now(self) -> float:
        return self._at[CALLER]

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        return self._allocated(Buffer(name, self._costs.empty(name, numel, dtype)))

    def host(self, name: str, numel: int, dtype: torch.dtype, *, pinned: bool) -> Buffer:
        return Buffer(name, self._costs.host(name, numel, dtype))

    def run(
        self,
        stream: str,
        name: str,
        work: Callable[[], Any],
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> Any:
        super().run(stream, name, work, reads, writes)
        seconds, num_bytes, result = self._costs.run(stream, name, work, reads, writes)
        self._pass(stream, name, seconds, num_bytes)
        return result

    def copy(self, stream: str, to: Buffer, source: Buffer, numel: int | None = None) -> None:
        name = f"{source.name} -> {to.name}"
        super().run(stream, name, lambda: None, [source], [to])
        there = to.data.numel()  # nothing is sliced: a large model's gradients go in many pieces
        num_bytes = to.data.itemsize * (there if numel is None else min(numel, there))
        self._pass(stream, name, self._costs.copy(stream, num_bytes), num_bytes)

    def _pass(self, stream: str, name: str, seconds: float, num_bytes: int) -> None:
        if not seconds:
            return  # what waited for the same is still to come
        start = max(self._at[stream], self._at[CALLER])
        self._at[stream] = start + seconds
        after = tuple(self._after.pop(stream, ()))
        self.spans.append(Span(stream, name, start, start + seconds, after, num_bytes))

    def record(self, stream: str) -> TimedEvent:
        reached = max(self._at[stream], self._at[CALLER])
        return TimedEvent(super().record(stream).clock, reached)

    def wait(self, stream: str, event: Any | None, why: str) -> None:
        super().wait(stream, event, why)
        if event is not None:
            self._after[stream].append(why)
            self._at[stream] = max(self._at[stream], event.seconds)
