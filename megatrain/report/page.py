"""A run as one self-contained HTML page: figures, charts, where the time went, files.

Files of the run's folder that are missing or damaged are named on it.
"""

import base64
import io
import math
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, FileSystemLoader

from megatrain.base.json_yaml import parse_json, read_yaml
from megatrain.base.units import GIB, duration, gib
from megatrain.base.whole_files import write_file
from megatrain.device.base import COMPUTE, DISK_OUT
from megatrain.errors import InputError, first_line
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
from megatrain.telemetry.pictures import Chart, Line, Values, draw_charts, draw_step
from megatrain.telemetry.timeline import Breakdown, Span, breakdown, read_trace

SHOWN_WORK = 24  # rows of the table of work
LARGE_MODEL = 100_000_000  # parameters; smaller models take less memory than the libraries

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
    contents: dict[str, Any] = {}
    notes = []
    for name, read in (
        (ENVIRONMENT, read_yaml),
        (CONFIG, read_yaml),
        (METRICS, lambda path: collect(read_metrics(path))),
        (TIMELINE, _read_timeline),
    ):
        try:
            contents[name] = read(folder / name)
        except (InputError, OSError, ValueError) as error:
            notes.append(f"{name} is missing or damaged: {first_line(error)}")
    metrics, config = contents.get(METRICS) or collect([]), contents.get(CONFIG, {})
    spans, step = contents.get(TIMELINE, ([], None))
    if not metrics.num_steps:
        notes.append(f"{METRICS} holds no finished step.")
    if metrics.resumed:
        notes.append(
            f"The run went back to an earlier step, {metrics.resumed} times in all; what it "
            "repeated counts once."
        )
    if metrics.skipped:
        notes.append(f"{metrics.skipped:,} steps were left out.")
    return Run(
        name=folder.resolve().name,
        status=_status(metrics, config, folder),
        metrics=metrics,
        environment=contents.get(ENVIRONMENT, {}),
        config=config,
        notes=notes,
        spans=spans,
        breakdown=breakdown(spans, COMPUTE) if spans else None,
        recorded_step=step,
    )


def _read_timeline(path: Path) -> tuple[list[Span], int | None]:
    """The recorded step's spans, and its number."""
    trace = parse_json(path.read_bytes())
    return read_trace(trace), count(at(trace, "otherData", "step"))


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


def figures(run: Run) -> list[tuple[str, str, str]]:
    """The main numbers of a run: title, value and note of each."""
    metrics = run.metrics
    tokens, seconds = metrics.finite("tokens").sum(), metrics.finite("seconds").sum()
    tflops, peak = metrics.median("model_tflops"), run.peak_tflops
    host, device = metrics.largest("host_bytes"), metrics.largest("device_peak_bytes")
    disk = real(run.environment.get("disk_bytes"))
    parameters = count(run.environment.get("parameters")) or 0
    values = [
        ("Loss", _shown(metrics.last("loss")), _trend(metrics)),
        ("Parameters", f"{parameters:,}" if parameters else None, ""),
        ("Tokens", _shown(tokens or None), f"{metrics.num_steps:,} steps"),
        ("Time", duration(seconds) if seconds else None, "in steps"),
        ("Throughput", _shown(metrics.median("tokens_per_second")), "tokens/s, median"),
        (
            "Model TFLOPS",
            _shown(tflops),
            f"median; MFU {tflops / peak:.1%} of {peak:,.0f}"
            if tflops and peak
            else "median; a token: 4 x the parameters it computes with, and 2 x trained ones",
        ),
        ("Device memory", gib(device) if device else None, "at peak"),
        (
            "Host memory",
            gib(host) if host else None,
            f"at peak, {host / parameters:.2f} bytes a parameter"
            if host and parameters >= LARGE_MODEL
            else "at peak",
        ),
        ("Disk", gib(disk) if disk else None, _written(run, disk or 0)),
    ]
    return [(title, value, note) for title, value, note in values if value is not None]


def _shown(value: float | None) -> str | None:
    """A number in four digits, or with thousands separators: `12,345`, `0.0123`."""
    if value is None:
        return None
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _written(run: Run, disk_bytes: float) -> str:
    seconds = run.metrics.median("seconds")
    if not seconds:
        return "read and written each step"
    written = run.breakdown.num_bytes.get(DISK_OUT) if run.breakdown else None
    terabytes_a_day = (written or disk_bytes) / 1e12 * 86400 / seconds
    return f"each step; {terabytes_a_day:,.1f} TB written a day"


def _trend(metrics: Metrics) -> str:
    losses = metrics.finite("loss")
    parts = [f"from {_shown(losses[0])}"] if len(losses) else []
    for line in metrics.evaluated("loss")[:1]:
        parts.append(f"evaluation {_shown(line.y[-1])}")
    for line in metrics.evaluated("accuracy|rewards/accuracies")[:1]:
        of = "pairs preferred" if _is_of_replies(metrics) else "tokens right"
        parts[-1:] = [f"{parts[-1]}, {line.y[-1]:.1%} of {of}"]
    return "; ".join(parts)


def _is_of_replies(metrics: Metrics) -> bool:
    return metrics.last("rewards/margins") is not None


