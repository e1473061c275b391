"""What a run's evaluations say of its states: which is the best, and whether to go on."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from megatrain.config import Config


class Watch:
    """Follows one metric; all that it knows follows from the run's log.

    So a resumed run knows as much as one that was never interrupted.
    """

    def __init__(self, config: Config, logged: Iterable[Mapping[str, Any]]) -> None:
        """Args: `logged`: the run's log so far."""
        self.metric = config.watched
        self._sign = -1.0 if config.larger_is_better else 1.0
        self._rule = config.training.early_stopping
        self._values: list[tuple[float, int]] = []  # of each evaluated step; small ones are good
        self._reference, self._waited = math.inf, 0
        for record in logged:
            self.see(record)

    def see(self, record: Mapping[str, Any]) -> bool:
        """Take a line of the log in; whether it is an evaluation better than all before."""
        if self.metric not in record:
            return False
        value = record[self.metric]
        known = isinstance(value, int | float) and math.isfinite(value)
        signed = self._sign * value if known else math.inf
        if signed < self._reference - (self._rule.min_delta if self._rule else 0.0):
            self._reference, self._waited = signed, 0
        else:
            self._waited += 1
        is_best = signed < min(self._values, default=(math.inf, 0))[0]
        if known:
            self._values.append((signed, record["step"]))
        return is_best

    def value(self, step: int) -> float | None:
        """The metric after a step, if it is known."""
        found = [signed for signed, of in self._values if of == step]
        return self._sign * found[-1] if found else None

    @property
    def ranked(self) -> list[int]:
        """The evaluated steps, the best first; the earlier one of two alike."""
        return [step for _, step in sorted(self._values)]

    def best_of(self, steps: Collection[int]) -> int | None:
        """The best of these steps; None: none of them was evaluated."""
        return next((step for step in self.ranked if step in steps), None)

    @property
    def stop(self) -> str | None:
        """Why the run should end here; None: it should not."""
        if self._rule is None or self._waited < self._rule.patience:
            return None
        times = f"{self._waited} evaluation{'s' if self._waited > 1 else ''}"
        if self._reference == math.inf:
            return f"{self.metric} was no number in {times}"
        best = self._sign * self._reference
        return f"{self.metric} was not better than {best:.4g} in {times}"
