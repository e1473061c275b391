"""What the ranks do together, put on streams of the device; a rank that is alone does nothing.

All ranks put the same collectives on a stream in the same order: the order of the tiles in a step,
which the placement alone decides. Their micro-batches may differ in number and size.
"""

from collections.abc import Sequence
from typing import Any

from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, COPY_IN, GATHER, REDUCE, Kind, Name
from megatrain.distributed import Ranks


class Collectives:
    """Gathers run beside sums, each on a stream and by a communicator of its own."""

    def __init__(self, device: Device, ranks: Ranks) -> None:
        self._device, self.ranks = device, ranks

    def gather(self, parts: Sequence[Buffer], what: str) -> Any:
        """Fill buffers of one equal block a rank, whose own is on its way on COPY_IN.

        Returns:
            The event of their being whole.
        """
        device = self._device
        if not self.ranks.together:
            return device.record(COPY_IN)
        device.wait(GATHER, device.record(COPY_IN), "shard arrived")
        for part in parts:
            self._run(GATHER, f"gather {what}", self.ranks.gather, part)
        return device.record(GATHER)

    def scatter_sum(self, sums: Buffer, what: str) -> None:
        """Sum a buffer of one equal block a rank over the ranks; COMPUTE has its own block then."""
        if not (self.ranks.together and len(sums.data)):
            return
        self._device.wait(REDUCE, self._device.record(COMPUTE), "sums ready")
        self._run(REDUCE, f"sum {what}", self.ranks.scatter_sum, sums)
        self._device.wait(COMPUTE, self._device.record(REDUCE), "sums of all ranks")

    def sum(self, numbers: Buffer, what: str) -> Any:
        """Sum numbers that COMPUTE writes over the ranks; returns the event of its being done."""
        if not self.ranks.together:
            return self._device.record(COMPUTE)
        self._device.wait(REDUCE, self._device.record(COMPUTE), "numbers ready")
        self._run(REDUCE, f"sum {what}", self.ranks.sum, numbers)
        return self._device.record(REDUCE)

    def _run(self, stream: str, name: str, work: Any, buffer: Buffer) -> None:
        data = buffer.data
        self._device.run(
            stream, Name(Kind.COLLECTIVE, name), lambda: work(data), [buffer], [buffer]
        )
