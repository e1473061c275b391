"""The parts of a report in the order of the page: figures, charts, where the time went, facts."""

import base64
import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import yaml

from megatrain.base.units import GIB, duration, gib
from megatrain.device.base import COMPUTE, DISK_OUT
from megatrain.plan.tiles import terabytes_a_day
from megatrain.report.series import Line, Metrics, Values, thinned
from megatrain.report.source import Run, at, real
from megatrain.telemetry.pictures import draw_step
from megatrain.telemetry.timeline import Breakdown

SHOWN_WORK = 16  # rows of a table of work
LARGE_MODEL = 100_000_000  # parameters; in smaller ones the libraries outweigh them
WIDTH, HEIGHT = 640, 200  # of a chart's drawing
COLOURS = ("#00697a", "#b23a4b", "#5d8233", "#b06f00", "#6a4fa3", "#30638e")
LEAST_SHARE = 0.002  # of the step; what is shorter is summed up as "other"


class Curve(NamedTuple):
    """One line of a chart, in the units of its drawing; `dots` are points that are marked."""

    label: str
    colour: str
    points: list[tuple[str, str]]
    dots: list[tuple[str, str]]


class Chart(NamedTuple):
    """Lines over one axis.

    Attributes:
        summary: what the lines say in words; empty where there is no value to show.
        levels: height in the drawing and value of each horizontal line.
        places: first and last value of the axis.
    """

    title: str
    unit: str
    summary: str
    curves: list[Curve]
    levels: list[tuple[str, str | None]]
    places: tuple[str, str]


