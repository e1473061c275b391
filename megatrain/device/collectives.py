"""Work of all ranks together, put on streams of the device; a rank that is alone does nothing.

All ranks put the same collectives on a stream in the same order: the order of the tiles in a step,
which the placement alone decides. Their micro-batches may differ in number and size.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, COPY_IN, GATHER, HOSTS, REDUCE, Kind, Name
from megatrain.parallel.distributed import Ranks


class Collectives:
    """Gathers and sums of a host's ranks, then sums between hosts; each on a stream of its own."""

    def __init__(self, device: Device, ranks: Ranks) -> None:
        self._device, self.ranks = device, ranks

    def all_gather(self, parts: Sequence[Buffer], label: str, stream: str = COPY_IN) -> Any:
        """Gather all ranks' blocks in each of these buffers; `stream` writes this rank's block.

        Returns the event after which the buffers are whole.
        """
        device, shards = self._device, self.ranks.shards
        if shards.size == 1:
            return device.record(stream)
        device.wait(GATHER, device.record(stream), "shard arrived")
        for part in parts:
            self._run(GATHER, f"gather {label}", shards.all_gather, part)
        return device.record(GATHER)

    def complete(self, values: Buffer, label: str) -> None:
        """Let COMPUTE, which has written this rank's block of a buffer, have all ranks' blocks."""
        if self.ranks.shards.size > 1:
            gathered = self.all_gather([values], label, COMPUTE)
            self._device.wait(COMPUTE, gathered, "blocks of all ranks")

    def reduce_scatter(self, sums: Buffer, name: str) -> None:
        """Sum a buffer over the ranks; COMPUTE gets this rank's block of it."""
        device, shards, replicas = self._device, self.ranks.shards, self.ranks.replicas
        if not (self.ranks.size > 1 and len(sums.data)):
            return
        done, mine = device.record(COMPUTE), sums
        if shards.size > 1:
            device.wait(REDUCE, done, "sums ready")
            self._run(REDUCE, f"sum {name}", shards.reduce_scatter, sums)
            block = len(sums.data) // shards.size
            mine = sums.piece(shards.rank * block, (shards.rank + 1) * block)
            done = device.record(REDUCE)
        if replicas.size > 1:
            device.wait(HOSTS, done, "sums of this host")
            self._run(HOSTS, f"sum {name} of all hosts", replicas.all_reduce, mine, Kind.ALL_REDUCE)
            done = device.record(HOSTS)
        device.wait(COMPUTE, done, "sums of all ranks")

    def all_reduce(self, numbers: Buffer, label: str) -> Any:
        """Sum numbers that COMPUTE has written over the ranks; returns the event of the end."""
        if self.ranks.size == 1:
            return self._device.record(COMPUTE)
        stream = REDUCE if self.ranks.shards.size > 1 else HOSTS  # where tiles are summed first
        self._device.wait(stream, self._device.record(COMPUTE), "numbers ready")
        self._run(stream, f"sum {label}", self.ranks.all_reduce, numbers)
        return self._device.record(stream)

    def gather_by_sum(
        self, mine: Sequence[Any], shapes: Sequence[Sequence[int]], first: int
    ) -> list[Any]:
        """Each rank computes its own fp32 tensors; all ranks get all of them, in rank order.

        Args:
            mine: this rank's; a device that computes nothing takes and returns None for each.
            shapes: those of all ranks' tensors; `first`: the index of this rank's first one.
        """
        if self.ranks.size == 1:
            return list(mine)
        device, sizes = self._device, [prod(shape) for shape in shapes]
        total = device.empty("numbers of all ranks", sum(sizes), torch.float32)
        parts = total.data.split(sizes)

        def copy_mine() -> None:
            total.data.zero_()  # the other ranks' places: a sum with zeros keeps every bit
            for part, values in zip(parts[first:], mine, strict=False):
                part.copy_(values.flatten())

        device.run(COMPUTE, "note own numbers", copy_mine, writes=[total])
        device.wait(COMPUTE, self.all_reduce(total, "numbers of all ranks"), "numbers of all ranks")

        views = [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]
        gathered = device.run(COMPUTE, "take numbers of all ranks", lambda: views, [total])
        return gathered or [None] * len(sizes)

    def _run(
        self, stream: str, name: str, work: Any, buffer: Buffer, kind: Kind = Kind.COLLECTIVE
    ) -> None:
        data = buffer.data
        self._device.run(stream, Name(kind, name), lambda: work(data), [buffer], [buffer])
