"""Losses in chunks of tokens or of rows: the logits of a step never exist as a whole.

Legend: N tokens of a micro-batch, C tokens of a chunk, D width, V vocabulary, R rows of the head's
table, K tokens that a loss chooses.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Summed = Callable[..., Tensor]  # of logits `[C, V]`, targets `[C]` and more numbers `[C]` of each


def chunk_results(
    head: Callable[[Tensor], Tensor],
    hidden_ND: Tensor,
    targets_N: Tensor,
    tokens: int,
    results: Summed,
    extras: Sequence[Tensor] = (),
) -> Iterator[Tensor]:
    """Apply `results` to the logits of each chunk of `tokens`, without gradients.

    Args:
        head: hidden `[1, C, D]` to logits `[1, C, V]`.
        results: such as `Loss.summed`, compiled or not, or `Loss.each_of`.
        extras: its inputs besides the targets, `[N]` or `[N, K]`.
    """
    for start in range(0, len(hidden_ND), tokens):
        rows = slice(start, start + tokens)
        logits = head(hidden_ND[None, rows])
        yield results(logits[0], targets_N[rows], *(extra[rows] for extra in extras))


def chunked_losses(*chunks: Any) -> Tensor:
    """The loss of each token `[N]`: the concatenated `chunk_results` of `Loss.each_of`."""
    return torch.cat([*chunk_results(*chunks)])


def chunked_loss_gradients(
    head: Callable[[Tensor], Tensor],
    hidden_ND: Tensor,
    targets_N: Tensor,
    denominator: float,
    tokens: int,
    summed: Summed,
    parameters: list[Tensor],
    accumulate: Callable[[list[Tensor | None]], None],
    extras: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Loss and gradients of one micro-batch's share of a step's loss.

    Args:
        head, tokens, summed, extras: as of `chunk_results`; `head` differentiable in `parameters`.
        denominator: of the whole step's loss: its labelled tokens, or what the loss says.
        accumulate: takes each chunk's gradients of `parameters`.

    Returns:
        The summed loss (not divided), and the gradient of `hidden_ND`.
    """
    total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
    gradient_ND = torch.empty_like(hidden_ND)
    for start in range(0, len(hidden_ND), tokens):
        rows = slice(start, start + tokens)
        with torch.enable_grad():
            chunk_CD = hidden_ND[None, rows].detach().requires_grad_()
            beside = [extra[rows] for extra in extras]
            part = summed(head(chunk_CD)[0], targets_N[rows], *beside)
            loss = part / denominator
        grads = torch.autograd.grad(loss, [chunk_CD, *parameters], allow_unused=True)
        gradient_ND[rows] = grads[0][0]
        accumulate(list(grads[1:]))
        total += part.detach()
    return total, gradient_ND


def range_statistics(logits_CR: Tensor, places_C: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the logits of some rows, and each target's logit, both `[C]` in fp32.

    Args:
        places_C: each target's row, counted from the first of these rows; the logit is 0 if the
            target is none of them.
    """
    return logits_CR.float().logsumexp(1), range_logits(logits_CR, places_C[:, None])[:, 0]


def range_logits(logits_CR: Tensor, places_CK: Tensor) -> Tensor:
    """The logits of tokens in `places_CK` in fp32; 0 for tokens whose row is none of these."""
    num = logits_CR.shape[1]
    inside_CK = (places_CK >= 0) & (places_CK < num)
    picked_CK = logits_CR.gather(1, places_CK.clamp(0, num - 1)).float()
    return torch.where(inside_CK, picked_CK, 0.0)


def largest_logits(logits_CR: Tensor, most: int, start: int = 0) -> Tensor:
    """The `most` largest logits and their row numbers, `[C, 2, K]` in fp32.

    Args:
        start: number of the first row; there may be fewer rows than `most`.
    """
    values_CK, places_CK = logits_CR.float().topk(min(most, logits_CR.shape[1]))
    return torch.stack([values_CK, (places_CK + start).float()], 1)


def larger_logits(one_C2K: Tensor, other_C2K: Tensor, most: int) -> Tensor:
    """The `most` largest of two ranges, as `largest_logits` gives them."""
    both = torch.cat([one_C2K, other_C2K], 2)
    places_CK = both[:, 0].topk(min(most, both.shape[2])).indices
    return both.gather(2, places_CK[:, None].expand(-1, 2, -1))


def range_gradient(
    logits_CR: Tensor,
    places_C: Tensor,
    lse_C: Tensor,
    weights_C: Tensor,
    lse_slope_C: Tensor | None = None,
    mean_slope_C: Tensor | None = None,
    chosen_CK: Tensor | None = None,
    chosen_slope_CK: Tensor | None = None,
) -> Tensor:
    """The loss's gradient by the logits of some rows `[C, R]`, in the logits' dtype.

    Args:
        places_C: as for `range_statistics`.
        lse_C: log-sum-exp over all rows, fp32.
        weights_C: the weight of each token's cross entropy in the loss, fp32: minus the loss's
            derivative by the target's log-probability.
        lse_slope_C, mean_slope_C: further derivatives by the log-sum-exp, and by each logit
            through their mean; None: zero.
        chosen_CK, chosen_slope_CK: places of tokens, as for targets, and the loss's derivatives by
            their logits; None: zero.
    """
    share_CR = (logits_CR.float() - lse_C[:, None]).exp()
    rows_R = torch.arange(logits_CR.shape[1], device=logits_CR.device)
    minus_CR = torch.where(rows_R == places_C[:, None], share_CR - 1, share_CR)
    gradient_CR = minus_CR * weights_C[:, None]
    if lse_slope_C is not None:
        gradient_CR = gradient_CR + share_CR * lse_slope_C[:, None]
    if mean_slope_C is not None:
        gradient_CR = gradient_CR + mean_slope_C[:, None]
    if chosen_CK is not None and chosen_slope_CK is not None:
        num = logits_CR.shape[1]
        inside_CK = (chosen_CK >= 0) & (chosen_CK < num)
        slope_CK = torch.where(inside_CK, chosen_slope_CK, 0.0)
        gradient_CR.scatter_add_(1, chosen_CK.clamp(0, num - 1), slope_CK)
    return gradient_CR.to(logits_CR.dtype)
