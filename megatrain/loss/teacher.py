"""The tokens that a teacher finds likeliest in the place of each label."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import IGNORED, Loss, Statistics, check_temperature


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
        check_temperature(self)

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        assert statistics.top is not None and statistics.lse is not None
        logits_NK, ids_NK = statistics.top.unbind(1)
        log_probs_NK = (logits_NK - statistics.lse[:, None]).clamp(
            max=0.0
        )  # but for rounding they are
        return torch.stack([log_probs_NK, ids_NK], 1)

    def each(self, statistics: Statistics, targets_N: Tensor, *extras: Tensor) -> Tensor:
        return torch.where((targets_N != IGNORED)[:, None, None], self.tokens(statistics), 0.0)
