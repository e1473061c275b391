"""Pictures of a run as PNG, SVG or PDF: its loss, its memory, one step's time.

Each function raises OSError where the file cannot be written, ValueError for another kind of file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megatrain.base.units import GIB, gib
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
_LEAST_SHOWN = 0.01  # of the longest bar; less is drawn and not named


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


def draw_memory(
    places: Mapping[str, tuple[Mapping[str, int], int | None]], path: Path, title: str
) -> None:
    """Draw the bytes of each part as stacked bars, one for each place that has any.

    Args:
        places: by name, what is there at the peak, by part, and the bytes allowed; None: no limit.
    """
    from matplotlib import colormaps

    bars = [(name, parts, limit) for name, (parts, limit) in places.items() if parts]
    figure = _figure(11, 2.6 * len(bars))
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    every = figure.subplots(len(bars), 1, squeeze=False).flat
    for axes, (name, parts, limit) in zip(every, bars, strict=True):
        left, longest = 0.0, max(sum(parts.values()), limit or 0)
        for index, (part, num_bytes) in enumerate(parts.items()):
            label = f"{part}, {gib(num_bytes)}" if num_bytes > _LEAST_SHOWN * longest else None
            colour = colours[index % len(colours)]
            axes.barh(0, num_bytes / GIB, left=left, color=colour, label=label, edgecolor="white")
            left += num_bytes / GIB
        if limit is not None:
            axes.axvline(limit / GIB, color="black", linestyle="--", label=f"allowed, {gib(limit)}")
        axes.set_yticks([])
        axes.set_xlim(0, 1.03 * longest / GIB)
        axes.set_xlabel(f"{name}, GiB: {gib(sum(parts.values()))} at the peak")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.32), ncols=4, fontsize="small")
    figure.suptitle(title)
    figure.savefig(path)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    return Figure(figsize=(width, height), layout="constrained", dpi=120)
