"""Steps of a run on a timeline, for `megatrain report` and Perfetto."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatrain.device.base import COMPUTE
from megatrain.run_folder.layout import TIMELINE
from megatrain.telemetry.pictures import draw_step
from megatrain.telemetry.timeline import (
    Breakdown,
    Recording,
    Span,
    StepRecorder,
    breakdown,
    chrome_trace,
)

PICTURE = "timeline.png"

# Compilations and the choice of kept graphs are over by then.
RECORDED_STEP = 6

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class RunTimeline:
    """Records some steps of a run; all others run as they are.

    An early one, and every so many after it. The newest is in `timeline.json`.

    Attributes:
        breakdown: of the last step's time; None: it was not recorded.
    """

    def __init__(
        self, recording: Recording, folder: Path, steps: int, every: int | None = None
    ) -> None:
        """Args:
        recording: as `Engine.recording`.
        steps: number of steps that this process will take.
        every: steps of the run between two recorded ones, at least 2; None: one early step is all.
        """
        self._recorder = StepRecorder(recording)
        self._folder, self._every = folder, every
        self.breakdown: Breakdown | None = None
        self._early = min(RECORDED_STEP, steps)
        self._done = 0
        self._begun = False
        self._spans: list[Span] = []

    def step(self, number: int, step: Callable[[], Result]) -> Result:
        """Do step `number` of the run, and write `timeline.json` if it was to be recorded."""
        turn, self.breakdown = self._done + 1, None
        kept = self._due(turn, number) and (self._begun or turn == 1)
        if not self._begun and (kept or self._due(turn + 1, number + 1)):
            self._recorder.begin()
            self._begun = True
        if kept:
            self._recorder.next()
        try:
            result = step()
        except BaseException:
            # Where the run goes on without this step, the next two are recorded.
            self._recorder.cancel()
            if self._begun and turn <= self._early:
                self._early = turn + 1
            self._begun = False
            raise
        self._done = turn
        if kept:
            self._spans = self._recorder.end()
            self._begun = False
            trace = chrome_trace(self._spans) | {"otherData": {"step": number}}
            try:
                (self._folder / TIMELINE).write_text(json.dumps(trace), encoding="utf-8")
            except OSError as error:  # a full disk costs the timeline, never the run
                log.warning("no timeline: %s", error)
            self.breakdown = breakdown(self._spans, COMPUTE)
        return result

    def _due(self, turn: int, number: int) -> bool:
        if turn <= self._early or self._every is None:
            return turn == self._early
        return number % self._every == 0

    def draw(self) -> None:
        """Draw the recorded step, if there was one; takes about a second, so after the run."""
        if not self._spans:
            return
        try:
            draw_step(self._spans, self._folder / PICTURE, "One step")
        except Exception as error:  # `megatrain report` shows it, too
            log.warning("no picture of the timeline: %s", error)
