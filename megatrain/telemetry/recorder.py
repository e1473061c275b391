"""The timeline of one step as it is in the midst of a run."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress

from megatrain.telemetry.timeline import Span, window

Recording = Callable[[], AbstractContextManager[list[Span]]]


class StepRecorder:
    """Takes times over two steps and keeps the second.

    A step's updates run under the next step's forward. One step alone would show them after its
    end, where nothing is computed, and none where they are in a run.

        recorder.begin(); step(); recorder.next(); step(); spans = recorder.end()
    """

    def __init__(self, recording: Recording) -> None:
        """Args: `recording` as `Engine.recording`."""
        self._recording = recording
        self._open = ExitStack()
        self._origin = self._start = 0.0

    def begin(self) -> None:
        """The step before the one to be kept is about to start."""
        self._spans = self._open.enter_context(self._recording())
        self._origin = time.perf_counter()
        self._start = 0.0

    def next(self) -> None:
        """The step to be kept is about to start."""
        self._start = time.perf_counter() - self._origin

    def cancel(self) -> None:
        """A step failed: drop what was recorded. What ails the device is the step's to report."""
        with suppress(Exception):
            self._open.close()

    def end(self) -> list[Span]:
        """The kept step has ended: its spans. Waits for the updates that it has started."""
        end = time.perf_counter() - self._origin
        self._open.close()
        return window(self._spans, self._start, end)
