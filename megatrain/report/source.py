"""Reads the files of a run's folder that exist and are whole, and its numbers over the steps."""

import math
import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.base.json_yaml import parse_json, read_yaml
from megatrain.errors import InputError
from megatrain.run_folder.layout import (
    CONFIG,
    ENVIRONMENT,
    METRICS,
    MODEL,
    TIMELINE,
    early_end,
    model_state,
    model_steps,
)
from megatrain.telemetry.metrics import is_evaluation, read_metrics
from megatrain.telemetry.pictures import Line, Values
from megatrain.telemetry.timeline import Breakdown, Span, breakdown, read_trace

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
        resumed: how often the run went back to an earlier step; repeated steps count once.
        skipped: steps that were left out.
        failed: the error that ended the run, if its last line has one.
    """

    columns: dict[str, Values]
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)
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
    return Metrics(columns, [*evaluated.values()], resumed, len(skipped), failed)


def number(value: Any) -> float:
    """A value of a JSON file as a number; NaN if it is none."""
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan


@dataclass
class Run:
    """The content of a run's folder.

    Attributes:
        environment: machine and versions (telemetry/host.py).
        config: the run file.
        spans: the recorded step; `breakdown`: where its time went.
        notes: sentences on what is missing, damaged, repeated or left out.
    """

    name: str
    status: str
    metrics: Metrics
    environment: Mapping[str, Any]
    config: Mapping[str, Any]
    notes: list[str]
    spans: list[Span] = field(default_factory=list)
    breakdown: Breakdown | None = None
    recorded_step: int | None = None

    @property
    def parameters(self) -> int | None:
        return count(self.environment.get("parameters"))

    @property
    def peak_tflops(self) -> float | None:
        """The device's published peak."""
        tflops, mfu = self.metrics.last("model_tflops"), self.metrics.last("mfu")
        return tflops / mfu if tflops and mfu else None


def read_run(folder: Path) -> Run:
    """Read a run's folder. Raises InputError: it is no run's folder."""
    if not any((folder / name).is_file() for name in (METRICS, CONFIG, ENVIRONMENT)):
        problem = "does not exist" if not folder.exists() else "is no run's folder"
        raise InputError(
            f"{folder} {problem}; name a folder that holds {METRICS}, {CONFIG} or {ENVIRONMENT}"
        )
    notes: list[str] = []
    environment = _object(folder / ENVIRONMENT, "machine, versions and parameters", notes)
    config = _object(folder / CONFIG, "the configuration", notes)
    metrics = _metrics(folder / METRICS, notes)
    status = _status(metrics, config, folder)
    run = Run(folder.resolve().name, status, metrics, environment, config, notes)
    _add_timeline(run, folder / TIMELINE)
    if metrics.resumed:
        times = "once" if metrics.resumed == 1 else f"{metrics.resumed} times"
        notes.append(f"The run went back to an earlier step {times}; what it repeated counts once.")
    if metrics.skipped:
        notes.append(f"{metrics.skipped:,} steps were left out.")
    return run


def _metrics(path: Path, notes: list[str]) -> Metrics:
    if not path.is_file():
        notes.append(f"{METRICS} is not there: no step has been written yet.")
        return collect([])
    metrics = collect(read_metrics(path))
    if not metrics.num_steps:
        notes.append(f"{METRICS} holds no finished step.")
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        if file.read(1) not in (b"\n", b""):
            notes.append(f"The last line of {METRICS} is cut short; it is left out.")
    return metrics


def _status(metrics: Metrics, config: Mapping[str, Any], folder: Path) -> str:
    """One sentence on the run's progress."""
    total = count(at(config, "training", "steps"))
    last = metrics.last("step")
    of = f" of {total:,}" if total else ""
    done = f"{last:,.0f}{of} steps" if last else f"no step{of} done"
    if metrics.failed is not None:
        return f"Failed after {done}: {metrics.failed}"
    early, state, whole = early_end(folder), model_state(folder), model_steps(folder)
    longer = bool(total and last and last < total) and (early is None or whole != last)
    if (folder / MODEL).is_dir() and not longer:
        why = f", stopped early: {early}" if early else ""
        best = f" The model is that of step {state:,}, the best." if state != whole else ""
        return f"Finished: {done}{why}.{best}"
    return f"Still going, or ended before its model was written: {done}."


def _add_timeline(run: Run, path: Path) -> None:
    if not path.is_file():
        run.notes.append(f"{path.name} is not there: no step has been recorded.")
        return
    try:
        trace = parse_json(path.read_bytes())
        run.spans = read_trace(trace)
    except ValueError as error:
        run.notes.append(f"{path.name} cannot be read: {error}")
        return
    if not run.spans:
        run.notes.append(f"{path.name} holds no work.")
        return
    run.breakdown = breakdown(run.spans, "compute")
    run.recorded_step = count(at(trace, "otherData", "step"))


def _object(path: Path, what: str, notes: list[str]) -> Mapping[str, Any]:
    """The object in a JSON or YAML file; empty, with a note, if there is none."""
    if not path.exists():
        notes.append(f"{path.name} is not there: {what} are unknown.")
        return {}
    try:
        return read_yaml(path)
    except InputError:
        notes.append(f"{path.name} is damaged: {what} are unknown.")
        return {}


def at(tree: Any, *keys: str) -> Any:
    """The value at a path of keys in nested mappings; None if there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def real(value: Any) -> float | None:
    """The value if it is a positive number, else None."""
    return float(value) if type(value) in (int, float) and 0 < value < 1e30 else None


def count(value: Any) -> int | None:
    """The value if it is a positive whole number, else None."""
    return value if type(value) is int and 0 < value < 1e18 else None
