"""The loss curve of a finished run as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_loss(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw training and evaluation loss over steps as PNG.

    Args:
        records: lines of `metrics.jsonl`, with `step` and `loss` or `eval_loss`.
        path: the picture to write.
    """
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=(8, 4.5), layout="constrained")
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
    figure.savefig(path, format="png", dpi=120)
