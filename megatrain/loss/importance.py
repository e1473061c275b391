"""Importance sampling: corrects a loss for replies that another program has drawn."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.replies import check_type

Mode = Literal["sequence_mask", "sequence_truncate", "token_mask", "token_truncate"]


@dataclass(frozen=True)
class ImportanceSampling:
    """Ratios by which the loss of each label counts: its probability in the model that is trained,
    as it was when the reply was made, to that in the program that has drawn it.

    As TRL's `vllm_importance_sampling_correction`. `mode` says of what a ratio is, of a token or of
    a whole reply (`sequence`, the product over its tokens), and what becomes of one below
    `clip_min` or above `clip_max` (None: no bound): it is set to the bound (`truncate`) or to 0
    (`mask`).

    Raises InputError: a setting is out of range or unknown.
    """

    mode: Mode = "sequence_mask"
    clip_max: float | None = 3.0
    clip_min: float | None = None

    def __post_init__(self) -> None:
        name = "importance sampling"
        check_type(name, self.mode, Mode, "mode")
        low, high = self._bounds
        if not -math.inf <= low < high <= math.inf or high <= 0:
            raise InputError(
                f"{name}'s clip_max is {self.clip_max!r} and its clip_min {self.clip_min!r}; "
                "clip_max must be above 0 and above clip_min"
            )
        if self.mode.endswith("truncate") and self.clip_min is None and self.clip_max is None:
            raise InputError(f"{name}'s {self.mode} needs clip_max or clip_min; give one")

    @property
    def _bounds(self) -> tuple[float, float]:
        low = -math.inf if self.clip_min is None else self.clip_min
        return low, math.inf if self.clip_max is None else self.clip_max

    @property
    def of_replies(self) -> bool:
        """True if a whole reply has one ratio, and not each of its tokens."""
        return self.mode.startswith("sequence")

    def ratios(self, log_prob_L: Tensor, drawn_at_L: Tensor) -> Tensor:
        """Ratios of the labels of one reply `[L]`, fp64; ratios of a sequence are all the same.

        Args:
            log_prob_L: in the model that is trained.
            drawn_at_L: in the program that drew them; NaN where it does not say: counts as equal.
        """
        difference = (log_prob_L.double() - drawn_at_L.double()).nan_to_num(nan=0.0)
        if self.of_replies:
            difference = difference.sum().expand_as(difference)
        ratio = difference.exp()
        low, high = self._bounds
        if self.mode.endswith("truncate"):
            return ratio.clamp(low, high)
        return torch.where((ratio < low) | (ratio > high), 0.0, ratio)
