"""Kahneman-Tversky optimisation: good replies become likelier, bad ones unlikelier; no pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import IGNORED
from megatrain.loss.joint import JointLoss
from megatrain.loss.replies import (
    Replies,
    check_numbers,
    check_rows,
    check_settings,
    check_type,
    labels_of,
    summed,
)

KtoVariant = Literal["kto", "apo_zero_unpaired"]
MISMATCHED = -1


@dataclass(frozen=True)
class KTO(JointLoss):
    """The mean over replies of `1 - sigmoid(beta * (gain - baseline))`; of bad ones, of the minus.

    Ethayarajh et al., 2024, https://arxiv.org/abs/2402.01306, equation 8. A gain is as of DPO; the
    baseline, which has no gradient, is the mean gain of mismatched replies of the step, at least 0:
    replies to other prompts. Without any, and with the `loss_type` `apo_zero_unpaired`, it is 0.
    Losses of good and of bad replies count with their weights.

    A micro-batch has for each label, as floating-point numbers `[B, T]`:
        example: the number of its reply in the step.
        desired: 1 in a good reply, 0 in a bad one, -1 in a mismatched one.
        reference_logp: as of DPO.

    Raises InputError: `beta` is not above 0, a weight negative or both 0, or the type unknown.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    loss_type: KtoVariant = "kto"
    inputs: ClassVar[tuple[str, ...]] = ("example", "desired", "reference_logp")

    def __post_init__(self) -> None:
        check_settings("KTO", self.beta)
        for weight in (self.desirable_weight, self.undesirable_weight):
            if not 0 <= weight < float("inf"):
                raise InputError(f"a weight of KTO is {weight!r}; it must be at least 0")
        if not self.desirable_weight + self.undesirable_weight:
            raise InputError(
                "both weights of KTO are 0, so that nothing would be learnt; raise one"
            )
        check_type("KTO", self.loss_type, KtoVariant)

    @property
    def lines(self) -> int:
        """Rows of tokens for each reply of the data: it and, for the baseline, a mismatched one."""
        return 2 if self.loss_type == "kto" else 1

    def _replies(
        self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor
    ) -> tuple[Replies, Tensor, Tensor]:
        """The replies, what of each is desired `[R]`, and the baseline."""
        used = targets_N != IGNORED
        example, desired, reference = (extra[used] for extra in extras)
        numbers, places = example.unique(return_inverse=True)
        ones = torch.ones_like(desired)
        replies = summed(places, len(numbers), log_prob_N[used], reference, ones)
        desired_R = torch.zeros_like(replies.length).scatter(0, places, desired.double())
        others = (desired_R == MISMATCHED).double()
        mean = (replies.gain.detach() * others).sum() / others.sum().clamp(min=1)
        return replies, desired_R, mean.clamp(min=0) * (self.loss_type == "kto")

    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        replies, desired_R, baseline = self._replies(log_prob_N, targets_N, *extras)
        gain = self.beta * (replies.gain - baseline)
        good = self.desirable_weight * torch.sigmoid(-gain)
        bad = self.undesirable_weight * torch.sigmoid(gain)
        return torch.where(desired_R == 1, good, torch.where(desired_R == 0, bad, 0)).sum()

    def measures(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """Means over replies, by TRL's names; NaN where there is none of a kind."""
        replies, desired_R, baseline = self._replies(log_prob_N, targets_N, *extras)
        measures = {"kl": baseline}
        for name, which in (("chosen", 1), ("rejected", 0)):
            mask = (desired_R == which).double()
            measures[f"rewards/{name}"] = self.beta * (replies.gain * mask).sum() / mask.sum()
            measures[f"logps/{name}"] = (replies.log_prob * mask).sum() / mask.sum()
        measures["rewards/margins"] = measures["rewards/chosen"] - measures["rewards/rejected"]
        return measures

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        """The number of good and bad replies. Raises InputError: a number is none."""
        example, desired = (labels_of(number, targets, extras) for number in (0, 1))
        check_numbers("example", example)
        check_rows("example", example, targets)
        if not ((desired == 0) | (desired == 1) | (desired == MISMATCHED)).all():
            raise InputError("desired must be 1 in good replies, 0 in bad, -1 in mismatched ones")
        return len(example[desired != MISMATCHED].unique())