def charts(run: Run) -> list[Chart]:
    """The charts of training, throughput and memory that have measurements."""
    metrics, columns = run.metrics, run.metrics.columns
    if not metrics.num_steps:
        return []
    steps, passed = columns["step"], np.nancumsum(columns["seconds"])
    unit, size = next(
        (name, size)
        for name, size, least in (("hours", 3600, 7200), ("minutes", 60, 120), ("seconds", 1, -1))
        if passed[-1] > least
    )
    of_replies = _is_of_replies(metrics)
    memory = at(run.environment, "gpu", "memory_bytes")
    host = run.environment.get("host_limit_bytes")

    def in_gib(num_bytes: Any) -> float | None:
        return num_bytes / GIB if real(num_bytes) else None

    def training(x: Values, name: str) -> list[Line]:
        y = columns[name] / (GIB if name.endswith("_bytes") else 1)
        finite = np.isfinite(y)
        return [Line("training", x[finite], y[finite])] if finite.any() else []

    def over_steps(title: str, name: str, quantity: str = "", *, from_zero: bool = True) -> Chart:
        evaluated = metrics.evaluated(quantity) if quantity else []
        return Chart(title, [*training(steps, name), *evaluated], "step", from_zero)

    def over_time(title: str, name: str, limit: float | None = None) -> Chart:
        return Chart(title, training(passed / size, name), unit, True, limit)

    of, nats = ("pairs", "") if of_replies else ("tokens", ", nats per token")
    listed = [
        over_steps("Mean reward", "reward", "reward"),
        over_steps(f"Loss{nats}", "loss", "loss", from_zero=False),
        *(
            [over_steps("Loss of routers, not weighed", "aux_loss")]
            * bool(metrics.largest("aux_loss"))
        ),
        over_steps("Margin of rewards", "rewards/margins", "rewards/margins"),
        over_steps(f"Accuracy, of {of}", "rewards/accuracies", "accuracy|rewards/accuracies"),
        over_steps("Gradient norm", "grad_norm"),
        over_steps("Learning rate", "lr"),
        over_time("Throughput, tokens/s", "tokens_per_second"),
        over_time("Model TFLOPS", "model_tflops", run.peak_tflops),
        over_time("Host memory, GiB", "host_bytes", in_gib(host)),
    ]
    if metrics.largest("device_peak_bytes"):
        listed.append(over_time("Device memory, GiB", "device_peak_bytes", in_gib(memory)))
    return [chart for chart in listed if chart.lines]


def summary(chart: Chart) -> str:
    """A description of a chart's lines in words."""
    parts = [
        f"{label + ': ' if len(chart.lines) > 1 else ''}last {_shown(y[-1])}, "
        f"from {_shown(y.min())} to {_shown(y.max())}"
        for label, _, y, _ in chart.lines
    ]
    return f"{chart.title}: {'; '.join(parts)}"


def picture(draw: Callable[..., None], content: Sequence[Any]) -> str | None:
    """A picture as a data URL; None: there is nothing to draw."""
    if not content:
        return None
    file = io.BytesIO()
    draw(content, file)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def breakdown_tables(parts: Breakdown | None) -> dict[str, Sequence[tuple[str, ...]]]:
    """Rows of tables on the recorded step: idle times and kinds of work, and the streams."""
    if parts is None or not parts.seconds:
        return {}
    work = [(name, _seconds(s), f"{s / parts.seconds:.1%}") for name, s in parts.rows()]
    streams = []
    for name, busy in sorted(parts.busy.items(), key=lambda stream: -stream[1]):
        moved = 0 if name == COMPUTE else parts.num_bytes.get(name, 0)
        rate = f"{moved / busy / 1e9:,.1f} GB/s" if moved else ""
        amount = f"{moved / 1e9:,.2f} GB" if moved else ""
        streams.append((name, _seconds(busy), f"{busy / parts.seconds:.1%}", amount, rate))
    return {"work": work[:SHOWN_WORK], "streams": streams}


def _seconds(value: float) -> str:
    """Seconds with a fitting unit: `8.58 s`, `12.3 ms`, `45 µs`."""
    if value >= 0.9995:
        return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


_TEMPLATES = FileSystemLoader(Path(__file__).parent / "templates")


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a run.

    Args: `output`: the file to write; `report.html` in the run's folder by default.

    Returns the page's path.

    Raises InputError: `folder` is no run's folder, or `output` is another kind of file. The page
    itself says which files the run lacks.
    """
    run = read_run(folder)
    drawn = charts(run)
    output = output or folder / "report.html"
    if output.suffix.lower() not in (".html", ".htm"):  # it may be a file of data
        raise InputError(f"{output}: the page would replace it; name one that ends in .html")
    template = Environment(loader=_TEMPLATES, autoescape=True).get_template("run.html")
    files = {
        "Machine, versions and placement": run.environment,
        "Configuration": run.config,
    }
    page = template.render(
        name=run.name,
        status=run.status,
        notes=run.notes,
        figures=figures(run),
        charts=picture(draw_charts, drawn),
        summaries=[summary(chart) for chart in drawn],
        timeline=picture(draw_step, run.spans),
        recorded_step=run.recorded_step or "",
        files={
            title: yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)
            for title, content in files.items()
            if content
        },
        **breakdown_tables(run.breakdown),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, page)
    return output
