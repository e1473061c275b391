"""Cross entropy with a share of each target spread evenly over the vocabulary."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import Loss, Statistics


@dataclass(frozen=True)
class LabelSmoothing(Loss):
    """`(1 - share) * cross entropy + share * its mean over all tokens of the vocabulary`.

    As torch's `cross_entropy(label_smoothing=share)` (Szegedy et al., 2016, section 7).

    Raises InputError: `share` is not at least 0 and below 1.
    """

    share: float
    uses_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise InputError(f"label smoothing is {self.share!r}; it must be from 0 to below 1")

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        assert (
            statistics.log_prob is not None
            and statistics.lse is not None
            and statistics.mean is not None
        )
        return (
            self.share * (statistics.lse - statistics.mean) - (1 - self.share) * statistics.log_prob
        )
