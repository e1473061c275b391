"""Next-token cross entropy in chunks of tokens: the logits of a step never exist as a whole.

Legend: N tokens of a micro-batch, C tokens of a chunk, D width, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
CrossEntropy = Callable[[Tensor, Tensor], Tensor]


def next_token_targets(labels_BT: Tensor) -> Tensor:
    """What each position predicts `[B, T]`: the next position's label; nothing at a row's end."""
    targets_BT = torch.full_like(labels_BT, IGNORED)
    targets_BT[:, :-1] = labels_BT[:, 1:]
    return targets_BT


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
