"""A run as one self-contained HTML page: figures, charts, the parts of a step's time, files.

The page names files of the run's folder that are missing or damaged.
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

from megatrain.base.json_yaml import parse_json, read_json, read_yaml
from megatrain.base.units import GIB, duration, gib
from megatrain.base.whole_files import write_file
from megatrain.device.base import COMPUTE
from megatrain.errors import InputError, in_one_line
from megatrain.run_folder import layout
from megatrain.run_folder.layout import CONFIG, ENVIRONMENT, METRICS, SAMPLES, TIMELINE
from megatrain.telemetry.metrics import is_evaluation, read_metrics
from megatrain.telemetry.pictures import Chart, Line, Values, draw_charts, draw_step
from megatrain.telemetry.timeline import Span, breakdown, read_trace

SHOWN_WORK = 24  # rows of the table of work

LOSS = "Loss"

# Title, column, and the quantity whose evaluations are drawn in the same chart.
_CHARTS = (
    ("Mean reward", "reward", "reward"),
    (LOSS, "loss", "loss"),
    ("Loss of routers, not weighed", "aux_loss", ""),
    ("Z-loss of routers, not weighed", "router_z_loss", ""),
    ("Largest load of an expert, in even shares", "expert_load_max", ""),
    ("Starved experts, of all", "experts_starved", ""),
    ("Margin of rewards", "rewards/margins", "rewards/margins"),
    ("Accuracy", "rewards/accuracies", "accuracy|rewards/accuracies"),
    ("Gradient norm", "grad_norm", ""),
    ("Learning rate", "lr", ""),
    ("Throughput, tokens/s", "tokens_per_second", ""),
    ("Model TFLOPS", "model_tflops", ""),
    ("Host memory, GiB", "host_bytes", ""),
    ("Device memory, GiB", "device_peak_bytes", ""),
)
COLUMNS = ("step", "tokens", "seconds", "mfu", *(column for _, column, _ in _CHARTS))


@dataclass
class Metrics:
    """The lines of `metrics.jsonl`."""

    # the values of each of COLUMNS over the finished steps; NaN: no value
    columns: dict[str, Values]
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)
    failed: str | None = None  # the error that ended the run, if the last line has one

    @property
    def num_steps(self) -> int:
        return len(self.columns["step"])

    def finite(self, name: str) -> Values:
        values = self.columns[name]
        return values[np.isfinite(values)]

    def reduced(self, name: str, reduce: Callable[[Values], Any]) -> float | None:
        """The result of `reduce` for a column's finite values; None: the column has none."""
        values = self.finite(name)
        return float(reduce(values)) if len(values) else None

    def last(self, name: str) -> float | None:
        return self.reduced(name, lambda values: values[-1])

    def median(self, name: str) -> float | None:
        """The median of steps; of ten or more, the first five are left out, as they compile."""
        return self.reduced(name, lambda steps: np.median(steps[5 if len(steps) >= 10 else 0 :]))

    def evaluated(self, quantity: str) -> list[Line]:
        """A quantity's evaluations over the steps: of all sets together, then of each set."""
        points: dict[str, list[tuple[float, float]]] = {}  # step and value, by set
        for record in self.evaluations:
            if "eval_loss" not in record and quantity != "reward":
                continue
            for name, value in record.items():
                match = re.fullmatch(f"eval_(?:(.+)_)?(?:{quantity})", name)
                if match and math.isfinite(number(value)):
                    points.setdefault(match[1] or "", []).append((record["step"], number(value)))
        lines = []
        for set_name, points_of_set in sorted(points.items()):
            steps, values = np.array(points_of_set).T
            label = f"evaluation, {set_name}" if set_name else "evaluation"
            lines.append(Line(label, steps, values, mark=True))
        return lines


