"""What a step with planes on a disk may take, and what it took."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.device.base import COMPUTE, DISK_IN, DISK_OUT, DISK_STREAMS, DISK_WEIGHTS
from megatrain.machine import Machine
from megatrain.telemetry.timeline import Span


@dataclass(frozen=True)
class DiskRule:
    """Seconds of a recorded step.

    Attributes:
        least: with clipping backward + head + max(forward, disk), because updates run under the
            next forward alone; without, max(compute, disk).
        disk: of its bytes at the rate that the doctor measured, or else at the step's own.
        ratio: of the step to `least`: 1.05 is aimed at.
    """

    forward: float
    backward: float
    disk: float
    least: float
    ratio: float

    def __str__(self) -> str:
        return (
            f"the disk needs {self.disk:.3f} s, forward {self.forward:.3f}, head and backward "
            f"{self.backward:.3f}: at least {self.least:.3f} s, of which the recorded step took "
            f"{self.ratio:.2f} times as much (1.05 is aimed at)"
        )


def disk_rule(spans: Sequence[Span], machine: Machine | None, *, clip: bool) -> DiskRule | None:
    """The rule for a step recorded in the midst of others; None: nothing of it went to a disk."""
    own = {name: [s for s in spans if s.stream == name] for name in (COMPUTE, *DISK_STREAMS)}
    moved = {name: sum(s.num_bytes for s in each) / 1e9 for name, each in own.items()}
    compute = own[COMPUTE]
    if not compute or not any(moved[name] for name in DISK_STREAMS):
        return None
    head = min((s.start for s in compute if s.name.startswith("head")), default=compute[-1].end)
    forward = sum(s.seconds for s in compute if s.start < head)
    backward = sum(s.seconds for s in compute) - forward
    if machine is not None and machine.disk_both_gbps and machine.disk_read_gbps:
        disk = max(moved[DISK_IN], moved[DISK_OUT]) / machine.disk_both_gbps
        disk += moved[DISK_WEIGHTS] / machine.disk_read_gbps
    else:
        disk = max(sum(s.seconds for s in own[name]) for name in DISK_STREAMS)
    least = backward + max(forward, disk) if clip else max(forward + backward, disk)
    return DiskRule(forward, backward, disk, least, max(s.end for s in compute) / least)
