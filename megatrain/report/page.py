"""A run as one self-contained HTML page: figures, charts, where the time went, files."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, FileSystemLoader

from megatrain.base.units import GIB, duration, gib
from megatrain.base.whole_files import write_file
from megatrain.device.base import COMPUTE, DISK_OUT
from megatrain.errors import InputError
from megatrain.report.source import Metrics, Run, at, read_run, real
from megatrain.telemetry.pictures import Chart, Line, Values, draw_charts, draw_step
from megatrain.telemetry.timeline import Breakdown

SHOWN_WORK = 24  # rows of the table of work
LARGE_MODEL = 100_000_000  # parameters; smaller models take less memory than the libraries


def figures(run: Run) -> list[tuple[str, str, str]]:
    """The main numbers of a run: title, value and note of each."""
    metrics = run.metrics
    tokens, seconds = metrics.finite("tokens").sum(), metrics.finite("seconds").sum()
    tflops, peak = metrics.median("model_tflops"), run.peak_tflops
    host, device = metrics.largest("host_bytes"), metrics.largest("device_peak_bytes")
    disk = real(run.environment.get("disk_bytes"))
    parameters = run.parameters or 0
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

    def over_steps(title: str, name: str, quantity: str = "", *, from_zero: bool = True) -> Chart:
        lines = [_line("training", steps, columns[name])]
        lines += metrics.evaluated(quantity) if quantity else []
        return Chart(title, [line for line in lines if len(line.x)], "step", from_zero)

    def over_time(title: str, name: str, limit: float | None = None) -> Chart:
        scale = GIB if name.endswith("_bytes") else 1
        line = _line("training", passed / size, columns[name] / scale)
        return Chart(title, [line] if len(line.x) else [], unit, True, limit)

    of, nats = ("pairs", "") if of_replies else ("tokens", ", nats per token")
    listed = [
        over_steps("Mean reward", "reward", "reward"),
        over_steps(f"Loss{nats}", "loss", "loss", from_zero=False),
        over_steps("Loss of routers, not weighed", "aux_loss"),
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
    if not metrics.largest("aux_loss"):
        del listed[2]
    return [chart for chart in listed if chart.lines]


def _line(label: str, x: Values, y: Values) -> Line:
    finite = np.isfinite(y)
    return Line(label, x[finite], y[finite])


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


def as_yaml(content: Mapping[str, Any]) -> str:
    """The content of one of the run's files as YAML."""
    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True) if content else ""


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
            "Machine, versions and placement": as_yaml(run.environment),
            "Configuration": as_yaml(run.config),
        },
        **breakdown_tables(run.breakdown),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, page)
    return output
