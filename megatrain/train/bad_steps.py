"""What a run does about steps that the engine refuses: it stops, or leaves them out."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from megatrain.config import TrainingSection
from megatrain.errors import InputError, RunFailed, StepRefused

_REMEMBERED = 100  # gradient norms that the median is taken of
_ENOUGH = 20  # the first norms of a run say little about the next ones
_JUMP = 10.0  # times the median: such a norm is computed once more


class BadSteps:
    """The rule of one run, with its memory."""

    def __init__(self, settings: TrainingSection) -> None:
        self._settings = settings
        self._norms: deque[float] = deque(maxlen=_REMEMBERED)
        self._skipped = 0  # in a row

    @property
    def norm_limit(self) -> float:
        """The next step is refused if its gradient norm is above this."""
        return math.inf if self._settings.spike is None else self._above(self._settings.spike)

    @property
    def believed(self) -> float:
        """A gradient norm above this is computed once more before it is believed."""
        return min(self.norm_limit, self._above(_JUMP))

    def _above(self, times: float) -> float:
        return times * statistics.median(self._norms) if len(self._norms) >= _ENOUGH else math.inf

    def passed(self, grad_norm: float) -> None:
        """A step was good."""
        self._norms.append(grad_norm)
        self._skipped = 0

    def skip(self, error: StepRefused) -> None:
        """Leave out a step that has changed nothing.

        Raises:
            StepRefused: the settings say to stop.
            RunFailed: too many in a row, so that nothing is being learnt any more.
        """
        if self._settings.on_nonfinite == "stop" or not error.intact:
            raise error
        self._skipped += 1
        if self._skipped > self._settings.max_skips:
            raise RunFailed(
                f"{self._skipped} bad steps in a row (training.max_skips is "
                f"{self._settings.max_skips}), the last one: {error}"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """The memory, as JSON can keep it."""
        return {"norms": list(self._norms), "skipped": self._skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises InputError if the state is malformed."""
        norms, skipped = state.get("norms"), state.get("skipped")
        numbers = isinstance(norms, list) and all(isinstance(n, float) for n in norms)
        if not numbers or type(skipped) is not int:
            raise InputError("the saved memory of bad steps is damaged; choose another checkpoint")
        self._norms.clear()
        self._norms.extend(norms)  # type: ignore[arg-type]
        self._skipped = skipped
