"""Micro-batches that are followed as one: a step of thousands is foretold as fast as one of a few.

In a step every micro-batch passes a layer before the next layer comes, and all are alike. So a few
groups show as well what overlaps: forecasts are the same within 1 %.
"""

from dataclasses import dataclass

from megatrain.model.program import MicroBatch


@dataclass
class Group(MicroBatch):
    """Several micro-batches that are followed as one; all else is that of the first."""

    count: int = 1


def groups(rows: int, micro_batch: int, most: int | None) -> list[tuple[int, int]]:
    """How many micro-batches each group stands for, and of how many rows."""
    full, rest = divmod(rows, micro_batch)
    last = [(1, rest)] if rest else []
    number = full if most is None else min(full, most - len(last))
    counts = [full // number + (index < full % number) for index in range(number)]
    return [*((count, micro_batch) for count in counts), *last]


def grouped(micro: MicroBatch) -> int:
    """How many micro-batches one stands for."""
    return micro.count if isinstance(micro, Group) else 1
