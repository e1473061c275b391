"""Lines over steps or hours as SVG that stretches; its labels are HTML and keep their size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatrain.report.markup import data, short, text, ticks
from megatrain.report.series import Numbers, Reduced, reduce

WIDTH, HEIGHT = 1000, 240  # of the drawing's own units
COLOURS = 6  # of lines in page.css; further lines have them again


@dataclass(frozen=True)
class Line:
    """One series: `mark` draws its points, too."""

    label: str
    x: Numbers
    y: Numbers
    mark: bool = False


@dataclass(frozen=True)
class Chart:
    """What a chart shows.

    Attributes:
        from_zero: whether the axis of values begins at zero.
        roof: a value that cannot be passed, and its name.
    """

    title: str
    unit: str
    axis: str
    lines: Sequence[Line]
    from_zero: bool = False
    roof: tuple[str, float] | None = None
    format: Callable[[float], str] = short


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    size: float

    def __call__(self, values: Numbers) -> Numbers:
        return (values - self.low) / (self.high - self.low) * self.size


def draw(chart: Chart) -> str:
    """The chart as an HTML figure; nothing when there is no value to show."""
    reduced = [(i % COLOURS, line, reduce(line.x, line.y)) for i, line in enumerate(chart.lines)]
    shown = [(line, points) for _, line, points in reduced if len(points.x)]
    colours = [colour for colour, _, points in reduced if len(points.x)]
    if not shown:
        return ""
    across, up = _scales(chart, [points for _, points in shown])
    shapes = "".join(
        _shape(colour, line, points, across, up)
        for colour, (line, points) in zip(colours, shown, strict=True)
    )
    levels = ticks(up.low, up.high)
    grid = "".join(
        f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        for y in (HEIGHT - up(np.array([level]))[0] for level in levels)
    )
    roof = _roof(chart, up)
    return (
        f'<figure class="chart" data-chart="{_readings(chart, shown, across)}">'
        f"<figcaption><h3>{text(chart.title)} <small>{text(chart.unit)}</small></h3>"
        f"{_legend(shown, colours)}</figcaption>"
        f'<div class="plot"><div class="levels" aria-hidden="true">{_levels(chart, levels, up)}'
        f'</div><div class="area"><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="{text(_summary(chart, shown))}">{grid}{roof}{shapes}</svg>'
        f'<div class="cursor" hidden></div></div><div></div><div class="places" aria-hidden="true">'
        f"{_places(chart, across)}</div></div>"
        f'<p class="reading">{text(_summary(chart, shown))}</p></figure>'
    )


def _scales(chart: Chart, points: Sequence[Reduced]) -> tuple[_Scale, _Scale]:
    left, right = min(p.x[0] for p in points), max(p.x[-1] for p in points)
    low, high = min(p.low.min() for p in points), max(p.high.max() for p in points)
    if chart.roof is not None and chart.roof[1] < 2.5 * high:
        high = max(high, chart.roof[1])
    low = min(0.0, low) if chart.from_zero else low
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low = low if chart.from_zero and low == 0 else low - room
    return _Scale(left, right if right > left else left + 1, WIDTH), _Scale(
        low, high + room, HEIGHT
    )


def _shape(colour: int, line: Line, points: Reduced, across: _Scale, up: _Scale) -> str:
    x, y = across(points.x), HEIGHT - up(points.mean)
    parts = []
    if points.is_band:
        top, bottom = HEIGHT - up(points.high), HEIGHT - up(points.low)
        outline = _path(np.append(x, x[::-1]), np.append(top, bottom[::-1]))
        parts.append(f'<path class="band s{colour}" d="{outline}Z"/>')
    parts.append(f'<path class="line s{colour}" d="{_path(x, y)}"/>')
    if line.mark or len(x) == 1:
        # A line without length and with round ends: a dot that does not stretch.
        dots = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in zip(x, y, strict=True))
        parts.append(f'<path class="dot s{colour}" d="{dots}"/>')
    return "".join(parts)


def _path(x: Numbers, y: Numbers) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def _roof(chart: Chart, up: _Scale) -> str:
    if chart.roof is None or chart.roof[1] > up.high:
        return ""
    y = HEIGHT - up(np.array([chart.roof[1]]))[0]
    return f'<line class="roof" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _levels(chart: Chart, levels: Sequence[float], up: _Scale) -> str:
    return "".join(
        f'<span style="top:{100 - 100 * (v - up.low) / (up.high - up.low):.2f}%">'
        f"{text(chart.format(v))}</span>"
        for v in levels
    )


def _places(chart: Chart, across: _Scale) -> str:
    span = across.high - across.low
    places = "".join(
        f'<span style="left:{100 * (v - across.low) / span:.2f}%">{text(short(v))}</span>'
        for v in ticks(across.low, across.high)
        if 0.02 < (v - across.low) / span < 0.82
    )
    return f'{places}<span class="axis">{text(chart.axis)}</span>'


def _legend(shown: Sequence[tuple[Line, Reduced]], colours: Sequence[int]) -> str:
    if len(shown) < 2:
        return ""
    labels = [text(line.label) for line, _ in shown]
    of = zip(colours, labels, strict=True)
    names = (f'<li><i class="s{colour}"></i>{label}</li>' for colour, label in of)
    return f'<ul class="legend">{"".join(names)}</ul>'


def _summary(chart: Chart, shown: Sequence[tuple[Line, Reduced]]) -> str:
    parts = []
    for line, points in shown:
        name = f"{line.label}: " if len(shown) > 1 else ""
        form, last = chart.format, line.y[np.isfinite(line.y)][-1]
        parts.append(
            f"{name}last {form(last)}, from {form(points.low.min())} to {form(points.high.max())}"
        )
    roof = f"; {chart.roof[0]} {chart.format(chart.roof[1])}" if chart.roof else ""
    return f"{'; '.join(parts)}{roof} {chart.unit}".strip()


def _readings(chart: Chart, shown: Sequence[tuple[Line, Reduced]], across: _Scale) -> str:
    """What the pointer reads: places in thousandths of the width, and words."""
    series = []
    for line, points in shown:
        words = [
            chart.format(mean) if low == high
            else f"{chart.format(mean)} ({chart.format(low)} to {chart.format(high)})"
            for mean, low, high in zip(points.mean, points.low, points.high, strict=True)
        ]  # fmt: skip
        series.append(
            {
                "label": line.label,
                "at": [round(float(v)) for v in across(points.x)],
                "x": [short(float(v)) for v in points.x],
                "words": words,
            }
        )
    return data({"axis": chart.axis, "unit": chart.unit, "series": series})
