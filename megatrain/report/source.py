"""Reads the files of a run's folder that exist and are whole."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.base.json_yaml import parse_json, read_yaml
from megatrain.errors import InputError
from megatrain.report.series import Metrics, collect
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
from megatrain.telemetry.metrics import read_metrics
from megatrain.telemetry.timeline import Breakdown, Span, breakdown, read_trace


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
    """Read a run's folder.

    Raises:
        InputError: it is no run's folder.
    """
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
