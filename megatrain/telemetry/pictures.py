"""Draws a run's curves and the timeline of a step, as PNG, SVG or PDF by the file's name.

Each function raises OSError: the file cannot be written; ValueError: its kind is not supported.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.telemetry.timeline import Span

Values = NDArray[np.float64]

LANES = (
    *("compute", "copy in", "gather", "reduce", "copy out"),
    *("update", "rows", "disk in", "disk out", "disk weights"),
)
# Colour and meaning of work by a word in its name; the first match counts.
_WORK = {
    "update": ("#5d8233", "optimizer update"),
    "backward": ("#d1495b", "layer backward"),
    "head": ("#edae49", "head and loss"),
    "layer": ("#00798c", "layer forward, or its weights and gradient"),
    "prologue": ("#30638e", "prologue"),
    "": ("#9aa5b1", "other"),
}


class Line(NamedTuple):
    """A series of a chart; `mark`: draw its points as well."""

    label: str
    x: Values
    y: Values
    mark: bool = False


class Chart(NamedTuple):
    """Lines over the steps of a run, with a title."""

    title: str
    lines: Sequence[Line]


def draw_charts(charts: Sequence[Chart], file: Path | IO[bytes], columns: int = 2) -> None:
    """Draw charts in rows of `columns`."""
    rows = max(1, -(-len(charts) // columns))
    width, height = (11, 2.7 * rows) if columns > 1 else (8, 4.5)
    figure = _figure(width, height, layout=None)
    figure.subplots_adjust(0.08, 0.55 / height, 0.98, 1 - 0.35 / height, wspace=0.18, hspace=0.5)
    places = figure.subplots(rows, columns, squeeze=False).flat
    for chart, axes in zip(charts, places, strict=False):
        for label, x, y, mark in chart.lines:
            style = "o--" if mark else ("-" if len(x) > 1 else "o")
            label = label.replace("$", r"\$")  # else matplotlib begins a formula there
            axes.plot(x, y, style, label=label, linewidth=1.2, markersize=4)
        axes.set_title(chart.title, fontsize="medium")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend(fontsize="small")
    for axes in [*places]:
        axes.set_axis_off()
    figure.savefig(file)


def draw_step(spans: Sequence[Span], file: Path | IO[bytes], title: str = "") -> None:
    """Draw a step's work: one lane for each stream, time from left to right."""
    streams = dict.fromkeys(span.stream for span in spans)
    lanes = [*filter(streams.__contains__, LANES), *(s for s in streams if s not in LANES)]
    figure = _figure(14, 0.7 * len(lanes) + 1.6)
    axes = figure.subplots()
    for place, lane in enumerate(lanes):
        in_lane = [span for span in spans if span.stream == lane]
        bars = [(span.start, span.seconds) for span in in_lane]
        colours = [next(_WORK[word][0] for word in _WORK if word in span.name) for span in in_lane]
        axes.broken_barh(
            bars, (place - 0.4, 0.8), facecolors=colours, edgecolor="white", linewidth=0.2
        )
    axes.set_yticks(range(len(lanes)), lanes, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    for colour, meaning in _WORK.values():
        axes.plot([], [], color=colour, linewidth=8, label=meaning)
    figure.legend(loc="outside lower center", ncols=len(_WORK))
    figure.suptitle(title)
    figure.savefig(file)


def _figure(width: float, height: float, layout: Any = "constrained") -> Any:
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    return Figure(figsize=(width, height), layout=layout, dpi=120)
