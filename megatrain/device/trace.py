"""Devices that compute nothing; one keeps the time of its work."""

from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from megatrain.device import base
from megatrain.device.base import Buffer, Buffers, Device, Work
from megatrain.telemetry.timeline import Span

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


class Cost(NamedTuple):
    """The cost of a piece of work.

    Attributes:
        seconds: of its stream.
        launching: seconds of the calling thread beyond `Costs.put_seconds`.
        blocking: the caller waits until it is done.
        num_bytes: of host memory moved.
        result: what `Device.run` returns.
    """

    seconds: float = 0.0
    launching: float = 0.0
    blocking: bool = False
    num_bytes: int = 0
    result: Any = None


class Costs(Protocol):
    """The costs of work.

    Attributes:
        put_seconds: of the calling thread, for each piece of work on a stream of the device.
    """

    put_seconds: float

    def run(self, stream: str, name: str, work: Work, reads: Buffers, writes: Buffers) -> Cost:
        """The cost of a piece of work."""

    def copy(self, stream: str, num_bytes: int) -> float:
        """Seconds of a copy."""

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory, on the meta device."""


class ClockDevice(MetaDevice):
    """Keeps time by `costs`.

    Attributes:
        spans: what ran when, in the order in which it was put on.
        now: seconds at which the caller is.
    """

    def __init__(self, costs: Costs) -> None:
        self.spans: list[Span] = []
        self._costs = costs
        self._at: defaultdict[str, float] = defaultdict(float)
        self._after: defaultdict[str, list[str]] = defaultdict(list)

    @property
    def now(self) -> float:
        return self._at[CALLER]

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        buffer = Buffer(name, self._costs.empty(name, numel, dtype))
        # A caching allocator hands out memory that compute work put on before may still be using.
        self.run(base.COMPUTE, f"allocate {name}", lambda: None, writes=[buffer])
        return buffer

    def in_place(self, buffer: Buffer) -> Buffer:
        return replace(buffer, name=base.Name(base.Memory.IN_PLACE, buffer.name))

    def run(
        self, stream: str, name: str, work: Work, reads: Buffers = (), writes: Buffers = ()
    ) -> Any:
        cost = self._costs.run(stream, name, work, reads, writes)
        self._pass(stream, name, cost)
        return cost.result

    def copy(self, stream: str, to: Buffer, source: Buffer, numel: int | None = None) -> None:
        name = f"{source.name} -> {to.name}"
        most = to.data.numel()  # nothing is sliced: a large model's gradients go in many pieces
        num_bytes = to.data.itemsize * (most if numel is None else min(numel, most))
        self._pass(stream, name, Cost(self._costs.copy(stream, num_bytes), num_bytes=num_bytes))

    def _pass(self, stream: str, name: str, cost: Cost) -> None:
        start = max(self._at[stream], self._at[CALLER])
        if stream not in base.HOST_STREAMS:
            self._at[CALLER] += self._costs.put_seconds + cost.launching
        if not cost.seconds:
            return  # what waited for the same is still to come
        end = max(start + cost.seconds, self._at[CALLER])
        self._at[stream] = end
        if cost.blocking:
            self._at[CALLER] = end
        after = tuple(self._after.pop(stream, ()))
        self.spans.append(Span(stream, name, start, end, after, cost.num_bytes))

    def record(self, stream: str) -> Any:
        """The seconds at which all that was put there is done."""
        return max(self._at[stream], self._at[CALLER])

    def wait(self, stream: str, event: Any | None, why: str) -> None:
        if event is not None:
            self._after[stream].append(why)
            self._at[stream] = max(self._at[stream], event)
