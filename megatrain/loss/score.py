"""The score of each label in evaluations: its cross entropy, and whether it is the likeliest."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatrain.loss.base import IGNORED, Loss, Statistics
from megatrain.loss.cross_entropy import cross_entropy_sum


@dataclass(frozen=True)
class Score(Loss):
    """Cross entropy and 1 for a label that is the likeliest token, `[N, 2]`; without gradients."""

    uses_margin: ClassVar[bool] = True

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        assert statistics.log_prob is not None and statistics.margin is not None
        return torch.stack([-statistics.log_prob, (statistics.margin >= 0).float()], 1)

    def each(self, statistics: Statistics, targets_N: Tensor, *extras: Tensor) -> Tensor:
        return torch.where((targets_N != IGNORED)[:, None], self.tokens(statistics), 0.0)

    def summed(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        right = self.each_of(logits_NV, targets_N)[:, 1].sum()
        return torch.stack([cross_entropy_sum(logits_NV, targets_N), right])


SCORE = Score()
