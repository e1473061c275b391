"""A host thread that behaves like a stream: work in order, a counter that says how far it is."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatrain.errors import MegatrainError, RunFailed


def start_thread(name: str, work: Callable[[], None], *, daemon: bool = False) -> threading.Thread:
    """Do `work` on a thread of its own. Raises RunFailed: the system gives no thread."""
    thread = threading.Thread(target=work, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError as error:
        raise RunFailed(
            f"the {name!r} thread cannot start ({error}): allow more threads (ulimit -u, or the "
            "pids limit of the container), or run fewer processes"
        ) from error
    return thread


class HostStream:
    """Runs work in the order it is put on; `counter` (pinned int32) counts the marks passed.

    After an error no further work runs, but marks still pass, so that nothing waits for ever; the
    error is raised by the next `check` on the caller's thread.
    """

    def __init__(self, name: str, counter: Tensor) -> None:
        self.name, self.counter = name, counter
        self._marks = 0
        self._passed = 0
        self._closed = False
        self._error: BaseException | None = None
        self._queue: queue.SimpleQueue[Callable[[], Any] | int | None] = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._thread = start_thread(f"megatrain {name}", self._loop, daemon=True)

    def put(self, name: str, work: Callable[[], Any]) -> None:
        """Queue `work`; its result is dropped. Raises RunFailed after `close`."""
        self._add(work)

    def mark(self) -> int:
        """Queue a mark and return the count at which it has passed."""
        self._marks += 1
        self._add(self._marks)
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
        if threading.current_thread() is not self._thread:  # its own work may drop the last user
            self._thread.join()

    def _add(self, item: Callable[[], Any] | int) -> None:
        if self._closed:  # nobody would ever do it, and waiting for it would not end
            raise RunFailed("the engine is closed; make a new one")
        self._queue.put(item)

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, int):
                self._pass(item)
            elif self._error is None:
                try:
                    item()
                except BaseException as error:
                    self._error = error
            del item  # its references would keep an unused engine alive

    def _pass(self, count: int) -> None:
        with self._condition:
            self._passed = count
            # The device compares 32 bits cyclically (see cuda.py).
            self.counter[0] = (count + 2**31) % 2**32 - 2**31
            self._condition.notify_all()
