"""Cross entropy of which each label has a weight of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import IGNORED, Loss, Statistics, check_temperature


@dataclass(frozen=True)
class TokenWeights(Loss):
    """The weighted mean of cross entropy: `token_weights` `[B, T]` has one for each label.

    The sum is divided by the weights of all labelled tokens of the step. Logits are divided by
    `temperature` first.

    Raises InputError: the temperature is not above 0.
    """

    temperature: float = 1.0
    inputs: ClassVar[tuple[str, ...]] = ("token_weights",)

    def __post_init__(self) -> None:
        check_temperature(self)

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        assert statistics.log_prob is not None
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
