"""Losses for whoever counts operations: cross entropy is one, and like chunks are counted once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.forecast.op_counter import OpCounter, Work, added, shapes_only
from megatrain.loss import JointLoss, Summed, chunked_loss_gradients, chunked_losses

_CHUNKS_RUN = 3  # of a head's; the logits of so many take more memory than what is of all tokens


@shapes_only
def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Cross entropy of which only the shapes are of interest."""
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
    skipped = chunks_left_out(len(hidden_ND), tokens) * tokens
    done: list[Work] = []

    def counted(gradients: list[Tensor | None]) -> None:
        accumulate(gradients)
        done.append(counter.work)

    waiting = torch.empty_like(hidden_ND[:skipped])  # of the gradient, beside what is run
    rest = [each[skipped:] for each in given]
    run = hidden_ND[skipped:], targets_N[skipped:], denominator, tokens, summed, parameters
    loss, gradient_ND = chunked_loss_gradients(head, *run, counted, rest)
    _count(counter, done, skipped // tokens)
    del waiting, gradient_ND
    return loss, torch.empty_like(hidden_ND)


def few_losses(
    counter: OpCounter,
    head: Callable[[Tensor], Tensor],
    hidden_ND: Tensor,
    targets_N: Tensor,
    tokens: int,
    each_of: Summed,
    given: Sequence[Tensor] = (),
) -> Tensor:
    """As `chunked_losses`; few of the chunks are run, and the others counted like them."""
    skipped = chunks_left_out(len(hidden_ND), tokens) * tokens
    done: list[Work] = []

    def counted(*chunk: Tensor) -> Tensor:
        losses = each_of(*chunk)
        done.append(counter.work)
        return losses

    rest = [each[skipped:] for each in given]
    losses_N = chunked_losses(head, hidden_ND[skipped:], targets_N[skipped:], tokens, counted, rest)
    _count(counter, done, skipped // tokens)
    return losses_N.new_empty(len(hidden_ND))


def chunks_left_out(num_tokens: int, tokens: int) -> int:
    """Chunks of `tokens` that need not be run: they take what others take."""
    return max(0, num_tokens // tokens - _CHUNKS_RUN)


def _count(counter: OpCounter, done: Sequence[Work], chunks: int) -> None:
    """Count more chunks; `done` is all work after each that was run."""
    if chunks:
        _, before, after, *_ = done
        each = added(after, before.times(-1)).times(chunks)
        counter.work = added(counter.work, each._replace(calls=0))


class TwoVisits(JointLoss):
    """Any loss of all tokens together: of what it computes itself only the results count."""

    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *given: Tensor) -> Tensor:
        raise NotImplementedError


TWO_VISITS = TwoVisits()
