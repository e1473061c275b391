"""Cross entropy and a share of the squared log-sum-exp, which keeps logits from drifting off."""

import math
from dataclasses import dataclass

from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import Loss, Statistics


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
        assert statistics.log_prob is not None and statistics.lse is not None
        return self.share * statistics.lse.square() - statistics.log_prob
