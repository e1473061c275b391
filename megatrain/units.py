"""Bytes, rates and times as people write and read them."""

import re

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
           "ki": KIB, "mi": MIB, "gi": GIB, "ti": TIB}  # fmt: skip


def parse_bytes(text: str | int) -> int:
    """`"10GiB"`, `"512 MB"` or a plain number of bytes, as bytes.

    Raises:
        ValueError: the text is not a size.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _SUFFIX:
        raise ValueError(f"not a size: {text!r} (write it like 10GiB, 512MiB or 24GB)")
    return int(float(match[1]) * _SUFFIX[match[2]])


def gib(num_bytes: float) -> str:
    """Bytes as GiB with one decimal, for people."""
    return f"{num_bytes / GIB:.1f} GiB"


def size(num_bytes: int) -> str:
    """As `gib`; below one GiB in whole MiB, rounded up."""
    return gib(num_bytes) if num_bytes >= GIB else f"{-(-num_bytes // MIB)} MiB"


def duration(seconds: float) -> str:
    """Seconds as `1h02m`, `3m05s` or `4.2s`."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"
    if seconds >= 60:
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
    return f"{seconds:.1f}s"


def align(offset: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `offset`."""
    return -(-offset // multiple) * multiple
