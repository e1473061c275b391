"""The numbers of a run over its steps, from `metrics.jsonl`."""

import math
import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatrain.telemetry.metrics import is_evaluation
from megatrain.telemetry.pictures import Line, Values

COLUMNS = (
    *("step", "loss", "grad_norm", "lr", "tokens", "seconds", "tokens_per_second"),
    *("model_tflops", "mfu", "device_peak_bytes", "host_bytes", "rewards/margins"),
    *("rewards/accuracies", "aux_loss", "reward"),
)


@dataclass
class Metrics:
    """The lines of `metrics.jsonl`.

    Attributes:
        columns: the values of each of COLUMNS over the finished steps; NaN: none.
        evaluations: the line of each evaluation.
        samples: the last prompts and texts of an evaluation, after step `sampled`.
        resumed: how often the run went back to an earlier step; repeated steps count once.
        skipped: steps that were left out.
        failed: the error that ended the run, if its last line has one.
    """

    columns: dict[str, Values]
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)
    samples: list[tuple[str, str]] = field(default_factory=list)
    sampled: float = math.nan
    resumed: int = 0
    skipped: int = 0
    failed: str | None = None

    @property
    def num_steps(self) -> int:
        return len(self.columns["step"])

    def finite(self, name: str) -> Values:
        """The values of a column that are numbers."""
        values = self.columns[name]
        return values[np.isfinite(values)]

    def last(self, name: str) -> float | None:
        values = self.finite(name)
        return float(values[-1]) if len(values) else None

    def median(self, name: str) -> float | None:
        """The median; the first steps, which compile, are left out if there are more."""
        values = self.finite(name)
        values = values[5:] if len(values) >= 10 else values
        return float(np.median(values)) if len(values) else None

    def largest(self, name: str) -> float | None:
        return float(self.finite(name).max(initial=-math.inf)) if self.finite(name).size else None

    def evaluated(self, quantity: str) -> list[Line]:
        """A quantity's evaluations over the steps: over all sets together, then over each set.

        An evaluation without a loss has rewards: its other values come from reward functions.
        """
        points: dict[str, list[tuple[float, float]]] = {}
        for record in self.evaluations:
            if "eval_loss" not in record and quantity != "reward":
                continue
            for name, value in record.items():
                named = re.fullmatch(f"eval_(?:(.+)_)?(?:{quantity})", name)
                if named and math.isfinite(number(value)):
                    points.setdefault(named[1] or "", []).append((record["step"], number(value)))
        lines = []
        for name, pairs in sorted(points.items()):
            steps, values = np.array(pairs).T
            lines.append(Line(f"evaluation, {name}" if name else "evaluation", steps, values, True))
        return lines


def collect(records: Iterable[Mapping[str, Any]]) -> Metrics:
    """The lines of a metrics file; a repeated step's line replaces the earlier one."""
    lists = {name: array("d") for name in COLUMNS}
    evaluated: dict[float, Mapping[str, Any]] = {}
    skipped: set[float] = set()
    failed = None
    for record in records:
        step = number(record.get("step"))
        if not math.isfinite(step):
            continue
        failed = str(record["failed"]) if "failed" in record else None
        if is_evaluation(record):
            evaluated = {before: r for before, r in evaluated.items() if before < step}
            evaluated[step] = record
        elif "skipped" in record:
            skipped = {before for before in skipped if before < step} | {step}
        elif failed is None:
            for name in COLUMNS:
                lists[name].append(number(record.get(name)))
    columns = {name: np.array(values) for name, values in lists.items()}
    steps = columns["step"]
    resumed = int((np.diff(steps) <= 0).sum())
    if resumed:
        later = np.append(np.minimum.accumulate(steps[::-1])[::-1][1:], np.inf)
        columns = {name: values[steps < later] for name, values in columns.items()}
    metrics = Metrics(columns, [*evaluated.values()], [], math.nan, resumed, len(skipped), failed)
    for step, record in evaluated.items():
        texts = record.get("samples")
        pairs = [s for s in texts if isinstance(s, dict)] if isinstance(texts, list) else []
        if pairs:
            metrics.samples = [(str(s.get("prompt")), str(s.get("text"))) for s in pairs]
            metrics.sampled = step
    return metrics


def number(value: Any) -> float:
    """A value of a JSON file as a number; NaN if it is none."""
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan
