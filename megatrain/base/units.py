"""Bytes, rates and times as people write and read them."""

import re
from typing import Any

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

IN_FLIGHT_BYTES = GIB
"""The most bytes of weights that are on their way from files to their planes at once."""

_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
           "ki": KIB, "mi": MIB, "gi": GIB, "ti": TIB}  # fmt: skip
_MOST = 1 << 60


def parse_bytes(text: object) -> int:
    """Parse `"10GiB"`, `"512 MB"` or a plain number of bytes.

    Raises ValueError: `text` is no size, is below 1 KiB, or larger than any machine's memory.
    """
    num_bytes: float = text if type(text) is int else 0
    if isinstance(text, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", text.lower())
        if match is not None and match[2] in _SUFFIX:
            num_bytes = float(match[1]) * _SUFFIX[match[2]]
    if not KIB <= num_bytes <= _MOST:  # a plain 64 is probably meant as 64 GiB
        raise ValueError(f"not a size: {text!r:.30} (write it like 10GiB, 512MiB or 24GB)")
    return int(num_bytes)


def gib(num_bytes: float) -> str:
    """Bytes as text in GiB with one decimal; in MiB or bytes if that would be 0.0."""
    if num_bytes < MIB / 20:
        return f"{num_bytes:,.0f} bytes"
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 20 else f"{num_bytes / MIB:.1f} MiB"


def size(num_bytes: int) -> str:
    """Bytes as text in GiB (or MiB), rounded up, so that a limit of this size suffices."""
    if num_bytes < GIB:
        return f"{-(-num_bytes // MIB)} MiB"
    return f"{-(-num_bytes * 10 // GIB) / 10:.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds as `1h02m`, `3m05s` or `4.2s`."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"
    if seconds >= 60:
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
    return f"{seconds:.1f}s"


def align(offset: int, multiple: int) -> int:
    """Round `offset` up to a multiple of `multiple`."""
    return -(-offset // multiple) * multiple


def on_line(start: Any, end: Any, part: int, whole: int) -> Any:
    """The value on a straight line through `start` and `end`, at `part / whole` of the way.

    Interpolates the integers in tuples, lists and dictionaries of the same form, rounded down;
    everything else is taken from `start`. A `part` above `whole` lies beyond `end`.
    """
    if type(start) is int:
        return start + (end - start) * part // whole
    if isinstance(start, dict):
        return {key: on_line(value, end[key], part, whole) for key, value in start.items()}
    if isinstance(start, tuple | list):
        make = getattr(start, "_make", type(start))  # a named tuple takes no single iterable
        return make([on_line(*pair, part, whole) for pair in zip(start, end, strict=True)])
    return start
