"""A device that checks the order of all work instead of computing."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from megatrain.device.base import CALLER, COMPUTE, Buffer, Buffers, MetaDevice, Work

# Of each stream how many operations are certain to have happened.
Clock = dict[str, int]


@dataclass
class TraceDevice(MetaDevice):
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

    def __post_init__(self) -> None:
        self._clocks: defaultdict[str, Clock] = defaultdict(dict)
        # The newest access of each stream: its number there, and its name.
        self._log: defaultdict[str, dict[tuple[str, bool], tuple[int, str]]] = defaultdict(dict)

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        buffer = super().empty(name, numel, dtype)
        # A caching allocator hands out memory that compute work put on before may still be using.
        self.run(COMPUTE, f"allocate {name}", lambda: None, writes=[buffer])
        return buffer

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

    def record(self, stream: str) -> Clock:
        clock = dict(self._clocks[stream])
        _merge(clock, self._clocks[CALLER])
        return clock

    def wait(self, stream: str, event: Clock | None, why: str) -> None:
        if event is None:
            return
        self.waits.add(why)
        if why not in self.without:
            _merge(self._clocks[stream], event)


def _merge(clock: Clock, other: Clock) -> None:
    for stream, sequence in other.items():
        clock[stream] = max(clock.get(stream, 0), sequence)
