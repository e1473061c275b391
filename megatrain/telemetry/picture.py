"""A timeline as a picture: one lane per stream, time from left to right."""

from collections.abc import Sequence
from pathlib import Path

from megatrain.telemetry.timeline import Span

# What a span's name says first that a reader looks for; the first that fits gives its colour.
COLOURS = {
    "update": "#5d8233",
    "backward": "#d1495b",
    "head": "#edae49",
    "layer": "#00798c",
    "prologue": "#30638e",
}
OTHER = "#9aa5b1"
LANES = ("compute", "copy in", "copy out", "update", "rows")


def draw(spans: Sequence[Span], file: Path, title: str) -> None:
    """Write the timeline of `spans` to a PNG or SVG `file`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    lanes = [lane for lane in LANES if any(span.stream == lane for span in spans)]
    figure, axes = pyplot.subplots(figsize=(14, 0.7 * len(lanes) + 1.6))
    for place, lane in enumerate(lanes):
        mine = [span for span in spans if span.stream == lane]
        bars = [(span.start, span.seconds) for span in mine]
        colours = [_colour(span.name) for span in mine]
        axes.broken_barh(
            bars, (place - 0.4, 0.8), facecolors=colours, edgecolor="white", linewidth=0.2
        )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title)
    names = {"layer": "layer forward, or its weights and gradient", "update": "optimizer update"}
    handles = [Patch(color=c, label=names.get(n, n)) for n, c in COLOURS.items()]
    axes.legend(handles=handles, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.28))
    figure.savefig(file, bbox_inches="tight", dpi=110)
    pyplot.close(figure)


def _colour(name: str) -> str:
    return next((colour for word, colour in COLOURS.items() if word in name), OTHER)
