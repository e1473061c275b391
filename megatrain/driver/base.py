"""What the package asks of a GPU's driver beside torch: one file for each vendor.

torch itself registers host memory, by one name for both (`cudart().cudaHostRegister`).
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Gpu:
    """One GPU: product name, bytes of memory (0: unknown), driver version, unique number.

    At this moment: the link, which looks slower when idle; `other_processes` as pairs of process
    id and bytes (most containers see none); `used_bytes` of all processes and the driver. None if
    the driver does not say.
    """

    name: str
    memory_bytes: int
    driver: str
    uuid: str = ""
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    other_processes: tuple[tuple[int, int], ...] = ()
    used_bytes: int | None = None


class Driver(Protocol):
    """A vendor's driver; `unsupported`: statuses of `wait` if the driver cannot wait so."""

    unsupported: tuple[int, ...]

    def gpu(self, index: int) -> Gpu | None:
        """The state of the GPU to which torch gives this number; None: there is none."""

    def wait(self, stream: int, address: int, count: int) -> int:
        """Let a stream (its handle) wait until 32 bits of registered host memory are `count` or
        more; returns the driver's status, 0 if the wait is on the stream.
        """
