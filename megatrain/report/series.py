"""The numbers of a run over its steps, and as many of them as a screen can show."""

import math
import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.telemetry.metrics import is_evaluation

Numbers = NDArray[np.float64]

COLUMNS = (
    *("step", "loss", "grad_norm", "lr", "tokens", "seconds", "tokens_per_second"),
    *("model_tflops", "mfu", "device_peak_bytes", "host_bytes", "rewards/margins"),
    *("rewards/accuracies", "aux_loss", "reward"),
)

# Columns of pixels that a line is drawn with; of each, its least and largest value are kept.
PIXELS = 500


@dataclass
class Metrics:
    """What `metrics.jsonl` says.

    Attributes:
        columns: each of COLUMNS over the finished steps; NaN where there is no value.
        evaluations: step, loss and seconds of each evaluation.
        sets: step and loss of those of each named set.
        accuracies: step and share of right tokens, or of preferred replies, over all sets and of
            each.
        margins: step and margin of rewards of each evaluation, where a loss has them.
        rewards: step and mean reward of each evaluation, likewise.
        samples: prompts and texts that an evaluation has generated last, after step `sampled`.
        resumed: how often the run went back to an earlier step; what it did twice counts once.
        skipped: steps that were left out.
        failed: what ended the run, if its last line says so.
    """

    columns: dict[str, Numbers]
    evaluations: list[tuple[float, float, float]] = field(default_factory=list)
    sets: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    accuracies: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    margins: list[tuple[float, float]] = field(default_factory=list)
    rewards: list[tuple[float, float]] = field(default_factory=list)
    samples: list[tuple[str, str]] = field(default_factory=list)
    sampled: float = math.nan
    resumed: int = 0
    skipped: int = 0
    failed: str | None = None

    @property
    def num_steps(self) -> int:
        return len(self.columns["step"])

    def last(self, name: str) -> float | None:
        """The newest value that is a number."""
        values = self.columns[name]
        values = values[np.isfinite(values)]
        return float(values[-1]) if len(values) else None

    def median(self, name: str) -> float | None:
        """The middle value; the first steps compile and are left out where there are more."""
        values = self.columns[name]
        values = values[5:] if len(values) >= 10 else values
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else None

    def largest(self, name: str) -> float | None:
        """The largest value."""
        values = self.columns[name]
        values = values[np.isfinite(values)]
        return float(values.max()) if len(values) else None

    def total(self, name: str) -> float:
        """The sum over all steps."""
        return float(np.nansum(self.columns[name]))


def collect(records: Iterable[Mapping[str, Any]]) -> Metrics:
    """The lines of a metrics file; those that a resumed run did again replace the first ones."""
    lists = {name: array("d") for name in COLUMNS}
    evaluated: dict[float, Mapping[str, Any]] = {}
    skipped: list[float] = []
    failed = None
    for record in records:
        step = _number(record.get("step"))
        if not math.isfinite(step):
            continue
        failed = str(record["failed"]) if "failed" in record else None
        if is_evaluation(record):
            evaluated = {before: r for before, r in evaluated.items() if before < step}
            evaluated[step] = record
        elif "skipped" in record:
            while skipped and skipped[-1] >= step:
                skipped.pop()
            skipped.append(step)
        elif failed is None:
            for name in COLUMNS:
                lists[name].append(_number(record.get(name)))
    return _metrics(lists, evaluated, len(skipped), failed)


def _metrics(
    lists: Mapping[str, "array[float]"],
    evaluated: Mapping[float, Mapping[str, Any]],
    skipped: int,
    failed: str | None,
) -> Metrics:
    columns = {name: np.array(values) for name, values in lists.items()}
    steps = columns["step"]
    resumed = int((np.diff(steps) <= 0).sum())
    if resumed:
        later = np.append(np.minimum.accumulate(steps[::-1])[::-1][1:], np.inf)
        columns = {name: values[steps < later] for name, values in columns.items()}
    found = Metrics(columns, resumed=resumed, skipped=skipped, failed=failed)
    for step, record in evaluated.items():
        loss, seconds = (_number(record.get(f"eval_{name}")) for name in ("loss", "seconds"))
        found.evaluations.append((step, loss, seconds))
        found.margins.append((step, _number(record.get("eval_rewards/margins"))))
        found.rewards.append((step, _number(record.get("eval_reward"))))
        if samples := _samples(record.get("samples")):
            found.samples, found.sampled = samples, step
        # Without a loss others are what reward functions have logged.
        for name, value in record.items() if "eval_loss" in record else ():
            if named := re.fullmatch("eval_(.+)_loss", name):
                found.sets.setdefault(named[1], []).append((step, _number(value)))
            if named := re.fullmatch("eval_(?:(.+)_)?(?:accuracy|rewards/accuracies)", name):
                found.accuracies.setdefault(named[1] or "", []).append((step, _number(value)))
    return found


def _samples(given: Any) -> list[tuple[str, str]]:
    found = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    return [(str(each.get("prompt")), str(each.get("text"))) for each in found]


def _number(value: Any) -> float:
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan


@dataclass(frozen=True)
class Reduced:
    """A line in at most PIXELS points: the mean of each piece, its least and largest value."""

    x: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers

    @property
    def is_band(self) -> bool:
        """Whether a point stands for several values."""
        return not np.array_equal(self.low, self.high)


def reduce(x: Numbers, y: Numbers, pixels: int = PIXELS) -> Reduced:
    """Points `(x, y)` as they can be seen; what is not finite is left out."""
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= 2 * pixels:
        return Reduced(x, y, y, y)
    starts = np.linspace(0, len(x), pixels, endpoint=False).astype(np.int64)
    counts = np.diff(np.append(starts, len(x)))
    return Reduced(
        x[starts + counts // 2],
        np.add.reduceat(y, starts) / counts,
        np.minimum.reduceat(y, starts),
        np.maximum.reduceat(y, starts),
    )
