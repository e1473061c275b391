"""Losses of each token alone, as cross entropy is, and numbers of each without gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import IGNORED, Loss, Statistics


def cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Cross entropy summed over the labelled tokens, in fp32 (scalar)."""
    return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """The mean over all labelled tokens of the step; logits are divided by `temperature`.

    Raises InputError: the temperature is not above 0.
    """

    temperature: float = 1.0

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        return -statistics.log_prob

    def summed(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        return cross_entropy_sum(self.tempered(logits_NV), targets_N)


CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True)
class TokenWeights(Loss):
    """The weighted mean of cross entropy: `token_weights` `[B, T]` has one for each label.

    The sum is divided by the weights of all labelled tokens of the step. Logits are divided by
    `temperature` first.

    Raises InputError: the temperature is not above 0.
    """

    temperature: float = 1.0
    inputs: ClassVar[tuple[str, ...]] = ("token_weights",)

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        return -statistics.log_prob * extras[0]

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        used = [w[t != IGNORED] for t, [w] in zip(targets, extras, strict=True)]
        lowest = min(
            (float(used_weights.min()) for used_weights in used if len(used_weights)), default=0.0
        )
        if lowest < 0:
            raise InputError(f"token_weights holds {lowest}; weights must not be negative")
        total = float(sum(used_weights.double().sum() for used_weights in used))
        if total == 0 and any(map(len, used)):
            raise InputError("token_weights are 0 for all labels of this step; leave the step out")
        return total


TOKEN_WEIGHTS = TokenWeights()


@dataclass(frozen=True)
class LabelSmoothing(Loss):
    """`(1 - share) * cross entropy + share * its mean over all tokens of the vocabulary`.

    As torch's `cross_entropy(label_smoothing=share)` (Szegedy et al., 2016, section 7).

    Raises InputError: `share` is not at least 0 and below 1.
    """

    share: float
    uses_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise InputError(f"label smoothing is {self.share!r}; it must be from 0 to below 1")

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        return (
            self.share * (statistics.lse - statistics.mean) - (1 - self.share) * statistics.log_prob
        )


@dataclass(frozen=True)
class ZLoss(Loss):
    """The mean over labels of `cross entropy + share * lse ** 2`, lse the logits' log-sum-exp.

    Chowdhery et al., 2022, https://arxiv.org/abs/2204.02311, section 5 (share 1e-4).

    Raises InputError: `share` is no number above 0.
    """

    share: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 < self.share < math.inf:
            raise InputError(f"the share of z-loss is {self.share!r}; it must be a number above 0")

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        return self.share * statistics.lse.square() - statistics.log_prob


@dataclass(frozen=True)
class Score(Loss):
    """Cross entropy and 1 for a label that is the likeliest token, `[N, 2]`; without gradients."""

    uses_margin: ClassVar[bool] = True

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        return torch.stack([-statistics.log_prob, (statistics.margin >= 0).float()], 1)

    def summed(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        right = self.each_of(logits_NV, targets_N)[:, 1].sum()
        return torch.stack([cross_entropy_sum(logits_NV, targets_N), right])


SCORE = Score()


@dataclass(frozen=True)
class TopTokens(Loss):
    """The `top_k` likeliest tokens in a label's place: their log-probabilities, and their ids.

    Each token has `[2, K]` in place of a loss, in fp32, which holds ids below 2 ** 24 exactly; 0
    where it has no target. Without gradients.

    Raises InputError: `top_k` is not at least 1, or `temperature` not above 0.
    """

    top_k: int = 1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if type(self.top_k) is not int or self.top_k < 1:
            raise InputError(f"top_k is {self.top_k!r}; it must be an integer of at least 1")
        super().__post_init__()

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        logits_NK, ids_NK = statistics.top.unbind(1)
        log_probs_NK = (logits_NK - statistics.lse[:, None]).clamp(
            max=0.0
        )  # but for rounding they are
        return torch.stack([log_probs_NK, ids_NK], 1)
