"""Distillation: a model learns what another one, its teacher, predicts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import Loss, Statistics

_NOT_KEPT = -1e8  # log-probabilities below stand for none
_MOST = -1e-7  # of the log of all kept probabilities together: something is left for the others


@dataclass(frozen=True)
class Distillation(Loss):
    """A divergence from the teacher's likeliest tokens, mixed with cross entropy.

    Of each label `(1 - share) * divergence + share * cross entropy`, over the K tokens that were
    kept of the teacher, whose probabilities are not scaled up for the tokens left out. p is the
    teacher's, q the model's, of the whole vocabulary; `share` is `cross_entropy`.

    `beta` chooses the divergence, as of TRL's `generalized_jsd_loss` (Agarwal et al., 2023,
    https://arxiv.org/abs/2306.13649, equation 1): at 0 forward KL, the sum of
    `p * (log p - log q)` (Hinton et al., 2015, https://arxiv.org/abs/1503.02531, at temperature 1),
    at 1 reverse KL, between them `beta * KL(p, m) + (1 - beta) * KL(q, m)` with
    `m = beta * p + (1 - beta) * q`. With `add_tail` all other tokens together count as one more,
    so that both are whole distributions: without, forward KL of few tokens may be negative.
    All logits are divided by `temperature` first, the teacher's before they are given; as in TRL,
    the loss is not multiplied by its square.

    A micro-batch has for each label, `[B, T, K]`:
        teacher_ids: the tokens that the teacher finds likeliest in the label's place, int64.
        teacher_log_probs: their log-probabilities, floating-point; -1e9 where fewer were kept.

    Raises:
        InputError: `cross_entropy` or `beta` is not from 0 to 1, `temperature` not above 0, or
            not 1 beside a share of cross entropy, which is of the logits as they are.
    """

    cross_entropy: float = 0.0
    beta: float = 0.0
    add_tail: bool = False
    temperature: float = 1.0
    choices: ClassVar[tuple[str, ...]] = ("teacher_ids", "teacher_log_probs")

    def __post_init__(self) -> None:
        shares = {"share of cross entropy": self.cross_entropy, "beta of distillation": self.beta}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise InputError(f"the {name} is {share!r}; it must be from 0 to 1")
        super().__post_init__()
        if self.cross_entropy and self.temperature != 1:
            raise InputError("distillation has cross_entropy or a temperature; leave one out")

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        # In fp64: the slopes of reverse KL are differences of what is nearly the same.
        model_NK = statistics.chosen.double() - statistics.lse.double()[:, None]
        teacher_NK = extras[1].double()
        if self.beta or self.add_tail:
            model_NK = torch.where(teacher_NK > _NOT_KEPT, model_NK, teacher_NK)
        if self.add_tail:
            teacher_NK, model_NK = _with_tail(teacher_NK), _with_tail(model_NK)
        divergence_N = self._divergence(teacher_NK, model_NK).float()
        return (1 - self.cross_entropy) * divergence_N - self.cross_entropy * statistics.log_prob

    def _divergence(self, teacher_NK: Tensor, model_NK: Tensor) -> Tensor:
        """The divergence of each token `[N]`, from log-probabilities `[N, K]`."""
        if self.beta == 0:
            return _kl(teacher_NK, model_NK)
        if self.beta == 1:
            return _kl(model_NK, teacher_NK)
        model_log, teacher_log = math.log1p(-self.beta), math.log(self.beta)  # of their shares
        mixed_NK = torch.logaddexp(model_NK + model_log, teacher_NK + teacher_log)
        return self.beta * _kl(teacher_NK, mixed_NK) + (1 - self.beta) * _kl(model_NK, mixed_NK)

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        """The labelled tokens. Raises InputError: a log-probability is above 0."""
        highest = max(float(log_probs.max()) for _, log_probs in extras)
        if highest > 0:
            raise InputError(f"teacher_log_probs holds {highest}; log-probabilities are at most 0")
        return super().normaliser(targets, extras)


def _kl(one_NK: Tensor, other_NK: Tensor) -> Tensor:
    return (one_NK.exp() * (one_NK - other_NK)).sum(1)


def _with_tail(log_probs_NK: Tensor) -> Tensor:
    """`[N, K + 1]`, with the log-probability of all other tokens at the end."""
    kept_N1 = log_probs_NK.logsumexp(1, keepdim=True).clamp(max=_MOST)
    return torch.cat([log_probs_NK, (-torch.expm1(kept_N1)).log()], 1)
