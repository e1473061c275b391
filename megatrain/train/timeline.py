"""One early step of a run on a timeline, for `megatrain report` and Perfetto."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatrain.telemetry.picture import draw
from megatrain.telemetry.recorder import Recording, StepRecorder
from megatrain.telemetry.timeline import Span, chrome_trace

TIMELINE, PICTURE = "timeline.json", "timeline.png"

# Compilations and the choice of kept graphs are over by then.
RECORDED_STEP = 6

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class RunTimeline:
    """Records one step of a run; all others run as they are."""

    def __init__(self, recording: Recording, folder: Path, steps: int) -> None:
        """Args: `recording` as `Engine.recording`; `steps` that this process will do."""
        self._recorder = StepRecorder(recording)
        self._folder = folder
        self._recorded = min(RECORDED_STEP, steps)
        self._done = 0
        self._spans: list[Span] = []

    def step(self, number: int, step: Callable[[], Result]) -> Result:
        """Do step `number` of the run; `timeline.json` is written after the one recorded."""
        turn = self._done + 1
        if turn == max(1, self._recorded - 1):
            self._recorder.begin()
        if turn == self._recorded:
            self._recorder.next()
        try:
            result = step()
        except BaseException:
            # Where the run goes on without this step, the next two are recorded.
            self._recorder.cancel()
            self._recorded = max(self._recorded, turn + 1)
            raise
        self._done = turn
        if turn == self._recorded:
            self._spans = self._recorder.end()
            self._write(number)
        return result

    def _write(self, number: int) -> None:
        trace = chrome_trace(self._spans) | {"otherData": {"step": number}}
        try:
            (self._folder / TIMELINE).write_text(json.dumps(trace), encoding="utf-8")
        except OSError as error:  # a full disk costs the timeline, never the run
            log.warning("no timeline: %s", error)

    def draw(self) -> None:
        """Draw the recorded step, if there was one; takes about a second, so after the run."""
        if not self._spans:
            return
        try:
            draw(self._spans, self._folder / PICTURE, "One step")
        except Exception as error:  # `megatrain report` shows it, too
            log.warning("no picture of the timeline: %s", error)
