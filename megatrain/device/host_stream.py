"""Host threads that behave like streams, and a throttle for the thread that launches GPU work."""

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megatrain.errors import MegatrainError, RunFailed, explained


def start_thread(name: str, work: Callable[[], None], *, daemon: bool = False) -> threading.Thread:
    """Run `work` on a new thread. Raises RunFailed: the system refuses a thread."""
    thread = threading.Thread(target=work, name=name, daemon=daemon)
    remedy = "allow more (ulimit -u, or the container's pids limit), or run fewer processes"
    with explained(f"the {name!r} thread cannot start", remedy, of=RuntimeError, into=RunFailed):
        thread.start()
    return thread


class HostStream:
    """Runs work in the order of `put`; `counter` (pinned int32) counts the marks passed.

    After an error no further work runs, but marks still pass, so that nothing waits for ever. The
    next `check` raises the error on the caller's thread.
    """

    def __init__(self, name: str, counter: Tensor) -> None:
        self.name, self.counter = name, counter
        self._marks = self._passed = 0
        self._closed = False
        self._error: BaseException | None = None
        self._queue: queue.SimpleQueue[Callable[[], Any] | int | None] = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._thread = start_thread(f"megatrain {name}", self._loop, daemon=True)

    def mark(self) -> int:
        """Queue a mark and return the count at which it has passed."""
        self._marks += 1
        self.put(self._marks)
        return self._marks

    def passed(self, count: int) -> bool:
        return self._passed >= count

    def wait(self, count: int) -> None:
        """Block until mark `count` has passed."""
        with self._condition:
            self._condition.wait_for(lambda: self._passed >= count)

    def check(self) -> None:
        """Raise the error that stopped this worker, if any."""
        if self._error is None:
            return
        if isinstance(self._error, MegatrainError):
            raise self._error
        raise RunFailed(f"the {self.name} thread failed: {self._error}") from self._error

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._closed = True
        self._queue.put(None)
        if threading.current_thread() is not self._thread:  # its own work may call `close`
            self._thread.join()

    def put(self, item: Callable[[], Any] | int) -> None:
        """Queue work, whose result is dropped, or a mark. Raises RunFailed after `close`."""
        if self._closed:  # the thread has ended: a wait for this work would never end
            raise RunFailed("the engine is closed; make a new one")
        self._queue.put(item)

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, int):
                with self._condition:
                    self._passed = item
                    # The device compares 32 bits cyclically (see cuda.py).
                    self.counter[0] = (item + 2**31) % 2**32 - 2**31
                    self._condition.notify_all()
            elif self._error is None:
                try:
                    item()
                except BaseException as error:
                    self._error = error
            del item  # else its references keep an unused engine alive while the queue is empty


AHEAD = 8  # pieces of work, of some 75 launches each

# A piece that takes longer to launch has a thousand launches or more: eager layers of many experts,
# or of long rows in tiles.
_LARGE_SECONDS = 0.02

_REMEMBERED = 4  # launch times for each name, since layers of several kinds have one name


class LaunchThrottle:
    """Lets the launching thread run only a few pieces of work ahead of the GPU."""

    def __init__(
        self, record: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Args: `record` returns an event that passes when all launched work is done."""
        self._record, self._clock = record, clock
        self._points: deque[Any] = deque()  # events before each of the last `AHEAD` pieces
        self._awaited: dict[HostStream, int] = {}  # the last mark that launched work waits for
        # by name of work, the seconds of its last launches
        self._seconds: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED)
        )

    def note_wait(self, worker: HostStream, count: int) -> None:
        """Remember that work launched on the GPU waits for mark `count` of a host thread."""
        self._awaited[worker] = max(count, self._awaited.get(worker, 0))

    @contextmanager
    def piece(self, name: str) -> Iterator[None]:
        """Around the launch of a piece of work: wait until it may be launched, and time it."""
        if len(self._points) == AHEAD:
            self._points.popleft().synchronize()
        self._points.append(self._record())
        # A name that has not been launched yet counts as large.
        if max(self._seconds[name], default=_LARGE_SECONDS) >= _LARGE_SECONDS:
            # The piece may fill the launch queue, so nothing there may wait for a host thread.
            for worker, count in self._awaited.items():
                worker.wait(count)
            self._awaited.clear()
        started = self._clock()
        yield
        self._seconds[name].append(self._clock() - started)
