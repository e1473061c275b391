"""Losses of pairs that need no reference model."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import IGNORED
from megatrain.loss.replies import PairLoss, Replies, check_settings, unlikeliness


@dataclass(frozen=True)
class SimPO(PairLoss):
    """The mean over pairs of `-log sigmoid(beta * difference of mean log-probabilities - gamma)`.

    Meng et al., 2024, https://arxiv.org/abs/2405.14734, equation 6; TRL's `CPOTrainer` with
    `loss_type="simpo"` and `cpo_alpha=0`. Smoothing as of DPO.

    Raises InputError: a setting is out of range.
    """

    beta: float = 2.0
    gamma: float = 1.0
    label_smoothing: float = 0.0
    inputs: ClassVar[tuple[str, ...]] = ("pair", "chosen")

    def __post_init__(self) -> None:
        check_settings("SimPO", self.beta, self.label_smoothing)
        if not math.isfinite(self.gamma):
            raise InputError(f"SimPO's gamma is {self.gamma!r}; it must be a number")

    def pairs(self, chosen: Replies, rejected: Replies) -> Tensor:
        margin = self.beta * (chosen.mean - rejected.mean) - self.gamma
        return unlikeliness(margin, self.label_smoothing)

    def rewards(self, replies: Replies) -> Tensor:
        return self.beta * replies.mean


@dataclass(frozen=True)
class ORPO(PairLoss):
    """Cross entropy of chosen texts, less `beta * log sigmoid` of the log odds ratio of replies.

    Hong et al., 2024, https://arxiv.org/abs/2403.07691, equation 6; odds are those of a reply's
    mean log-probability. The first is the mean over the step's labels of chosen texts, their
    prompts included, as in TRL's `ORPOTrainer`.

    A micro-batch has for each label, as floating-point numbers `[B, T]`, `pair` and `chosen` (see
    `PairLoss`) and
        reply: 1 at labels of replies, 0 at those of prompts, which only chosen texts have.

    Raises InputError: `beta` is not above 0.
    """

    beta: float = 0.1
    inputs: ClassVar[tuple[str, ...]] = ("pair", "chosen", "reply")

    def __post_init__(self) -> None:
        check_settings("ORPO", self.beta)

    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        losses = self.pairs(*self.replies(log_prob_N, targets_N, *extras))
        chosen_N = (targets_N != IGNORED) & (extras[1] == 1)
        nll = -torch.where(chosen_N, log_prob_N, 0).double().sum() / chosen_N.sum()
        return losses.sum() + len(losses) * nll

    def pairs(self, chosen: Replies, rejected: Replies) -> Tensor:
        odds = [
            replies.mean - torch.log(-torch.expm1(replies.mean)) for replies in (chosen, rejected)
        ]
        return -self.beta * F.logsigmoid(odds[0] - odds[1])

    def rewards(self, replies: Replies) -> Tensor:
        return self.beta * replies.mean
