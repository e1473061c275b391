"""Pictures of a run as PNG, SVG or PDF, by the file's name: its loss, one step's time.

Each function raises OSError where the file cannot be written, ValueError for another kind of file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megatrain.telemetry.timeline import Span

LANES = (
    *("compute", "copy in", "gather", "reduce", "copy out"),
    *("update", "rows", "disk in", "disk out", "disk weights"),
)
OTHER = "other"
# Words of a piece of work's name; the first that fits gives its colour.
COLOURS = {
    "update": "#5d8233",
    "backward": "#d1495b",
    "head": "#edae49",
    "layer": "#00798c",
    "prologue": "#30638e",
    OTHER: "#9aa5b1",
}
MEANINGS = {
    "update": "optimizer update",
    "backward": "layer backward",
    "head": "head and loss",
    "layer": "layer forward, or its weights and gradient",
    "prologue": "prologue",
    OTHER: "other",
}


def draw_loss(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw training and evaluation loss over steps.

    Args:
        records: lines of `metrics.jsonl`, with `step` and `loss` or `eval_loss`.
    """
    figure = _figure(8, 4.5)
    axes = figure.subplots()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "evaluation", "o--")):
        points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.2, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path)


def draw_step(spans: Sequence[Span], file: Path | IO[bytes], title: str = "") -> None:
    """Draw a step's work: one lane per stream, time from left to right."""
    streams = dict.fromkeys(span.stream for span in spans)
    lanes = [*filter(streams.__contains__, LANES), *(s for s in streams if s not in LANES)]
    figure = _figure(14, 0.7 * len(lanes) + 1.6)
    axes = figure.subplots()
    for place, lane in enumerate(lanes):
        mine = [span for span in spans if span.stream == lane]
        bars = [(span.start, span.seconds) for span in mine]
        words = [next((word for word in COLOURS if word in span.name), OTHER) for span in mine]
        colours = [COLOURS[word] for word in words]
        axes.broken_barh(
            bars, (place - 0.4, 0.8), facecolors=colours, edgecolor="white", linewidth=0.2
        )
    axes.set_yticks(range(len(lanes)), lanes, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    for word, meaning in MEANINGS.items():
        axes.plot([], [], color=COLOURS[word], linewidth=8, label=meaning)
    figure.legend(loc="outside lower center", ncols=len(MEANINGS))
    figure.suptitle(title)
    figure.savefig(file)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    return Figure(figsize=(width, height), layout="constrained", dpi=120)
