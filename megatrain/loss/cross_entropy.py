"""Cross entropy of each label: what language models are trained on, unless they are told else."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megatrain.loss.base import IGNORED, Loss, Statistics, check_temperature


def cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Cross entropy summed over the labelled tokens, in fp32 (scalar)."""
    return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """The mean over all labelled tokens of the step; logits are divided by `temperature`.

    Raises InputError: the temperature is not above 0.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_temperature(self)

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        assert statistics.log_prob is not None
        return -statistics.log_prob

    def summed(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        return cross_entropy_sum(self.tempered(logits_NV), targets_N)

    def slopes(
        self, statistics: Statistics, targets_N: Tensor, extras: Sequence[Tensor], normaliser: float
    ) -> Statistics:
        return Statistics(-((targets_N != IGNORED).float() / normaliser))


CROSS_ENTROPY = CrossEntropy()