def collect(records: Iterable[Mapping[str, Any]]) -> Metrics:
    """The lines of a metrics file; a repeated step's line replaces the earlier one."""
    steps: dict[float, array[float]] = {}
    evaluated: dict[float, Mapping[str, Any]] = {}
    failed = None
    for record in records:
        step = number(record.get("step"))
        if not math.isfinite(step):
            continue
        failed = str(record["failed"]) if "failed" in record else None
        if is_evaluation(record):
            evaluated[step] = record
        elif failed is None and "skipped" not in record:
            steps[step] = array("d", (number(record.get(name)) for name in COLUMNS))
    table = np.array([*steps.values()]).reshape(len(steps), len(COLUMNS))
    return Metrics(dict(zip(COLUMNS, table.T, strict=True)), [*evaluated.values()], failed)


def number(value: Any) -> float:
    """A value of a JSON file as a float; NaN: it is no number."""
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan


def read_run(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The contents of a run's files by name, and sentences on missing or damaged files."""
    if not any((folder / name).is_file() for name in (METRICS, CONFIG, ENVIRONMENT)):
        problem = "does not exist" if not folder.exists() else "is no run's folder"
        raise InputError(
            f"{folder} {problem}; name a folder that holds {METRICS}, {CONFIG} or {ENVIRONMENT}"
        )
    contents, notes = dict[str, Any](), []
    for name, read, fallback in (
        (ENVIRONMENT, read_yaml, {}),
        (CONFIG, read_yaml, {}),
        (METRICS, lambda path: collect(read_metrics(path)), collect([])),
        (TIMELINE, _read_timeline, ([], None)),
        (SAMPLES, _read_samples, ()),
    ):
        try:
            contents[name] = read(folder / name)
        except (InputError, OSError, ValueError, KeyError, TypeError) as error:
            contents[name] = fallback
            notes.append(f"{name} is missing or damaged: {in_one_line(error, 200)}")
    if not contents[METRICS].num_steps:
        notes.append(f"{METRICS} holds no finished step.")
    return contents, notes


def _read_timeline(path: Path) -> tuple[list[Span], int | None]:
    """The spans of the recorded step, and its number."""
    trace = parse_json(path.read_bytes())
    return read_trace(trace), whole(value_at(trace, "otherData", "step"))


_THUMBNAIL = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]{1,100000}")


def _read_samples(path: Path) -> list[dict[str, Any]]:
    """The first documents with images, checked; a run on text has none."""
    listed = read_json(path)["samples"] if path.exists() else []
    return [
        {
            "place": str(sample["place"])[:1000],
            "images": [url for url in sample["images"][:4] if _THUMBNAIL.fullmatch(url)],
            "runs": [(str(text)[:1000], learnt is True) for text, learnt in sample["runs"][:1000]],
        }
        for sample in listed[:3]
    ]


def _status(metrics: Metrics, config: Mapping[str, Any], folder: Path) -> str:
    """One sentence on the run's progress."""
    total = whole(value_at(config, "training", "steps"))
    last = metrics.last("step")
    of_total = f" of {total:,}" if total else ""
    done = f"{last:,.0f}{of_total} steps" if last else f"no step{of_total} done"
    if metrics.failed is not None:
        return f"Failed after {done}: {metrics.failed}"
    end = layout.ending(folder)
    stopped_early = end.early is not None and end.done == last
    has_steps_left = bool(total and last and last < total) and not stopped_early
    if (folder / layout.MODEL).is_dir() and not has_steps_left:
        reason = f", stopped early: {end.early}" if end.early else ""
        is_best = end.state != end.done  # the model is not of the last step
        best = f" The model is that of step {end.state:,}, the best." if is_best else ""
        return f"Finished: {done}{reason}.{best}"
    return f"Still going, or ended before its model was written: {done}."


