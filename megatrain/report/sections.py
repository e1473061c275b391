"""The parts of a report in the order of the page: figures, charts, where the time went, facts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml

from megatrain.base.units import GIB, duration, gib
from megatrain.device.base import DISK_OUT
from megatrain.plan.wear import terabytes_a_day
from megatrain.report.charts import Chart, Line, draw
from megatrain.report.markup import compact, seconds, short, table, text
from megatrain.report.source import Source, at, mapping, real
from megatrain.telemetry.pictures import word_of
from megatrain.telemetry.timeline import Breakdown

SHOWN_WORK = 16  # rows of the table of work
LARGE_MODEL = 100_000_000  # parameters; in smaller ones the libraries outweigh them
LEAST_SHARE = 0.002  # of the step; what is shorter is summed up as "other"


def figures(source: Source) -> str:
    """The numbers that are asked for first."""
    metrics = source.metrics
    tflops, host = metrics.median("model_tflops"), source.host_peak_bytes
    tokens = metrics.total("tokens")
    found: list[tuple[str, str | None, str]] = [
        ("Loss", _form(metrics.last("loss")), _trend(source)),
        ("Tokens", compact(tokens) if tokens else None, f"{metrics.num_steps:,} steps"),
        ("Time", _span(metrics.total("seconds")), "in steps"),
        ("Throughput", _form(metrics.median("tokens_per_second")), "tokens/s, median"),
        ("Model TFLOPS", _form(tflops), _utilisation(tflops, source.peak_tflops)),
        ("Device memory", _memory(source.device_peak_bytes), "at peak"),
        ("Host memory", _memory(host), _each(host, source.parameters)),
        ("Disk", _memory(source.disk_bytes), _written(source)),
    ]
    tiles = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd><dd class='note'>{text(note)}</dd></div>"
        for name, value, note in found
        if value is not None
    )
    return f'<dl class="figures">{tiles}</dl>' if tiles else ""


def _form(value: float | None) -> str | None:
    return None if value is None else short(value)


def _span(value: float) -> str | None:
    return duration(value) if value else None


def _memory(value: float | None) -> str | None:
    return gib(value) if value else None


def _written(source: Source) -> str:
    seconds, found = source.metrics.median("seconds"), source.breakdown
    written = found.num_bytes.get(DISK_OUT) if found is not None else None
    if not seconds:
        return "read and written each step"
    a_day = terabytes_a_day(written or source.disk_bytes or 0, seconds)
    return f"each step; {a_day:,.1f} TB written a day"


def _trend(source: Source) -> str:
    values = source.metrics.columns["loss"]
    values = values[np.isfinite(values)]
    start = f"from {short(float(values[0]))}" if len(values) else ""
    evaluated = [loss for _, loss, _ in source.metrics.evaluations if np.isfinite(loss)]
    _, accuracy = (source.metrics.accuracies.get("") or [(0.0, np.nan)])[-1]
    of = "pairs preferred" if _is_of_replies(source) else "tokens right"
    share = f", {accuracy:.1%} of {of}" if np.isfinite(accuracy) else ""
    return f"{start}; evaluation {short(evaluated[-1])}{share}" if evaluated else start


def _is_of_replies(source: Source) -> bool:
    return source.metrics.last("rewards/margins") is not None


def _utilisation(tflops: float | None, peak: float | None) -> str:
    if not tflops or not peak:
        return "median; a token: 4 x the parameters it computes with, and 2 x trained ones"
    return f"median; MFU {tflops / peak:.1%} of {peak:,.0f}"


def _each(host: float | None, parameters: int | None) -> str:
    if not host or not parameters or parameters < LARGE_MODEL:
        return "at peak"
    return f"at peak, {host / parameters:.2f} bytes a parameter"


def charts(source: Source) -> str:
    """Training, throughput and memory, those of them that were measured."""
    columns, environment = source.metrics.columns, source.environment
    steps = columns["step"]
    passed = np.nancumsum(columns["seconds"])
    unit, size = ("hours", 3600.0) if passed.size and passed[-1] > 7200 else (
        ("minutes", 60.0) if passed.size and passed[-1] > 120 else ("seconds", 1.0)
    )  # fmt: skip
    time = passed / size
    evaluations = np.array(source.metrics.evaluations).reshape(-1, 3)
    total, host = at(environment, "gpu", "memory_bytes"), environment.get("host_limit_bytes")
    losses = [
        Line("training", steps, columns["loss"]),
        Line("evaluation", evaluations[:, 0], evaluations[:, 1], mark=True),
        *_of_sets(source.metrics.sets),
    ]
    peak, margins = source.peak_tflops, np.array(source.metrics.margins).reshape(-1, 2)
    of_replies = _is_of_replies(source)

    def over_time(title: str, unit_of: str, name: str, **more: Any) -> Chart:
        scale = GIB if name.endswith("_bytes") else 1.0
        return Chart(title, unit_of, unit, [Line(title, time, columns[name] / scale)], True, **more)

    shown = [
        Chart("Loss", "" if of_replies else "nats per token", "step", losses),
        Chart("Gradient norm", "", "step", [Line("norm", steps, columns["grad_norm"])], True),
        Chart("Learning rate", "", "step", [Line("rate", steps, columns["lr"])], True),
        over_time("Throughput", "tokens/s", "tokens_per_second"),
        over_time("Compute", "model TFLOPS", "model_tflops",
                  roof=("published peak", peak) if peak else None),
        over_time("Host memory", "GiB", "host_bytes", roof=_roof("usable", host)),
    ]  # fmt: skip
    if right := _of_sets(source.metrics.accuracies):
        lines = [Line("training", steps, columns["rewards/accuracies"]), *right]
        of = "of pairs" if of_replies else "of tokens"
        shown.insert(1, Chart("Accuracy", of, "step", lines, True, format=_percent))
    if of_replies:
        lines = [
            Line("training", steps, columns["rewards/margins"]),
            Line("evaluation", margins[:, 0], margins[:, 1], mark=True),
        ]
        shown.insert(1, Chart("Margin of rewards", "", "step", lines, True))
    if np.isfinite(columns["reward"]).any():
        held = np.array(source.metrics.rewards).reshape(-1, 2)
        lines = [
            Line("training", steps, columns["reward"]),
            Line("evaluation", held[:, 0], held[:, 1], mark=True),
        ]
        shown.insert(0, Chart("Mean reward", "", "step", lines, True))
    if source.metrics.largest("aux_loss"):
        lines = [Line("all layers", steps, columns["aux_loss"])]
        shown.insert(1, Chart("Loss of routers, not weighed", "", "step", lines, True))
    if source.metrics.largest("device_peak_bytes"):
        roof = _roof("of the device", total)
        shown.append(over_time("Device memory", "GiB", "device_peak_bytes", roof=roof))
    drawn = "".join(draw(chart) for chart in shown)
    return f'<section><h2>Over the run</h2><div class="charts">{drawn}</div></section>'


def _of_sets(points: Mapping[str, Sequence[tuple[float, float]]]) -> list[Line]:
    """A line of evaluations for each set; that over all has no name."""
    lines = []
    for name, each in points.items():
        x, y = np.array(each).T
        lines.append(Line(f"evaluation, {name}" if name else "evaluation", x, y, mark=True))
    return lines


def _percent(share: float) -> str:
    return f"{share:.0%}"


def samples(source: Source) -> str:
    """What the model made of the run's prompts last."""
    if not source.metrics.samples:
        return ""
    rows = [[text(prompt), text(made)] for prompt, made in source.metrics.samples]
    shown = table(["prompt", "text"], rows, label="Samples of the last evaluation")
    return f"<section><h2>Samples after step {source.metrics.sampled:,.0f}</h2>{shown}</section>"


