"""What a report is made from: a run's folder, or a result of `megatrain bench step`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from megatrain.base.json_yaml import parse_json, read_yaml
from megatrain.errors import InputError
from megatrain.placement import Precision
from megatrain.report.series import Metrics, collect
from megatrain.run_folder.finished import early_end, model_state, model_steps
from megatrain.run_folder.layout import CONFIG, ENVIRONMENT, METRICS, MODEL, TIMELINE
from megatrain.telemetry.metrics import read_metrics
from megatrain.telemetry.timeline import Breakdown, Span, breakdown, read_trace


@dataclass
class Source:
    """Everything known of a run; what is not there is said in `missing`.

    Attributes:
        name: for the title.
        status: one sentence on how far it came.
        environment: machine and versions (telemetry/environment.py).
        config: the run file, or the measured case.
        spans: the recorded step.
        breakdown: where its time went.
    """

    name: str
    status: str
    metrics: Metrics
    environment: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)
    parameters: int | None = None
    precision: Precision = "bf16"
    peak_tflops: float | None = None
    host_peak_bytes: float | None = None
    device_peak_bytes: float | None = None
    disk_bytes: float | None = None
    recorded_step: int | None = None
    spans: list[Span] = field(default_factory=list)
    breakdown: Breakdown | None = None
    missing: list[str] = field(default_factory=list)


def read_source(path: Path, timeline: Path | None) -> Source:
    """Read a run's folder or a result file; `timeline`: a trace other than the run's own.

    Raises:
        InputError: `path` is neither.
    """
    if path.is_dir():
        return _read_run(path, timeline)
    if path.is_file():
        return _read_bench(path, timeline)
    raise InputError(f"{path} does not exist; give a run's folder, or a result of bench step")


def _read_run(folder: Path, timeline: Path | None) -> Source:
    if not any((folder / name).is_file() for name in (METRICS, CONFIG, ENVIRONMENT)):
        raise InputError(
            f"{folder} is no run's folder: it has none of {METRICS}, {CONFIG}, {ENVIRONMENT}"
        )
    missing: list[str] = []
    environment = _object(folder / ENVIRONMENT, "machine, versions and parameters", missing)
    config = _object(folder / CONFIG, "the configuration", missing)
    metrics = _metrics(folder / METRICS, missing)
    source = Source(
        name=folder.resolve().name,
        status=_status(metrics, config, folder),
        metrics=metrics,
        environment=environment,
        config=config,
        placement=mapping(environment.get("placement")),
        parameters=_count(environment.get("parameters")),
        precision=_precision(at(config, "engine", "precision")),
        host_peak_bytes=metrics.largest("host_bytes"),
        device_peak_bytes=metrics.largest("device_peak_bytes"),
        disk_bytes=real(environment.get("disk_bytes")),
        missing=missing,
    )
    rates, mfu = metrics.last("model_tflops"), metrics.last("mfu")
    source.peak_tflops = rates / mfu if rates and mfu else None
    _add_timeline(source, timeline or folder / TIMELINE)
    return source


def _metrics(path: Path, missing: list[str]) -> Metrics:
    if not path.is_file():
        missing.append(f"{METRICS} is not there: no step has been written yet.")
        return collect([])
    metrics = collect(read_metrics(path))
    if not metrics.num_steps:
        missing.append(f"{METRICS} holds no finished step.")
    if _is_cut(path):
        missing.append(f"The last line of {METRICS} is cut short; it is left out.")
    return metrics


def _is_cut(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if not size:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"


def _status(metrics: Metrics, config: Mapping[str, Any], folder: Path) -> str:
    total = _count(at(config, "training", "steps"))
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


def _read_bench(path: Path, timeline: Path | None) -> Source:
    try:
        result = parse_json(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is no result of `megatrain bench step`: {error}") from error
    if not isinstance(result, dict) or result.get("benchmark") != "step":
        raise InputError(f"{path} is no result of `megatrain bench step`, and no run's folder")
    case, memory = mapping(result.get("case")), mapping(result.get("memory"))
    metrics = collect(_bench_records(result))
    source = Source(
        name=path.stem,
        status=f"Measurement: {metrics.num_steps} steps on random tokens.",
        metrics=metrics,
        environment={
            **mapping(result.get("environment")),
            "commit": result.get("commit"),
        },
        config=case,
        placement=mapping(result.get("placement")),
        parameters=_count(result.get("parameters")),
        precision=_precision(case.get("precision")),
        peak_tflops=real(result.get("bf16_peak_tflops")),
        host_peak_bytes=real(result.get("host_peak_bytes")),
        device_peak_bytes=real(memory.get("device_peak_bytes")),
        disk_bytes=real(memory.get("disk_bytes")),
    )
    if timeline is not None:
        _add_timeline(source, timeline)
        return source
    source.breakdown = _stored_breakdown(result)
    source.missing.append("No timeline was given (--timeline): the lanes are left out.")
    return source


def _bench_records(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    seconds, losses = result.get("step_seconds"), result.get("losses")
    if not isinstance(seconds, list) or not isinstance(losses, list):
        return []
    tokens, rate = real(result.get("tokens_per_step")), real(result.get("model_tflops"))
    median = real(result.get("median_seconds"))
    records: list[dict[str, Any]] = []
    for step, (duration, loss) in enumerate(zip(seconds, losses, strict=False), 1):
        record = {"step": step, "loss": loss, "seconds": duration, "tokens": tokens}
        if tokens and real(duration):
            record["tokens_per_second"] = tokens / duration
            record["model_tflops"] = rate * median / duration if rate and median else None
        records.append(record)
    return records


def _stored_breakdown(result: Mapping[str, Any]) -> Breakdown | None:
    stored = mapping(result.get("breakdown"))
    seconds = real(stored.get("seconds"))
    if not seconds:
        return None
    work = {}
    for name, value in _times(stored.get("work")).items():
        stream, _, kind = name.partition(": ")
        work[stream, kind] = value
    return Breakdown(
        seconds,
        _times(stored.get("busy")),
        {name: int(value) for name, value in _times(stored.get("num_bytes")).items()},
        work,
        _times(stored.get("idle")),
    )


def _add_timeline(source: Source, path: Path) -> None:
    if not path.is_file():
        source.missing.append(f"{path.name} is not there: no step has been recorded.")
        return
    try:
        trace = parse_json(path.read_bytes())
        source.spans = read_trace(trace)
    except ValueError as error:
        source.missing.append(f"{path.name} cannot be read: {error}")
        return
    if not source.spans:
        source.missing.append(f"{path.name} holds no work.")
        return
    source.breakdown = breakdown(source.spans, "compute")
    source.recorded_step = _count(at(trace, "otherData", "step"))


def _object(path: Path, what: str, missing: list[str]) -> Mapping[str, Any]:
    """A JSON or YAML file that holds one object; empty, and noted, when it does not."""
    if not path.exists():
        missing.append(f"{path.name} is not there: {what} are unknown.")
        return {}
    try:
        return read_yaml(path)
    except InputError:
        missing.append(f"{path.name} is damaged: {what} are unknown.")
        return {}


def mapping(value: Any) -> Mapping[str, Any]:
    """A value that is a mapping; empty where it is something else."""
    return value if isinstance(value, dict) else {}


def at(tree: Any, *keys: str) -> Any:
    """A value inside of mappings; None where there is none."""
    for key in keys:
        tree = mapping(tree).get(key)
    return tree


def real(value: Any) -> float | None:
    """A value that is a positive number; None where it is something else."""
    return float(value) if type(value) in (int, float) and 0 < value < 1e30 else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < 1e18 else None


def _times(value: Any) -> dict[str, float]:
    return {str(k): float(v) for k, v in mapping(value).items() if real(v) is not None}


def _precision(value: Any) -> Precision:
    return value if value in get_args(Precision) else "bf16"
