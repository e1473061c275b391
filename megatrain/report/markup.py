"""Pieces of HTML, and numbers as people read them."""

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

Row = Sequence[str]


def text(value: object) -> str:
    """`value` as text that is no markup."""
    return html.escape(str(value), quote=True)


def data(value: Any) -> str:
    """`value` as JSON inside an attribute."""
    return text(json.dumps(value, separators=(",", ":"), allow_nan=False))


def table(head: Row, rows: Iterable[Row], *, label: str, numbers: int = 0) -> str:
    """A table of cells that are HTML already; the last `numbers` columns are aligned right."""
    first = len(head) - numbers
    classes = ["" if i < first else ' class="number"' for i in range(len(head))]
    titles = "".join(f'<th scope="col"{c}>{h}</th>' for h, c in zip(head, classes, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{c}>{cell}</td>" for cell, c in zip(row, classes, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><caption class="hidden">{text(label)}</caption>'
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def short(value: float) -> str:
    """Four digits, with a thousands separator where that is readable: `12,345`, `0.0123`."""
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def compact(value: float) -> str:
    """A large count with a letter: `196.6 M`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.4g} {letter}"
    return short(value)


def seconds(value: float) -> str:
    """Seconds with a fitting unit: `8.58 s`, `12.3 ms`, `45 µs`."""
    if value >= 0.9995:
        return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.0f} µs"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values between `low` and `high`, about `count` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]
