"""Devices that compute nothing: one checks the order of all work, one keeps its time."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from megatrain.device.base import COMPUTE, HOST_STREAMS, Buffer, Buffers, Device, Work
from megatrain.telemetry.timeline import Span

CALLER = "caller"  # the thread that puts work on streams is a stream, too
Clock = dict[str, int]


@dataclass(frozen=True)
class TraceEvent:
    """A point whose `clock` says what is certain to have happened once it has passed."""

    clock: Clock


@dataclass
class TraceDevice(Device):
    """Collects races instead of computing.

    Attributes:
        without: names of waits to leave out, to see that their absence is noticed.
        races: each pair of unordered operations, with the buffer.
        waits: names of all waits met.
        operations: `(stream, name)` in the order in which they were put on.
    """

    without: frozenset[str] = frozenset()
    races: list[str] = field(default_factory=list)
    waits: set[str] = field(default_factory=set)
    operations: list[tuple[str, str]] = field(default_factory=list)

    kind = "trace"
    torch_device = torch.device("meta")

    def __post_init__(self) -> None:
        self._clocks: defaultdict[str, Clock] = defaultdict(dict)
        # The newest access of each stream: its number there, and its name.
        self._log: defaultdict[str, dict[tuple[str, bool], tuple[int, str]]] = defaultdict(dict)

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        return self._allocated(Buffer(name, torch.empty(numel, dtype=dtype, device="meta")))

    def _allocated(self, buffer: Buffer) -> Buffer:
        # A caching allocator hands out memory that compute work put on before may still be using.
        self.run(COMPUTE, f"allocate {buffer.name}", lambda: None, writes=[buffer])
        return buffer

    def host(self, name: str, numel: int, dtype: torch.dtype, *, pinned: bool) -> Buffer:
        return Buffer(name, torch.empty(numel, dtype=dtype, device="meta"))

    def run(
        self, stream: str, name: str, work: Work, reads: Buffers = (), writes: Buffers = ()
    ) -> None:
        clock = self._clocks[stream]
        _merge(clock, self._clocks[CALLER])
        clock[stream] = clock.get(stream, 0) + 1
        self.operations.append((stream, name))
        for buffer, write in [(b, False) for b in reads] + [(b, True) for b in writes]:
            for part in buffer.names:
                for (other, other_write), (sequence, earlier) in self._log[part].items():
                    if (write or other_write) and clock.get(other, 0) < sequence:
                        unordered = f"is not ordered against {earlier} on {other}: {part}"
                        self.races.append(f"{name} on {stream} {unordered}")
                self._log[part][stream, write] = clock[stream], name

    def copy(self, stream: str, to: Buffer, source: Buffer, numel: int | None = None) -> None:
        self.run(stream, f"{source.name} -> {to.name}", lambda: None, [source], [to])

    def record(self, stream: str) -> TraceEvent:
        clock = dict(self._clocks[stream])
        _merge(clock, self._clocks[CALLER])
        return TraceEvent(clock)

    def mark(self, stream: str) -> float:
        return 0.0

    def wait(self, stream: str, event: Any | None, why: str) -> None:
        if event is None:
            return
        self.waits.add(why)
        if why not in self.without:
            _merge(self._clocks[stream], event.clock)

    def synchronize(self, event: Any, why: str) -> None:
        self.wait(CALLER, event, why)

    def read(self, buffer: Buffer) -> list[float]:
        self.run(CALLER, f"read {buffer.name}", lambda: None, [buffer])
        return [0.0] * buffer.data.numel()


def _merge(clock: Clock, other: Clock) -> None:
    for stream, sequence in other.items():
        clock[stream] = max(clock.get(stream, 0), sequence)


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
        if stream not in HOST_STREAMS:
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
