"""Distillation: a model learns what another one, its teacher, predicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import Loss, Statistics


@dataclass(frozen=True)
class Distillation(Loss):
    """Forward KL divergence from the teacher's likeliest tokens, mixed with cross entropy.

    Of each label `(1 - share) * sum of p * (log p - log q) + share * cross entropy`, over the K
    tokens that were kept of the teacher (Hinton et al., 2015, https://arxiv.org/abs/1503.02531, at
    temperature 1). p is the teacher's probability as it is given, which is not scaled up for the
    tokens left out; q is the model's, of the whole vocabulary. `share` is `cross_entropy`.

    A micro-batch has for each label, `[B, T, K]`:
        teacher_ids: the tokens that the teacher finds likeliest in the label's place, int64.
        teacher_log_probs: their log-probabilities, floating-point; -1e9 where fewer were kept.

    Raises:
        InputError: `cross_entropy` is not from 0 to 1.
    """

    cross_entropy: float = 0.0
    choices: ClassVar[tuple[str, ...]] = ("teacher_ids", "teacher_log_probs")

    def __post_init__(self) -> None:
        if not 0 <= self.cross_entropy <= 1:
            raise InputError(
                f"the share of cross entropy is {self.cross_entropy!r}; it must be from 0 to 1"
            )

    def tokens(self, found: Statistics, *given: Tensor) -> Tensor:
        assert found.log_prob is not None and found.lse is not None and found.chosen is not None
        teacher_NK, model_NK = given[1], found.chosen - found.lse[:, None]
        divergence_N = (teacher_NK.exp() * (teacher_NK - model_NK)).sum(1)
        return (1 - self.cross_entropy) * divergence_N - self.cross_entropy * found.log_prob

    def normaliser(self, targets: Sequence[Tensor], given: Sequence[Sequence[Tensor]]) -> float:
        """The labelled tokens. Raises InputError: a log-probability is above 0."""
        highest = max(float(each.max()) for _, each in given)
        if highest > 0:
            raise InputError(f"teacher_log_probs holds {highest}; log-probabilities are at most 0")
        return super().normaliser(targets, given)