def value_at(tree: Any, *keys: str) -> Any:
    """The value at a path of keys in nested mappings; None: there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def whole(value: Any) -> int | None:
    """The value, if it is a positive whole number; else None."""
    return value if type(value) is int and 0 < value < 1e18 else None


def figures(metrics: Metrics, environment: Mapping[str, Any]) -> dict[str, str]:
    """The main numbers of a run by their titles."""
    evaluated = [float(line.y[-1]) for line in metrics.evaluated("loss")[:1]]
    sizes = {
        "Device memory, at peak": metrics.reduced("device_peak_bytes", np.max),
        "Host memory, at peak": metrics.reduced("host_bytes", np.max),
        "Disk": whole(environment.get("disk_bytes")),
    }
    numbers = {
        "Loss": metrics.last("loss"),
        "Loss of the evaluation": evaluated[0] if evaluated else None,
        "Parameters": whole(environment.get("parameters")),
        "Steps": metrics.num_steps,
        "Tokens": metrics.finite("tokens").sum(),
        "Tokens a second, median": metrics.median("tokens_per_second"),
        "Model TFLOPS, median": metrics.median("model_tflops"),
        "MFU, median": metrics.median("mfu"),
    }
    seconds = metrics.finite("seconds").sum()
    texts = {title: _as_text(value) for title, value in numbers.items() if value}
    texts |= {"Time in steps": duration(seconds)} if seconds else {}
    return texts | {title: gib(num_bytes) for title, num_bytes in sizes.items() if num_bytes}


def _as_text(value: float) -> str:
    """A number in four digits, or with thousands separators: `12,345`, `0.0123`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def charts(metrics: Metrics) -> list[Chart]:
    """The charts for which a run has measurements."""
    steps, drawn = metrics.columns["step"], []
    for title, column, quantity in _CHARTS:
        values = metrics.columns[column] / (GIB if column.endswith("_bytes") else 1)
        finite = np.isfinite(values)
        lines = metrics.evaluated(quantity) if quantity else []
        if values[finite].any():
            lines = [Line("training", steps[finite], values[finite]), *lines]
        if lines:
            drawn.append(Chart(title, lines))
    return drawn


def picture(draw: Callable[..., None], content: Sequence[Any]) -> str | None:
    """A PNG that `draw` makes of `content`, as a data URL; None: there is no content."""
    if not content:
        return None
    file = io.BytesIO()
    draw(content, file)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


_TEMPLATES = FileSystemLoader(Path(__file__).parent / "templates")


def write_report(folder: Path, output: Path | None = None, *, pictures: bool = False) -> Path:
    """Write the page of a run, and return its path.

    Args:
        output: the file to write; `report.html` in the run's folder by default.
        pictures: also draw the loss and a recorded step as files in the run's folder.

    Raises InputError: `folder` is no run's folder, or `output` does not end in .html.
    """
    contents, notes = read_run(folder)
    metrics, config, environment = (contents[name] for name in (METRICS, CONFIG, ENVIRONMENT))
    spans, recorded_step = contents[TIMELINE]
    output = output or folder / "report.html"
    if output.suffix.lower() not in (".html", ".htm"):  # it may be a file of data
        raise InputError(f"{output}: the page would replace it; name one that ends in .html")
    template = Environment(loader=_TEMPLATES, autoescape=True).get_template("run.html")
    files = {"Machine, versions and placement": environment, "Configuration": config}
    parts, curves = breakdown(spans, COMPUTE), charts(metrics)
    rows = parts.rows()[:SHOWN_WORK]
    page = template.render(
        name=folder.resolve().name,
        status=_status(metrics, config, folder),
        notes=notes,
        figures=figures(metrics, environment),
        charts=picture(draw_charts, curves),
        timeline=picture(draw_step, spans),
        recorded_step=recorded_step or "",
        files={
            title: yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)
            for title, content in files.items()
            if content
        },
        work=[(name, f"{s:.4f}", f"{s / parts.seconds:.1%}") for name, s in rows if parts.seconds],
        samples=contents[SAMPLES],
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, page.encode("utf-8", "replace").decode())  # file names may not be UTF-8
    if pictures:
        draw_charts([c for c in curves if c.title == LOSS], folder / "loss.png", columns=1)
    if pictures and spans:
        draw_step(spans, folder / "timeline.png", "One step")
    return output
