"""Next-token cross entropy in chunks of tokens: the logits of a step never exist as a whole.

Legend: N tokens of a micro-batch, C tokens of a chunk, D width, V vocabulary, R rows of the head's
table.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
CrossEntropy = Callable[[Tensor, Tensor], Tensor]


def targets_of(labels_BT: Tensor, shift: int = 1) -> Tensor:
    """What each position predicts `[B, T]`: the label `shift` further; nothing at a row's end."""
    targets_BT = torch.full_like(labels_BT, IGNORED)
    targets_BT[:, : labels_BT.shape[1] - shift] = labels_BT[:, shift:]
    return targets_BT


def num_labelled(targets_BT: Tensor) -> int:
    """How many positions predict something."""
    return int((targets_BT != IGNORED).sum())


def cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Cross entropy summed over the labelled tokens, in fp32 (scalar)."""
    return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORED, reduction="sum")


def chunked_loss(
    head: Callable[[Tensor], Tensor],
    hidden_ND: Tensor,
    targets_N: Tensor,
    tokens: int,
    cross_entropy: CrossEntropy,
) -> Tensor:
    """Summed cross entropy (scalar, fp32) without gradients, `tokens` rows of logits at a time.

    Args:
        head: hidden `[1, C, D]` to logits `[1, C, V]`.
    """
    total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
    for start in range(0, len(hidden_ND), tokens):
        logits = head(hidden_ND[None, start : start + tokens])
        total += cross_entropy(logits[0], targets_N[start : start + tokens])
    return total


def chunked_losses(
    head: Callable[[Tensor], Tensor], hidden_ND: Tensor, targets_N: Tensor, tokens: int
) -> Tensor:
    """As `chunked_loss`, of each token `[N]`; 0 where there is no target."""
    found = []
    for start in range(0, len(hidden_ND), tokens):
        logits, targets = (
            head(hidden_ND[None, start : start + tokens]),
            targets_N[start : start + tokens],
        )
        each = F.cross_entropy(logits[0].float(), targets, ignore_index=IGNORED, reduction="none")
        found.append(each)
    return torch.cat(found)


def chunked_loss_gradients(
    head: Callable[[Tensor], Tensor],
    hidden_ND: Tensor,
    targets_N: Tensor,
    denominator: float,
    tokens: int,
    cross_entropy: CrossEntropy,
    parameters: list[Tensor],
    accumulate: Callable[[list[Tensor | None]], None],
) -> tuple[Tensor, Tensor]:
    """Loss and gradients of one micro-batch's share of a step's mean loss.

    Args:
        head: hidden `[1, C, D]` to logits `[1, C, V]`, differentiable in `parameters`.
        denominator: labelled tokens of the whole step.
        tokens: C.
        cross_entropy: `cross_entropy_sum`, or a compiled one.
        accumulate: takes each chunk's gradients of `parameters`.

    Returns:
        The summed cross entropy (not divided), and the gradient of `hidden_ND`.
    """
    total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
    gradient_ND = torch.empty_like(hidden_ND)
    for start in range(0, len(hidden_ND), tokens):
        rows = slice(start, start + tokens)
        with torch.enable_grad():
            chunk_CD = hidden_ND[None, rows].detach().requires_grad_()
            summed = cross_entropy(head(chunk_CD)[0], targets_N[rows])
            loss = summed / denominator
        grads = torch.autograd.grad(loss, [chunk_CD, *parameters], allow_unused=True)
        gradient_ND[rows] = grads[0][0]
        accumulate(list(grads[1:]))
        total += summed.detach()
    return total, gradient_ND


def range_statistics(logits_CR: Tensor, places_C: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the logits of some rows, and each target's logit, both `[C]` in fp32.

    Args:
        places_C: each target's row, counted from the first of these; the logit of one that is none
            of these is 0.
    """
    logits = logits_CR.float()
    num = logits.shape[1]
    inside = (places_C >= 0) & (places_C < num)
    picked_C = logits.gather(1, places_C.clamp(0, num - 1)[:, None])[:, 0]
    return logits.logsumexp(1), torch.where(inside, picked_C, 0.0)


def range_gradient(logits_CR: Tensor, places_C: Tensor, lse_C: Tensor, weights_C: Tensor) -> Tensor:
    """The loss's gradient of the logits of some rows `[C, R]`, in their type.

    Args:
        places_C: as for `range_statistics`.
        lse_C: log-sum-exp over all rows, fp32.
        weights_C: of each token's cross entropy in the loss, fp32.
    """
    share_CR = (logits_CR.float() - lse_C[:, None]).exp()
    rows_R = torch.arange(logits_CR.shape[1], device=logits_CR.device)
    minus_CR = torch.where(rows_R == places_C[:, None], share_CR - 1, share_CR)
    return (minus_CR * weights_C[:, None]).to(logits_CR.dtype)
