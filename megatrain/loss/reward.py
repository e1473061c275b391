"""Reward models: a score for each reply, higher for the better one of a pair."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import Loss, Statistics
from megatrain.loss.replies import PairLoss, Replies, labels_of


@dataclass(frozen=True)
class TokenScore(Loss):
    """The score of each labelled token: the one logit that the head of such a model makes."""

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        assert statistics.lse is not None  # of a single logit it is that logit
        return statistics.lse


@dataclass(frozen=True)
class ScoreWeights(Loss):
    """A loss with the slope `-token_weights` by each token's score."""

    inputs: ClassVar[tuple[str, ...]] = ("token_weights",)

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        assert statistics.lse is not None
        return -statistics.lse * extras[0]


TOKEN_SCORE = TokenScore()


@dataclass(frozen=True)
class Reward(PairLoss):
    """The mean over pairs of `-log sigmoid(score of the chosen - score of the rejected - margin)`.

    Bradley and Terry, 1952; with margins Touvron et al., 2023, https://arxiv.org/abs/2307.09288,
    equation 2. With `center_rewards_coefficient` as many times the mean of the squared sums of both
    scores is added, which keeps them around 0 (Eisenstein et al., 2023,
    https://arxiv.org/abs/2312.09244, appendix B). As TRL's `RewardTrainer` has them.

    The model has a sequence head with one label (`AutoModelForSequenceClassification`). Labels are
    0 at the token of each reply that is scored, the last one that is no padding, and -100
    elsewhere. A micro-batch has for each label, as floating-point numbers `[B, T]`, `pair` and
    `chosen` (see `PairLoss`), and with `margin`
        margin: by how much the chosen reply is the better one, the same at both.

    Raises InputError: the coefficient is not above 0.
    """

    center_rewards_coefficient: float | None = None
    margin: bool = False
    inputs: ClassVar[tuple[str, ...]] = ("pair", "chosen")
    weighed = ScoreWeights()

    def __post_init__(self) -> None:
        share = self.center_rewards_coefficient
        if share is not None and not 0 < share < math.inf:
            raise InputError(f"center_rewards_coefficient is {share!r}; it must be above 0")
        if self.margin:
            object.__setattr__(self, "inputs", (*type(self).inputs, "margin"))

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        return TOKEN_SCORE.tokens(statistics)

    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        replies = self.replies(log_prob_N, targets_N, *extras)
        if not self.margin:
            return self.pairs(*replies).sum()
        margins = self.replies(extras[self.inputs.index("margin")], targets_N, *extras)[0].log_prob
        return self.pairs(replies[0]._replace(reference=margins), replies[1]).sum()

    def pairs(self, chosen: Replies, rejected: Replies) -> Tensor:
        losses = -F.logsigmoid(chosen.gain - rejected.gain)  # a margin is less gain
        if self.center_rewards_coefficient is None:
            return losses
        both = (chosen.log_prob + rejected.log_prob).square()
        return losses + self.center_rewards_coefficient * both

    def rewards(self, replies: Replies) -> Tensor:
        return replies.log_prob

    def measures(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        measures = super().measures(log_prob_N, targets_N, *extras)
        return {name: value for name, value in measures.items() if name.startswith("rewards/")}

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        """The number of pairs. Raises InputError: as `PairLoss`, or a label is none of a score."""
        pair, chosen = (labels_of(number, targets, extras) for number in (0, 1))
        if any(bool((target > 0).any()) for target in targets):
            raise InputError("labels must be 0 at the tokens that are scored, and -100 elsewhere")
        replies = torch.stack([pair, chosen], 1)
        if len(replies.unique(dim=0)) < len(replies):
            raise InputError("a reply has several labels; one token of each is scored")
        return super().normaliser(targets, extras)
