"""How far the launching thread may be ahead of a GPU.

A GPU's queue holds about a thousand launches. A launch into a full one blocks, and with it every
other thread's call to the driver (and in some calls whoever needs Python's lock). If the GPU is
waiting for a host thread that makes such a call, nothing ever moves again. So the queue must not
fill while something in it waits for a host thread.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatrain.device.host_stream import HostStream

AHEAD = 8  # pieces of work: of some 75 launches each

# A piece that takes longer to launch has a thousand launches or more: eager layers of many experts,
# or of long rows in tiles.
_LARGE_SECONDS = 0.02

_REMEMBERED = 4  # launches of a piece of one name: layers are of several kinds


class LaunchThrottle:
    """Lets the launching thread run only a few pieces of work ahead of the GPU."""

    def __init__(
        self, record: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Args: `record` returns an event that passes when all launched work is done."""
        self._record, self._clock = record, clock
        self._points: deque[Any] = deque()
        self._awaited: dict[HostStream, int] = {}
        self._seconds: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED)
        )

    def note_wait(self, worker: HostStream, count: int) -> None:
        """Note that work launched on the GPU waits for mark `count` of a host thread."""
        self._awaited[worker] = max(count, self._awaited.get(worker, 0))

    @contextmanager
    def piece(self, name: str) -> Iterator[None]:
        """Wait before the launch of a piece of work, and time the launch."""
        if len(self._points) == AHEAD:
            self._points.popleft().synchronize()
        self._points.append(self._record())
        # A name that has not been launched yet counts as large.
        if max(self._seconds[name], default=_LARGE_SECONDS) >= _LARGE_SECONDS:
            # It may fill the queue by itself, so nothing in it may wait for a host thread.
            for worker, count in self._awaited.items():
                worker.wait(count)
            self._awaited.clear()
        started = self._clock()
        yield
        self._seconds[name].append(self._clock() - started)
