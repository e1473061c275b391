"""Where a run's bytes rest, as a picture: one bar for the device, one for the host."""

from collections.abc import Mapping
from pathlib import Path

from megatrain.units import GIB, gib

_LEAST_SHOWN = 0.01  # of the longest bar; less is drawn and not named


def draw_memory(
    device: Mapping[str, int], host: Mapping[str, int], limits: tuple[int, int], path: Path,
    title: str,
) -> None:  # fmt: skip
    """Write the bytes of each part as stacked bars, with the memory allowed, to a PNG or SVG.

    Args:
        device: by part; empty where all of it is the host's, which then is the only bar.
        limits: device and host memory that may be used, in bytes.

    Raises:
        OSError: the file cannot be written.
        ValueError: its name ends in no format that can be drawn.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    bars = [
        (name, parts, limit)
        for name, parts, limit in zip(("device", "host"), (device, host), limits, strict=True)
        if parts
    ]
    figure = Figure(figsize=(11, 2.6 * len(bars)), layout="constrained")
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    every = figure.subplots(len(bars), 1, squeeze=False).flat
    for axes, (name, parts, limit) in zip(every, bars, strict=True):
        left, longest = 0.0, max(sum(parts.values()), limit)
        for index, (part, num_bytes) in enumerate(parts.items()):
            label = f"{part}, {gib(num_bytes)}" if num_bytes > _LEAST_SHOWN * longest else None
            colour = colours[index % len(colours)]
            axes.barh(0, num_bytes / GIB, left=left, color=colour, label=label, edgecolor="white")
            left += num_bytes / GIB
        axes.axvline(limit / GIB, color="black", linestyle="--", label=f"allowed, {gib(limit)}")
        axes.set_yticks([])
        axes.set_xlim(0, 1.03 * longest / GIB)
        axes.set_xlabel(f"{name} memory, GiB: {gib(sum(parts.values()))} at the peak")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.32), ncols=4, fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
