"""Expert parallel: each rank holds some experts of a layer, and tokens go to the ranks of theirs.

Legend: N ranks, E experts of a layer, R rows (a token's copy for one of its experts), H width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatrain.compat.transformers import Copied, takes_grouped_products
from megatrain.errors import InputError
from megatrain.model.spec import ModelSpec
from megatrain.parallel.distributed import ProcessGroups
from megatrain.tile.layout import ALIGNMENT

Map = Callable[[Tensor], Tensor]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ranks: ProcessGroups, rows: Tensor, sent: list[int], received: list[int]
    ) -> Tensor:
        """The rows that all ranks have sent to this one, `received` of each, in their order."""
        ctx.ranks, ctx.sent, ctx.received = ranks, sent, received
        return ranks.exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        """The gradients of the rows that were sent, from the ranks that have them."""
        return None, ctx.ranks.exchange(grads[0], ctx.received, ctx.sent), None, None


class ExpertOwners:
    """The ranks that each own the same number of every layer's experts, in their order.

    All ranks call a layer's experts equally often: each call exchanges rows.
    """

    def __init__(self, ranks: ProcessGroups) -> None:
        self._ranks = ranks

    def own(self, stack: Tensor) -> Tensor:
        """This rank's experts of a stack of all `[E, ...]`."""
        return stack.tensor_split(self._ranks.size)[self._ranks.rank]

    def dispatch(self, rows_RH: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Tensor, Map]:
        """Send rows, sorted by expert, to the ranks that own their experts.

        Returns the rows that came, sorted by expert, their experts' numbers here, the end of each
        expert's rows, and what takes results of these rows back.

        Args: `counts_E`: the rows of each expert.
        """
        ranks, counts = self._ranks, counts_E.long().view(self._ranks.size, -1)
        theirs = ranks.exchange(counts)
        sent, received = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
        numbers = torch.arange(theirs.shape[1], device=rows_RH.device).repeat(ranks.size)
        of_rows, order = numbers.repeat_interleave(theirs.flatten()).sort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        arrived = _Exchange.apply(ranks, rows_RH, sent, received)
        rows = Copied.apply(arrived, order, places.view(-1, 1))

        def back(rows: Tensor) -> Tensor:
            rows = Copied.apply(rows, places, order.view(-1, 1))
            return _Exchange.apply(ranks, rows, received, sent)

        return rows, of_rows, theirs.sum(0).cumsum(0, dtype=torch.int32), back


def owned_names(spec: ModelSpec, ranks: int) -> set[str]:
    """The stacks of experts that ranks own. Raises InputError: they cannot."""
    names: set[str] = set()
    for layer in spec.layers:
        for path, module in layer.module.named_modules():
            if not takes_grouped_products(module, []):
                continue
            for name, stack in module.named_parameters(recurse=False):
                full, block = f"{layer.name}.{path}.{name}", stack.numel() // ranks
                names.add(full)
                for wrong, why in (
                    (full in spec.packed, "is kept packed (base)"),
                    (len(stack) % ranks, f"has {len(stack)} experts, not as many for each rank"),
                    (block % ALIGNMENT, f"gives a rank {block} elements, not whole {ALIGNMENT}s"),
                ):
                    if wrong:
                        raise InputError(f"placement.own_experts: {full} {why}; set it false")
    if not names:
        raise InputError("placement.own_experts: no layer has stacked experts; set it false")
    return names
