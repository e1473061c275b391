"""A device on which everything happens as late as the schedule allows.

The CPU device runs work in program order and the trace device sees only the accesses that are
declared; this one computes real numbers with copies and host threads that lag behind until
somebody waits for them. A missing wait, or work that looks at something the schedule has meanwhile
moved on from, shows as a wrong number.
"""

import random
from collections import defaultdict
from typing import Any

import torch

from megatrain.device import Buffer, CpuDevice
from megatrain.device.base import COMPUTE, Buffers, Work


class LateDevice(CpuDevice):
    """Compute work is done at once; all other streams wait until they are waited for.

    With `eagerness`, each new piece of work lets random streams do random amounts of theirs.
    """

    def __init__(self, eagerness: float = 0.0, seed: int = 0) -> None:
        self._queues: defaultdict[str, list[Work]] = defaultdict(list)
        self._done: defaultdict[str, int] = defaultdict(int)
        self._eagerness, self._random = eagerness, random.Random(seed)

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        buffer = super().empty(name, numel, dtype)
        if dtype.is_floating_point:
            buffer.data.fill_(torch.nan)
        return buffer

    def run(
        self, stream: str, name: str, work: Work, reads: Buffers = (), writes: Buffers = ()
    ) -> Any:
        self._let_some_happen()
        if stream == COMPUTE:
            return work()
        self._queues[stream].append(work)
        return None

    def copy(self, stream: str, to: Buffer, source: Buffer, numel: int | None = None) -> None:
        self.run(stream, "copy", lambda: CpuDevice.copy(self, stream, to, source, numel))

    def record(self, stream: str) -> tuple[str, int]:
        """The pieces of work of the stream so far."""
        return stream, len(self._queues[stream])

    def wait(self, stream: str, event: Any, why: str) -> None:
        if event is None:
            return
        if stream == COMPUTE:
            self._reach(*event)
        else:
            self._queues[stream].append(lambda: self._reach(*event))

    def synchronize(self, event: Any, why: str) -> None:
        if event is not None:
            self._reach(*event)

    def close(self) -> None:
        for stream in list(self._queues):
            self._reach(*self.record(stream))

    def _reach(self, stream: str, count: int) -> None:
        if stream == COMPUTE:
            return  # done when it was put on
        while self._done[stream] < count:
            self._done[stream] += 1
            self._queues[stream][self._done[stream] - 1]()

    def _let_some_happen(self) -> None:
        for stream in list(self._queues):
            if self._random.random() < self._eagerness:
                ahead = len(self._queues[stream]) - self._done[stream]
                self._reach(stream, self._done[stream] + self._random.randint(0, ahead))
