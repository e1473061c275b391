"""Signals during a run.

SIGINT, SIGTERM or SIGHUP (a closed terminal; not under nohup): the current step ends, the run is
saved, and the command exits with success. A second signal ends the process at once; checkpoints are
whole at any moment. SIGUSR1: save now and go on.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from megatrain.parallel.distributed import Ranks

_NOTICE = b"\nstopping after this step and saving; once more to stop at once\n"
_AT_ONCE = b"\nstopped at once\n"
_SHOW_CURSOR = b"\x1b[?25h"  # a live display has hidden it
# timeout(1) sends its signal to the command and to the command's group: the signal comes twice.
_ECHO_SECONDS = 0.5


class Stopped(KeyboardInterrupt):
    """The run was stopped where there was nothing to save."""


class Signals:
    """A context that turns signals into requests; it has no effect but on the main thread."""

    def __init__(self) -> None:
        # names of signals that asked for the end, such as `SIGTERM`; None: no signal has
        self._heard: str | None = None  # by this process
        self._agreed: str | None = None  # by all ranks, if requests are `_shared`
        self._shared = False
        self._stop_time = 0.0
        self._save = False
        self._interruptible = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else []
            for number in (signal.SIGINT, signal.SIGTERM, *hangup):
                self._previous[number] = signal.signal(number, self._on_stop)
            self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_save)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def stop(self) -> str | None:
        """The name of the signal that asked for the end; None: no signal has."""
        return self._agreed if self._shared else self._heard

    def take_save(self) -> bool:
        """Return True if a signal has asked for a checkpoint since the last call."""
        if signal.SIGUSR1 in self._previous:
            # LLVM, which compiles GPU kernels, replaces this handler when it first runs. (It calls
            # the handlers of the other signals.)
            signal.signal(signal.SIGUSR1, self._on_save)
        save_now, self._save = self._save, False
        return save_now

    def share(self, ranks: Ranks) -> None:
        """Share requests with all ranks: from now on all ranks act on a signal at the same step."""
        if ranks.size == 1:
            return
        self._shared = True
        requests = ranks.all_gather_object((self._heard, self.take_save()))
        self._agreed = next((stop for stop, _ in requests if stop), None)
        self._save = any(save for _, save in requests)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the first signal end the block, before the first step: raise Stopped within it."""
        self._interruptible = True
        try:
            if not self.stop:
                yield
            if self.stop:  # code in the block may have caught `Stopped`
                raise Stopped(self.stop)
        finally:
            self._interruptible = False

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._heard:
            echoed = number == signal.SIGHUP or time.monotonic() - self._stop_time < _ECHO_SECONDS
            if name == self._heard and echoed:  # kernel and shell both send a hangup
                return
            if self._shared and number == signal.SIGTERM:  # torchrun repeats it to all ranks
                return
            _write(_AT_ONCE)
            os._exit(128 + number)
        self._stop_time = time.monotonic()
        self._heard = name
        if self._interruptible:
            raise Stopped(name)
        _write(_NOTICE)

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True


def _write(notice: bytes) -> None:
    """Write to the terminal by `os.write`, which a signal handler may call."""
    with suppress(OSError):  # the terminal is closed
        os.write(2, notice + (_SHOW_CURSOR if os.isatty(2) else b""))
