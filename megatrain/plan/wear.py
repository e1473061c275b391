"""What a step does to the disk that planes rest on, and how long a drive stands it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.plan.tiles import TileBytes

TERABYTE = 10**12  # as drives are sold


def terabytes_a_day(num_bytes: float, seconds: float) -> float:
    """Terabytes written in a day of steps that write `num_bytes` in `seconds`."""
    return num_bytes / TERABYTE * 86400 / seconds


@dataclass(frozen=True)
class DiskUse:
    """Planes on a disk: each update reads and writes what is trained, sweeps read the weights.

    Attributes:
        num_bytes: that rest there.
        read, written: bytes in a step.
        seconds: of a step.
        endurance_terabytes: that may be written to the drive (its TBW); None: not known.
    """

    num_bytes: int
    read: int
    written: int
    seconds: float
    endurance_terabytes: float | None = None

    @property
    def terabytes_a_day(self) -> float:
        """Written, at the speed of the plan."""
        return terabytes_a_day(self.written, self.seconds)

    @property
    def days_to_wear(self) -> float | None:
        """Until a new drive has taken what it is good for; None: that is not known."""
        if self.endurance_terabytes is None or not self.written:
            return None
        return self.endurance_terabytes / self.terabytes_a_day

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for `--json`."""
        return {
            "num_bytes": self.num_bytes,
            "read_bytes_a_step": self.read,
            "written_bytes_a_step": self.written,
            "written_terabytes_a_day": self.terabytes_a_day,
            "endurance_terabytes": self.endurance_terabytes,
            "days_to_wear": self.days_to_wear,
        }


def disk_use(
    tiles: Sequence[TileBytes], seconds: float, endurance_terabytes: float | None, passes: int = 1
) -> DiskUse | None:
    """The use of the disk by a step of `seconds`; None: nothing rests on one."""
    resting = sum(tile.count * tile.planes[plane] for tile in tiles for plane in tile.disk)
    written = sum(tile.count * tile.written for tile in tiles)
    weights = sum(tile.count * tile.planes["weights"] for tile in tiles if "weights" in tile.disk)
    read = written + 2 * passes * weights
    return DiskUse(resting, read, written, seconds, endurance_terabytes) if resting else None
