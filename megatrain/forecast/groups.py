"""Micro-batches that are followed as one: a step of thousands is foretold as fast as one of a few.

In a step every micro-batch passes a layer before the next layer comes, and all are alike. So a few
groups show as well what overlaps: forecasts are the same within 1 %.
"""

from dataclasses import dataclass
from itertools import pairwise

from megatrain.model.program import MicroBatch


@dataclass
class Group(MicroBatch):
    """Several micro-batches that are followed as one; all else is that of the first."""

    count: int = 1


def groups(rows: int, micro_batch: int, most: int | None, passes: int = 1) -> list[tuple[int, int]]:
    """How many micro-batches each group stands for, and of how many rows.

    A group's are of one pass, and passes are of as many groups: `Batch.passes` finds them again.
    """
    full, rest = divmod(rows, micro_batch)
    last = [(1, rest)] if rest else []
    passes = min(passes, full + len(last))
    ends = [(full + len(last)) * number // passes for number in range(passes + 1)]
    found = []
    for start, stop in pairwise(ends):
        whole = min(stop, full) - start
        number = whole if most is None else min(whole, max(1, (most - len(last)) // passes))
        found += [(whole // number + (i < whole % number), micro_batch) for i in range(number)]
    return [*found, *last]


def grouped(micro: MicroBatch) -> int:
    """How many micro-batches this one stands for."""
    return micro.count if isinstance(micro, Group) else 1
