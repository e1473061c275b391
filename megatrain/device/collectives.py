"""Collectives of all ranks, put on streams of the device; a single rank does nothing.

All ranks put the same collectives on a stream in the same order: that of a step's tiles, which only
the placement decides. The ranks' micro-batches may differ in number and size.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, COPY_IN, GATHER, HOSTS, REDUCE, Kind, Name
from megatrain.parallel.distributed import Ranks


class Collectives:
    """Gathers and sums between a host's ranks, then sums between hosts, on streams of their own."""

    def __init__(self, device: Device, ranks: Ranks) -> None:
        self._device, self.ranks = device, ranks

    def all_gather(self, parts: Sequence[Buffer], label: str, stream: str = COPY_IN) -> Any:
        """Gather all ranks' blocks of each buffer, after `stream` has written this rank's block.

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
        """Gather all ranks' blocks of a buffer for COMPUTE, which has written this rank's."""
        if self.ranks.shards.size > 1:
            gathered = self.all_gather([values], label, COMPUTE)
            self._device.wait(COMPUTE, gathered, "blocks of all ranks")

    def reduce_scatter(self, sums: Buffer, name: str) -> None:
        """Sum a buffer over the ranks; COMPUTE waits for this rank's block of the sum."""
        device, shards, replicas = self._device, self.ranks.shards, self.ranks.replicas
        if not (self.ranks.size > 1 and len(sums.data)):
            return
        done, block = device.record(COMPUTE), sums  # this rank's block, summed so far
        if shards.size > 1:
            device.wait(REDUCE, done, "sums ready")
            self._run(REDUCE, f"sum {name}", shards.reduce_scatter, sums)
            numel = len(sums.data) // shards.size
            block = sums.piece(shards.rank * numel, (shards.rank + 1) * numel)
            done = device.record(REDUCE)
        if replicas.size > 1:
            device.wait(HOSTS, done, "sums of this host")
            self._run(
                HOSTS, f"sum {name} of all hosts", replicas.all_reduce, block, Kind.ALL_REDUCE
            )
            done = device.record(HOSTS)
        device.wait(COMPUTE, done, "sums of all ranks")

    def all_reduce(self, numbers: Buffer, label: str) -> Any:
        """Sum over the ranks numbers that COMPUTE has written; return the event of the sum."""
        if self.ranks.size == 1:
            return self._device.record(COMPUTE)
        stream = REDUCE if self.ranks.shards.size > 1 else HOSTS  # where tiles are summed first
        self._device.wait(stream, self._device.record(COMPUTE), "numbers ready")
        self._run(stream, f"sum {label}", self.ranks.all_reduce, numbers)
        return self._device.record(stream)

    def gather_by_sum(
        self, tensors: Sequence[Any], shapes: Sequence[Sequence[int]], first: int
    ) -> list[Any]:
        """Gather the ranks' fp32 tensors, in rank order, by a sum.

        Args:
            tensors: this rank's; a device that computes nothing takes and returns Nones.
            shapes: the shapes of all ranks' tensors.
            first: the index of this rank's first tensor among those of all ranks.
        """
        if self.ranks.size == 1:
            return list(tensors)
        device, sizes = self._device, [prod(shape) for shape in shapes]
        total = device.empty("numbers of all ranks", sum(sizes), torch.float32)
        parts = total.data.split(sizes)

        def copy_tensors() -> None:
            total.data.zero_()  # in the other ranks' places: adding zeros keeps every bit
            for part, values in zip(parts[first:], tensors, strict=False):
                part.copy_(values.flatten())

        device.run(COMPUTE, "note own numbers", copy_tensors, writes=[total])
        device.wait(COMPUTE, self.all_reduce(total, "numbers of all ranks"), "numbers of all ranks")
        views = [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]
        gathered = device.run(COMPUTE, "take numbers of all ranks", lambda: views, [total])
        return gathered or [None] * len(sizes)

    def _run(
        self, stream: str, name: str, work: Any, buffer: Buffer, kind: Kind = Kind.COLLECTIVE
    ) -> None:
        data = buffer.data
        self._device.run(stream, Name(kind, name), lambda: work(data), [buffer], [buffer])
