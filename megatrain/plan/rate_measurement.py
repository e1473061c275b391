"""Taking a measurement: a value with its unit, or the reason why there is none."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from megatrain.device import Device
from megatrain.errors import first_line

_ROUNDS = 3
_ROUND_SECONDS = 0.15
_LONG_SECONDS = 0.4  # one call of this length is measurement enough
_MOST_CALLS = 100


@dataclass(frozen=True)
class Measurement:
    """One number about a machine.

    Attributes:
        name: for programs.
        label: for people, without the unit.
        why_not: the reason why `value` is None.
    """

    name: str
    label: str
    value: float | None
    unit: str
    why_not: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def attempt(name: str, label: str, unit: str, work: Callable[[], float]) -> Measurement:
    """What `work` returns; whatever goes wrong costs this measurement only."""
    try:
        return Measurement(name, label, work(), unit)
    except Exception as error:  # drivers and libraries have their own
        return Measurement(name, label, None, unit, first_line(error)[:200])


def host_seconds(work: Callable[[], Any]) -> float:
    """Seconds of one call on the caller's thread, after a first that does not count."""

    def one() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    one()
    return statistics.median(one() for _ in range(_ROUNDS))


def device_seconds(device: Device, streams: tuple[str, ...], work: Callable[[], Any]) -> float:
    """Seconds of one call that puts work on `streams`; the slowest stream counts.

    A first call does not count: it loads kernels.
    """
    first = _calls(device, streams, work, 1)
    first = min(first, _calls(device, streams, work, 1))
    if first > _LONG_SECONDS:
        return first
    count = max(1, min(_MOST_CALLS, int(_ROUND_SECONDS / max(first, 1e-9))))
    return statistics.median(_calls(device, streams, work, count) / count for _ in range(_ROUNDS))


def _calls(device: Device, streams: tuple[str, ...], work: Callable[[], Any], count: int) -> float:
    starts = [device.mark(stream) for stream in streams]
    for _ in range(count):
        work()
    ends = [device.mark(stream) for stream in streams]
    for stream in streams:
        device.synchronize(device.record(stream), "measured")
    return max(device.seconds(start, end) for start, end in zip(starts, ends, strict=True))