def _roof(name: str, num_bytes: Any) -> tuple[str, float] | None:
    return (name, num_bytes / GIB) if type(num_bytes) is int and num_bytes > 0 else None


def breakdown(found: Breakdown | None) -> str:
    """The step from the view of the device: what it computed, and why it did not."""
    if found is None or not found.seconds:
        return ""
    parts = [(kind, s, word_of(kind)) for (stream, kind), s in found.work.items()
             if stream == "compute"]  # fmt: skip
    parts += [(f"idle: {why}", s, "idle") for why, s in found.idle.items()]
    parts.sort(key=lambda part: -part[1])
    large = [part for part in parts if part[1] >= LEAST_SHARE * found.seconds]
    rest = sum(s for _, s, _ in parts) - sum(s for _, s, _ in large)
    if rest > 0:
        large.append(("other", rest, "other"))
    bar = "".join(
        f'<i class="k-{word}" style="width:{100 * s / found.seconds:.3f}%" '
        f'title="{text(name)}: {seconds(s)}"></i>'
        for name, s, word in large
    )
    rows = [
        [f'<i class="key k-{word}"></i>{text(name)}', seconds(s), f"{s / found.seconds:.1%}"]
        for name, s, word in large
    ]
    head = ["on the compute stream", "seconds", "of the step"]
    return (
        f'<section><h2>Where the step went</h2><div class="whole" aria-hidden="true">{bar}</div>'
        f"{table(head, rows, label='Where the step went', numbers=2)}{_others(found)}</section>"
    )


def _others(found: Breakdown) -> str:
    """The streams, of which the busiest binds, and the work that is hidden under `compute`."""
    streams = sorted(found.busy.items(), key=lambda stream: -stream[1])
    rows = []
    for name, busy in streams:
        moved = 0 if name == "compute" else found.num_bytes.get(name, 0)
        rate = f"{moved / busy / 1e9:,.1f} GB/s" if moved and busy else ""
        share = f"{busy / found.seconds:.1%}"
        amount = f"{moved / 1e9:,.2f} GB" if moved else ""
        rows.append([text(name), seconds(busy), share, amount, rate])
    head = ["stream", "busy", "of the step", "moved", "rate"]
    shown = table(head, rows, label="Streams of the step", numbers=4) if rows else ""
    work = [(stream, kind, s) for (stream, kind), s in found.work.items() if stream != "compute"]
    work.sort(key=lambda row: -row[2])
    rows = [
        [text(stream), text(kind), seconds(s), f"{s / found.seconds:.1%}"]
        for stream, kind, s in work[:SHOWN_WORK]
    ]
    if not rows:
        return shown
    head = ["beside it", "work", "seconds", "of the step"]
    return shown + table(head, rows, label="Work of the other streams", numbers=2)


def facts(source: Source) -> str:
    """Model, machine, versions, placement and configuration."""
    environment = source.environment
    rows: list[tuple[str, Any]] = [
        ("model", _model(source.config)),
        ("parameters", f"{source.parameters:,}" if source.parameters else None),
        ("precision", source.precision),
        ("placement", _listed(source.placement)),
        ("device", _gpu(mapping(environment.get("gpu"))) or environment.get("device")),
        ("processor", _processor(environment)),
        ("host memory", _memory(real(environment.get("host_limit_bytes")))),
        ("system", _joined(environment.get("system"), environment.get("kernel"))),
        ("commit", environment.get("commit")),
        ("versions", _versions(environment)),
    ]
    shown = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in rows if value)
    config = ""
    if source.config:
        dumped = yaml.safe_dump(dict(source.config), sort_keys=False, allow_unicode=True)
        config = f"<details><summary>Configuration</summary><pre>{text(dumped)}</pre></details>"
    return f'<section><h2>The run</h2><dl class="facts">{shown}</dl>{config}</section>'


def _model(config: Mapping[str, Any]) -> str | None:
    if "shape" in config:
        return f"Qwen2.5 shape {config['shape']}, weights drawn at random"
    if path := at(config, "model", "path"):
        return str(path)
    kind = at(config, "model", "config", "model_type")
    return f"{kind}, weights drawn at random" if kind else None


def _listed(placement: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {', '.join(map(str, value)) or 'none'}" if isinstance(value, list)
        else f"{name} {value}"
        for name, value in placement.items()
        if value is not None
    )  # fmt: skip


def _gpu(gpu: Mapping[str, Any]) -> str:
    memory = _memory(real(gpu.get("memory_bytes")))
    driver = f"driver {gpu['driver']}" if gpu.get("driver") else None
    return ", ".join(str(part) for part in (gpu.get("name"), memory, driver) if part)


def _processor(environment: Mapping[str, Any]) -> str:
    cores = environment.get("usable_cores")
    return _joined(environment.get("cpu"), f"({cores} cores usable)" if cores else None)


def _versions(environment: Mapping[str, Any]) -> str:
    known = {"Python": environment.get("python"), **mapping(environment.get("packages"))}
    return ", ".join(f"{name} {version}" for name, version in known.items() if version)


def _joined(*parts: Any) -> str:
    return " ".join(str(part) for part in parts if part)