def figures(run: Run) -> list[tuple[str, str, str]]:
    """The numbers that are asked for first: title, value and note of each."""
    metrics = run.metrics
    tokens, seconds = metrics.finite("tokens").sum(), metrics.finite("seconds").sum()
    tflops, peak = metrics.median("model_tflops"), run.peak_tflops
    host, device = metrics.largest("host_bytes"), metrics.largest("device_peak_bytes")
    disk = real(run.environment.get("disk_bytes"))
    parameters = run.parameters or 0
    values = [
        ("Loss", _shown(metrics.last("loss")), _trend(metrics)),
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
    """Four digits, with a thousands separator where that is readable: `12,345`, `0.0123`."""
    if value is None:
        return None
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _written(run: Run, disk_bytes: float) -> str:
    seconds = run.metrics.median("seconds")
    if not seconds:
        return "read and written each step"
    written = run.breakdown.num_bytes.get(DISK_OUT) if run.breakdown else None
    return f"each step; {terabytes_a_day(written or disk_bytes, seconds):,.1f} TB written a day"


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
    """Training, throughput and memory, those of them that were measured."""
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

    def over_steps(title: str, name: str, quantity: str = "", unit: str = "", **more: Any) -> Chart:
        lines = [Line("training", steps, columns[name])]
        lines += metrics.evaluated(quantity) if quantity else []
        return _chart(title, unit, lines, "step", **more)

    def over_time(title: str, unit_of: str, name: str, **more: Any) -> Chart:
        scale = GIB if name.endswith("_bytes") else 1
        line = Line("training", passed / size, columns[name] / scale)
        return _chart(title, unit_of, [line], unit, from_zero=True, **more)

    routers = over_steps("Loss of routers, not weighed", "aux_loss", from_zero=True)
    device = over_time("Device memory", "GiB", "device_peak_bytes", limit=in_gib(memory))
    drawn = [
        over_steps("Mean reward", "reward", "reward", from_zero=True),
        over_steps("Loss", "loss", "loss", "" if of_replies else "nats per token"),
        *([routers] if metrics.largest("aux_loss") else []),
        over_steps("Margin of rewards", "rewards/margins", "rewards/margins", from_zero=True),
        over_steps(
            "Accuracy",
            "rewards/accuracies",
            "accuracy|rewards/accuracies",
            "of pairs" if of_replies else "of tokens",
            from_zero=True,
        ),
        over_steps("Gradient norm", "grad_norm", from_zero=True),
        over_steps("Learning rate", "lr", from_zero=True),
        over_time("Throughput", "tokens/s", "tokens_per_second"),
        over_time("Compute", "model TFLOPS", "model_tflops", limit=run.peak_tflops),
        over_time("Host memory", "GiB", "host_bytes", limit=in_gib(host)),
        *([device] if metrics.largest("device_peak_bytes") else []),
    ]
    return [chart for chart in drawn if chart.summary]


def _chart(
    title: str,
    unit: str,
    lines: list[Line],
    axis: str,
    *,
    from_zero: bool = False,
    limit: float | None = None,
) -> Chart:
    """Scale lines to the drawing.

    Args:
        from_zero: begin the axis of values at zero.
        limit: a value that cannot be passed, which gets a line of its own.
    """
    shown = [(line, *thinned(line.x, line.y)) for line in lines if np.isfinite(line.y).any()]
    if not shown:
        return Chart(title, unit, "", [], [], ("", ""))
    left, right = min(x[0] for _, x, _ in shown), max(x[-1] for _, x, _ in shown)
    bottom, top = min(y.min() for *_, y in shown), max(y.max() for *_, y in shown)
    summary = "; ".join(
        f"{line.label + ': ' if len(shown) > 1 else ''}last "
        f"{_shown(line.y[np.isfinite(line.y)][-1])}, from {_shown(y.min())} to {_shown(y.max())}"
        for line, _, y in shown
    )
    if limit and limit < 2.5 * top:
        top, summary = max(top, limit), f"{summary}; at most {_shown(limit)}"
    bottom = min(0.0, bottom) if from_zero else bottom
    top = top if top > bottom else bottom + (abs(bottom) or 1)

    def scaled(x: Values, y: Values) -> list[tuple[str, str]]:
        across = (x - left) / ((right - left) or 1) * (WIDTH - 20) + 10
        up = HEIGHT - 10 - (y - bottom) / (top - bottom) * (HEIGHT - 30)
        return [(f"{a:.1f}", f"{b:.1f}") for a, b in zip(across, up, strict=True)]

    curves = []
    for (line, x, y), colour in zip(shown, cycle(COLOURS), strict=False):
        points = scaled(x, y)
        dots = points if line.mark or len(points) == 1 else []
        curves.append(Curve(line.label, colour, points, dots))
    values = np.array([bottom, (bottom + top) / 2, top])
    heights = [height for _, height in scaled(np.full(3, left), values)]
    levels = list(zip(heights, map(_shown, values), strict=True))
    places = f"{_shown(left)}", f"{_shown(right)} {axis}"
    return Chart(title, unit, f"{summary} {unit}".strip(), curves, levels, places)


def timeline(run: Run) -> str | None:
    """The picture of the recorded step; None: none is there."""
    if not run.spans:
        return None
    file = io.BytesIO()
    draw_step(run.spans, file)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def breakdown_tables(parts: Breakdown | None) -> dict[str, Sequence[tuple[str, ...]]]:
    """Rows on the step: what the device computed and why it did not, the streams, their work."""
    if parts is None or not parts.seconds:
        return {}

    def shares(work: Mapping[Any, float]) -> list[tuple[Any, str, str]]:
        ordered = sorted(work.items(), key=lambda item: -item[1])
        return [(name, _seconds(s), f"{s / parts.seconds:.1%}") for name, s in ordered]

    computed = {kind: s for (stream, kind), s in parts.work.items() if stream == COMPUTE}
    computed |= {f"idle: {why}": s for why, s in parts.idle.items()}
    large = {name: s for name, s in computed.items() if s >= LEAST_SHARE * parts.seconds}
    if (rest := sum(computed.values()) - sum(large.values())) > 0:
        large["other"] = rest
    beside = {key: s for key, s in parts.work.items() if key[0] != COMPUTE}
    streams = []
    for name, busy, share in shares(parts.busy):
        moved = 0 if name == COMPUTE else parts.num_bytes.get(name, 0)
        rate = f"{moved / parts.busy[name] / 1e9:,.1f} GB/s" if moved else ""
        streams.append((name, busy, share, f"{moved / 1e9:,.2f} GB" if moved else "", rate))
    return {
        "computed": shares(large),
        "streams": streams,
        "beside": [(*key, busy, share) for key, busy, share in shares(beside)[:SHOWN_WORK]],
    }


def _seconds(value: float) -> str:
    """Seconds with a fitting unit: `8.58 s`, `12.3 ms`, `45 µs`."""
    if value >= 0.9995:
        return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def facts(run: Run) -> list[tuple[str, Any]]:
    """Model, machine, versions and placement."""
    environment = run.environment
    gpu, packages = environment.get("gpu"), environment.get("packages")
    versions = {"Python": environment.get("python")}
    versions |= packages if isinstance(packages, dict) else {}
    limit, cores = real(environment.get("host_limit_bytes")), environment.get("usable_cores")
    memory, driver = real(at(gpu, "memory_bytes")), at(gpu, "driver")
    parts = (at(gpu, "name"), memory and gib(memory), driver and f"driver {driver}")
    rows = [
        ("model", _model(run.config)),
        ("parameters", f"{run.parameters:,}" if run.parameters else None),
        ("precision", at(run.config, "engine", "precision") or "bf16"),
        ("placement", _placement(environment.get("placement"))),
        ("device", ", ".join(str(part) for part in parts if part) or environment.get("device")),
        ("processor", f"{environment.get('cpu') or ''} ({cores} cores usable)" if cores else None),
        ("host memory", limit and gib(limit)),
        ("system", f"{environment.get('system') or ''} {environment.get('kernel') or ''}".strip()),
        ("commit", environment.get("commit")),
        ("versions", ", ".join(f"{name} {v}" for name, v in versions.items() if v)),
    ]
    return [(title, value) for title, value in rows if value]


def configuration(run: Run) -> str:
    """The run file."""
    config = dict(run.config)
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True) if config else ""


def _model(config: Mapping[str, Any]) -> str | None:
    if path := at(config, "model", "path"):
        return str(path)
    kind = at(config, "model", "config", "model_type")
    return f"{kind}, weights drawn at random" if kind else None


def _placement(placement: Any) -> str:
    choices = placement.items() if isinstance(placement, dict) else ()
    return ", ".join(
        f"{name} {', '.join(map(str, value)) or 'none' if isinstance(value, list) else value}"
        for name, value in choices
        if value is not None
    )
