"""Ranks that share every row: each has some tokens of it, and layers exchange what they need."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatrain.errors import InputError
from megatrain.parallel.distributed import ALONE, ProcessGroups, Ranks, patience, require_same


@dataclass(frozen=True)
class SequenceRanks(ProcessGroups):
    """Ranks with a communicator for what layers exchange, beside those of gathers and sums.

    Attributes:
        beneath: that communicator; its work is on the stream that computes.
    """

    beneath: ProcessGroup | None = None

    def exchange_blocks(self, received: Tensor, sent: Tensor) -> None:
        """Block n of `sent` `[size, ...]` goes to rank n; `received` has theirs, in their order.

        Both are contiguous.
        """
        to, source = (t.view(self.size, -1).view(torch.uint8) for t in (received, sent))
        with self._peer_errors():
            dist.all_to_all_single(to, source, group=self.beneath)


def open_sequence_ranks(ranks: Ranks, device: torch.device, number: Any) -> Ranks:
    """The ranks that share every row: all of them, or this one alone. All ranks call this.

    Raises:
        InputError: `number` is neither 1 nor that of all ranks, or these are on several hosts, or
            a rank has another number.
    """
    require_same(ranks.all_gather_object({"sequence_parallel": str(number)}))
    if type(number) is not int or number not in (1, ranks.size):
        raise InputError(
            f"sequence_parallel is {number!r}; it must be 1 (each rank has rows of its own) or the "
            f"number of ranks, which is {ranks.size}"
        )
    if number == 1:
        return ALONE
    if ranks.on_host != number or ranks.hosts > 1:
        raise InputError(
            f"sequence_parallel is {number}, and these ranks are on several hosts, which cannot "
            "share rows yet; take the ranks of one host, or 1"
        )
    assert isinstance(ranks, ProcessGroups)
    return SequenceRanks(**vars(ranks), beneath=_communicator(ranks.host, device))


@cache  # as of the other communicators: they live as long as torch.distributed
def _communicator(host: ProcessGroup, device: torch.device) -> ProcessGroup:
    """A communicator for exchanges; on a GPU NCCL's, which allocates its memory now."""
    if device.type == "cpu":
        return host
    members = dist.get_process_group_ranks(host)
    group: Any = dist.new_group(members, patience(), "nccl", use_local_synchronization=True)
    values = torch.ones(len(members), device=device)
    dist.all_to_all_single(torch.empty_like(values), values, group=group)
    torch.get_device_module(device).synchronize()
    return group
