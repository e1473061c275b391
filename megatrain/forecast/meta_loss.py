"""Losses for whoever counts operations: cross entropy is one, and like chunks are counted once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatrain.forecast.op_counter import OpCounter, Work, added
from megatrain.loss import Summed, chunked_loss_gradients

_CHUNKS_RUN = 3


@torch.library.custom_op("megatrain::cross_entropy", mutates_args=())
def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Of which only the shapes are of interest."""
    raise NotImplementedError


@cross_entropy.register_fake
def _(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    return logits_NV.new_empty((), dtype=torch.float32)


def _pull_cross_entropy(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return torch.empty_like(ctx.saved_tensors[0]).copy_(ctx.saved_tensors[0]), None


cross_entropy.register_autograd(
    _pull_cross_entropy, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
)


def few_chunks(
    counter: OpCounter,
    head: Callable[[Tensor], Tensor],
    hidden_ND: Tensor,
    targets_N: Tensor,
    denominator: float,
    tokens: int,
    summed: Summed,
    parameters: list[Tensor],
    accumulate: Callable[[list[Tensor | None]], None],
    given: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """As `chunked_loss_gradients`, with the first, two more and the last run, the others counted.

    All chunks but the first and a shorter last one take the same.
    """
    skipped = max(0, len(hidden_ND) // tokens - _CHUNKS_RUN) * tokens
    done: list[Work] = []

    def counted(gradients: list[Tensor | None]) -> None:
        accumulate(gradients)
        done.append(counter.work)

    waiting = torch.empty_like(hidden_ND[:skipped])  # of the gradient, beside what is run
    rest = [each[skipped:] for each in given]
    run = hidden_ND[skipped:], targets_N[skipped:], denominator, tokens, summed, parameters
    loss, gradient_ND = chunked_loss_gradients(head, *run, counted, rest)
    if skipped:
        _, before, after, *_ = done
        each = added(after, before.times(-1)).times(skipped // tokens)
        counter.work = added(counter.work, replace(each, calls=0))
    del waiting, gradient_ND
    return loss, torch.empty_like(hidden_ND)
