"""Expert parallel: each rank holds some experts of a layer, and tokens go to the ranks of theirs.

Legend: N ranks, E experts of a layer, R rows of a rank's tokens (one for each expert of a token), S
rows of a rank's experts, H width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, get_ctx

from megatrain.errors import InputError
from megatrain.model.spec import ModelSpec
from megatrain.parallel.distributed import Ranks, numbered
from megatrain.tile.layout import ALIGNMENT


@custom_op("megatrain::count_rows", mutates_args=())
def _count(counts_E: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """The rows of each rank for each expert here `[N, E / N]`; on the host those to and from it."""
    counts = counts_E.long().view(numbered[ranks].size, -1)
    theirs = numbered[ranks].exchange(counts)
    return theirs, torch.stack([counts.sum(1), theirs.sum(1)]).cpu()


@_count.register_fake
def _(counts_E: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    size = numbered[ranks].size
    theirs = counts_E.new_empty((size, len(counts_E) // size), dtype=torch.long)
    return theirs, torch.empty((2, size), dtype=torch.long)


def _received(rows: Tensor, order: Tensor, splits: Tensor, ranks: int) -> Tensor:
    return numbered[ranks].exchange(rows, *splits.tolist())[order]


@custom_op("megatrain::send_rows", mutates_args=())
def _send(
    rows: Tensor, theirs: Tensor, splits: Tensor, ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Send rows `[R, H]`, sorted by expert, to the owners of these.

    Returns those that come, `[S, H]`, sorted by expert, their experts' numbers here, and the place
    `[S]` at which each came, rank by rank.
    """
    numbers = torch.arange(theirs.shape[1], device=theirs.device).repeat(len(theirs))
    size = int(splits[1].sum())  # told, so that the host does not wait for the device
    of_rows, order = numbers.repeat_interleave(theirs.flatten(), output_size=size).sort(stable=True)
    return _received(rows, order, splits, ranks), of_rows, order


@_send.register_fake
def _(rows: Tensor, theirs: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    # A forecast takes it that as many come as go.
    size = rows.shape[0] if rows.is_meta else get_ctx().new_dynamic_size()
    return rows.new_empty((size, rows.shape[1])), theirs.new_empty(size), theirs.new_empty(size)


@custom_op("megatrain::send_gradients", mutates_args=())
def _send_gradients(
    rows: Tensor, order: Tensor, splits: Tensor, after: Tensor, ranks: int
) -> Tensor:
    """As `send_rows`, for rows that came before; `after`: what must have been received."""
    return _received(rows, order, splits, ranks)


@_send_gradients.register_fake
def _(rows: Tensor, order: Tensor, *_: Any) -> Tensor:
    return rows.new_empty((order.shape[0], rows.shape[1]))


@custom_op("megatrain::return_rows", mutates_args=())
def _return(rows: Tensor, order: Tensor, splits: Tensor, length: int, ranks: int) -> Tensor:
    """Send rows back to the ranks that they came from; returns those that this one had sent."""
    returned = torch.empty_like(rows)
    returned[order] = rows
    return numbered[ranks].exchange(returned, *splits.flip(0).tolist())


@_return.register_fake
def _(rows: Tensor, order: Tensor, splits: Tensor, length: int, _: int) -> Tensor:
    return rows.new_empty((length, rows.shape[1]))


def _keep_sent(ctx: Any, inputs: tuple, output: tuple) -> None:
    rows, _, splits, ctx.ranks = inputs
    ctx.length = rows.shape[0]
    ctx.save_for_backward(output[2], splits)


def _keep_returned(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, order, splits, _, ctx.ranks = inputs
    # All ranks exchange in one order: gradients go once what a backward computes again is there.
    ctx.save_for_backward(order, splits, output)


_send.register_autograd(
    lambda ctx, gradient, *_: (
        _return(gradient.contiguous(), *ctx.saved_tensors, ctx.length, ctx.ranks),
        *(None, None, None),
    ),
    setup_context=_keep_sent,
)
_return.register_autograd(
    lambda ctx, gradient: (
        _send_gradients(gradient.contiguous(), *ctx.saved_tensors, ctx.ranks),
        *(None,) * 4,
    ),
    setup_context=_keep_returned,
)


EXCHANGES = {f"megatrain::{name}" for name in ("send_rows", "send_gradients", "return_rows")}
"""Operations that exchange rows between ranks."""


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
        number, length = self._number, rows_RH.shape[0]
        theirs, splits = _count(counts_E, number)
        rows, of_rows, order = _send(rows_RH, theirs, splits, number)

        def back(rows: Tensor) -> Tensor:
            return _return(rows, order, splits, length, number)

        return rows, of_rows, theirs.sum(0).cumsum(0, dtype=torch.int32), back


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
