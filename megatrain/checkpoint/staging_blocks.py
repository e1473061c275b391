"""Host memory for what saves have not written when it changes, or leaves the device."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.checkpoint import files
from megatrain.device import Device
from megatrain.errors import DoesNotFit
from megatrain.telemetry.memory import host_available_bytes

_log = logging.getLogger(__name__)

AT_ONCE = 4  # files that are written, and leave the device, at a time
TO_LEAVE = 2 * AT_ONCE  # blocks: a file is written from one while it gets the next


class StagingBlocks:
    """Blocks of a piece each, taken when they are first needed and kept from save to save.

    Some are only for what leaves the device: its writers could wait for ever if all blocks were
    held by what is written after it.

    Attributes:
        num_bytes: taken.
        free: blocks for whoever needs one.
        free_to_leave: those only for what leaves the device.
    """

    def __init__(self, device: Device, most_bytes: int | None, host_limit: int | None) -> None:
        """Args:
        most_bytes: None: half of what is free when the first background save begins.
        host_limit: bytes that the process may have; None: what the machine allows.
        """
        self._device, self._most_bytes, self._host_limit = device, most_bytes, host_limit
        self._blocks: list[Tensor] = []
        self._to_leave: set[int] = set()
        self._complete = False
        self.num_bytes = 0
        self.free: list[int] = []
        self.free_to_leave: list[int] = []

    def prepare(self, planes: Sequence[int], *, leaving: bool, background: bool) -> None:
        """Take the memory for a save of planes of so many bytes, as much as there is.

        Args:
            leaving: some of them leave the device.
            background: updates are going to be started before all is written.

        Raises:
            DoesNotFit: there is not even enough to leave the device through.
        """
        if leaving and not self._to_leave:
            self._to_leave.update(range(len(self._blocks), len(self._blocks) + TO_LEAVE))
            self._add(TO_LEAVE, pinned=True)
        if background and not self._complete:
            self._complete = True
            most = self._most_bytes
            if most is None:
                most = spare_bytes_of(host_available_bytes(self._host_limit))
            blocks = min(most, useful_bytes(planes)) // files.PIECE_BYTES
            while blocks > 0:
                try:
                    self._add(blocks, pinned=leaving)
                    break
                except DoesNotFit as error:
                    blocks //= 2
                    _log.warning("saves will hold up updates more than need be: %s", error)

    def _add(self, blocks: int, *, pinned: bool) -> None:
        size = blocks * files.PIECE_BYTES
        buffer = self._device.host("spare room of saves", size, torch.uint8, pinned=pinned)
        self.num_bytes += size
        self._blocks += buffer.data.split(files.PIECE_BYTES)
        for number in range(len(self._blocks) - blocks, len(self._blocks)):
            self.give(number)

    def give(self, block: int) -> None:
        """A block that nobody needs any more."""
        (self.free_to_leave if block in self._to_leave else self.free).append(block)

    def __getitem__(self, block: int) -> Tensor:
        return self._blocks[block]


def useful_bytes(planes: Sequence[int]) -> int:
    """Bytes of blocks with which a save of these planes need not wait for its writers.

    Each piece takes a block. Small planes are written so soon that not each needs one.
    """
    size = files.PIECE_BYTES
    pieces = sum(-(-plane // size) for plane in planes)
    return min(pieces, 2 * -(-sum(planes) // size)) * size


def spare_bytes_of(free_bytes: int) -> int:
    """Host memory that saves may take of the free memory, where nobody says how much."""
    return free_bytes // 2  # steps may grow, and so may the process
