"""Ctrl-C during training: the first one ends the run after the step, the second one at once."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_NOTICE = b"\nstopping after this step and writing the model; press Ctrl-C again to quit at once\n"


class StopRequest:
    """Context manager that turns the first SIGINT into `requested`."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(2, _NOTICE)  # the only way of writing that a signal handler may use
