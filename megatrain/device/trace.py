"""A device that computes nothing and checks everything: vector clocks per stream.

Any two operations on one buffer, one of them a write, must be ordered by events. The check does not
depend on timing: it looks at what the schedule guarantees, not at what happened.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from megatrain.device.base import COMPUTE, Buffer, Buffers, Device, Work

CALLER = "caller"  # the thread that puts work on streams is a stream, too
Clock = dict[str, int]


@dataclass(frozen=True)
class TraceEvent:
    """A point whose `clock` says what is certain to have happened once it has passed."""

    clock: Clock


@dataclass
class _Access:
    """The last access of one kind that a stream made to a buffer."""

    sequence: int
    name: str


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
        self._log: defaultdict[str, dict[tuple[str, bool], _Access]] = defaultdict(dict)

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
                self._check(stream, name, part, write)
                self._log[part][stream, write] = _Access(clock[stream], name)

    def _check(self, stream: str, name: str, buffer: str, write: bool) -> None:
        clock = self._clocks[stream]
        for (other, other_write), access in self._log[buffer].items():
            if (write or other_write) and clock.get(other, 0) < access.sequence:
                self.races.append(
                    f"{name} on {stream} is not ordered against {access.name} on {other}: {buffer}"
                )

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
