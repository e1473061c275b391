"""Expert parallel: each rank holds some experts of a layer, and tokens go to the ranks of theirs.

Legend: N ranks, E experts of a layer, R rows of a rank's tokens (one for each expert of a token), S
rows of a rank's experts, H width.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import custom_op

from megatrain.errors import InputError
from megatrain.model.spec import ModelSpec
from megatrain.parallel.distributed import Ranks, exchange, numbered
from megatrain.tile.layout import ALIGNMENT


@custom_op("megatrain::arrivals", mutates_args=())
def _arrivals(counts_E: Tensor, length: int, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows that come to this rank, where each goes to the owner of its expert.

    Returns the numbers of rows to and from each rank `[2, N]`, on the host; the number of each
    expert's here; and of the rows that come, sorted by expert, these experts' numbers `[S]` and the
    place `[S]` at which each comes, rank by rank.

    Args: `length`: of this rank's rows.
    """
    counts = counts_E.long().view(numbered[ranks].size, -1)
    theirs = numbered[ranks].exchange(counts)
    splits = torch.stack([counts.sum(1), theirs.sum(1)]).cpu()
    numbers = torch.arange(theirs.shape[1], device=theirs.device).repeat(len(theirs))
    size = int(splits[1].sum())  # told, so that the host does not wait for the device
    of_rows, order = numbers.repeat_interleave(theirs.flatten(), output_size=size).sort(stable=True)
    return splits, theirs.sum(0), of_rows, order


@_arrivals.register_fake
def _(counts_E: Tensor, length: int, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = numbered[ranks].size
    counts = counts_E.new_empty(len(counts_E) // size, dtype=torch.long)
    splits = torch.empty((2, size), dtype=torch.long)
    return splits, counts, counts.new_empty(length), counts.new_empty(length)


class ExpertOwners:
    """The ranks that each own the same number of every layer's experts, in their order.

    All ranks call a layer's experts equally often: each call exchanges rows.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._number = ranks, len(numbered)
        numbered.append(ranks)

    def own(self, stack: Tensor) -> Tensor:
        """This rank's experts of a stack of all `[E, ...]`."""
        return stack.tensor_split(self._ranks.size)[self._ranks.rank]

    def dispatch(
        self, rows_RH: Tensor, counts_E: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Send rows, sorted by expert, to the ranks that own their experts.

        Returns the rows that came, sorted by expert, their experts' numbers here, the end of each
        expert's rows, and what takes results of these rows back.

        Args: `counts_E`: the rows of each expert.
        """
        from megatrain.compat.transformers import Copied  # plans do without it

        splits, counts, of_rows, order = _arrivals(counts_E, len(rows_RH), self._number)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        came = exchange(rows_RH, splits, self._number)

        def back(rows: Tensor) -> Tensor:
            as_came = Copied.apply(rows, places, order[:, None])
            return exchange(as_came, splits.flip(0), self._number)

        rows = Copied.apply(came, order, places[:, None])
        return rows, of_rows, counts.cumsum(0, dtype=torch.int32), back


def owned_names(spec: ModelSpec, ranks: int) -> set[str]:
    """The stacks of experts that ranks own. Raises InputError: they cannot."""
    shapes = {name: p.shape for name, p in spec.capture.model.named_parameters()}
    for full in spec.stacks:
        count, block = shapes[full][0], shapes[full].numel() // ranks
        for wrong, reason in (
            (full in spec.packed, "is kept packed (base)"),
            (count % ranks, f"has {count} experts, not as many for each rank"),
            (block % ALIGNMENT, f"gives a rank {block} elements, not whole {ALIGNMENT}s"),
        ):
            if wrong:
                raise InputError(f"placement.own_experts: {full} {reason}; set it false")
    if not spec.stacks:
        raise InputError("placement.own_experts: no layer has stacked experts; set it false")
    return {*spec.stacks}
