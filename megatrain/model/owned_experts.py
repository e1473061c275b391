"""Expert parallelism: each rank owns some experts of a layer, and tokens are sent to the owners.

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
    """The rows that this rank receives if each is sent to the owner of its expert.

    Returns the numbers of rows sent to and received from each rank `[2, N]`, on the host; the
    number of rows of each expert here; and of the received rows, sorted by expert, the experts'
    numbers `[S]` and the places `[S]` in the order of arrival, rank by rank.

    Args: `length`: the number of rows of this rank; `ranks`: the place of all ranks in `numbered`.
    """
    counts = counts_E.long().view(numbered[ranks].size, -1)
    received = numbered[ranks].exchange(counts)
    splits = torch.stack([counts.sum(1), received.sum(1)]).cpu()
    numbers = torch.arange(received.shape[1], device=received.device).repeat(len(received))
    size = int(splits[1].sum())  # with the size the host does not wait for the device
    unsorted = numbers.repeat_interleave(received.flatten(), output_size=size)
    experts, order = unsorted.sort(stable=True)
    return splits, received.sum(0), experts, order


@_arrivals.register_fake
def _(counts_E: Tensor, length: int, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = numbered[ranks].size
    counts = counts_E.new_empty(len(counts_E) // size, dtype=torch.long)
    splits = torch.empty((2, size), dtype=torch.long)
    return splits, counts, counts.new_empty(length), counts.new_empty(length)


class ExpertOwners:
    """The ranks among which the experts of every layer are divided evenly, in their order.

    All ranks call a layer's experts equally often, as each call exchanges rows.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._number = ranks, len(numbered)
        numbered.append(ranks)

    def own(self, stack: Tensor) -> Tensor:
        """This rank's experts of a stack `[E, ...]`."""
        return stack.tensor_split(self._ranks.size)[self._ranks.rank]

    def dispatch(
        self, rows_RH: Tensor, counts_E: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Send rows, sorted by expert, to the owners; `counts_E` is the rows of each expert.

        Returns the received rows, sorted by expert, the number of each row's expert here, the end
        of each expert's rows, and a function that sends results of these rows back.
        """
        from megatrain.compat.transformers import Copied  # plans do without it

        splits, counts, experts, order = _arrivals(counts_E, len(rows_RH), self._number)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        received = exchange(rows_RH, splits, self._number)

        def send_back(rows: Tensor) -> Tensor:
            in_order_of_arrival = Copied.apply(rows, places, order[:, None])
            return exchange(in_order_of_arrival, splits.flip(0), self._number)

        rows = Copied.apply(received, order, places[:, None])
        return rows, experts, counts.cumsum(0, dtype=torch.int32), send_back


def owned_names(spec: ModelSpec, ranks: int) -> set[str]:
    """The stacks whose experts ranks can own. Raises InputError: a stack cannot be divided."""
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
