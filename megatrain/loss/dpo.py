"""Direct preference optimisation: a chosen reply becomes likelier than a rejected one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import IGNORED
from megatrain.loss.joint import JointLoss

_MOST_PAIRS = 1 << 24  # numbers that fp32 tells apart


@dataclass(frozen=True)
class DPO(JointLoss):
    """The mean over pairs of `-log sigmoid(beta * (gain of the chosen - gain of the rejected))`.

    A gain is the sum, over the labels of a reply, of how much likelier each is than in a reference
    model (Rafailov et al., 2023, https://arxiv.org/abs/2305.18290, equation 7). With smoothing that
    share of the pairs counts the other way round, as if it were labelled wrongly.

    A micro-batch has for each label, as floating-point numbers `[B, T]`:
        pair: the number of its pair in the step, whose two replies may be in any micro-batches.
        chosen: 1 in the chosen reply, 0 in the rejected one.
        reference_logp: its log-probability in the reference model; of a reply whose sum alone is
            known, that at one label and 0 at the others.

    Raises:
        InputError: `beta` is not above 0, or `label_smoothing` not at least 0 and below 0.5.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    inputs: ClassVar[tuple[str, ...]] = ("pair", "chosen", "reference_logp")

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise InputError(f"DPO's beta is {self.beta!r}; it must be a number above 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise InputError(
                f"DPO's label smoothing is {self.label_smoothing!r}; it must be from 0 to below 0.5"
            )

    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *given: Tensor) -> Tensor:
        used = targets_N != IGNORED
        pair, chosen, reference = (each[used] for each in given)
        numbers, index = pair.unique(return_inverse=True)
        # In fp64 the sums, which a GPU takes in any order, are the same in fp32.
        gains = (2 * chosen - 1) * (log_prob_N[used].double() - reference)
        margins = torch.zeros(len(numbers), dtype=gains.dtype, device=gains.device)
        margins = self.beta * margins.index_add(0, index, gains)
        wrong = self.label_smoothing
        return -((1 - wrong) * F.logsigmoid(margins) + wrong * F.logsigmoid(-margins)).sum()

    def normaliser(self, targets: Sequence[Tensor], given: Sequence[Sequence[Tensor]]) -> float:
        """The number of pairs. Raises InputError: a label is of none, or a reply is missing."""
        used = [each != IGNORED for each in targets]
        pair, chosen = (
            torch.cat([beside[name][mask] for beside, mask in zip(given, used, strict=True)])
            for name in (0, 1)
        )
        if not ((pair == pair.round()) & (pair >= 0) & (pair < _MOST_PAIRS)).all():
            raise InputError(f"pair must hold whole numbers from 0 to below {_MOST_PAIRS:,}")
        if not ((chosen == 0) | (chosen == 1)).all():
            raise InputError("chosen must be 1 at labels of chosen replies, 0 at those of rejected")
        both = [set(pair[chosen == which].tolist()) for which in (1, 0)]
        if alone := both[0] ^ both[1]:
            which = "rejected" if min(alone) in both[0] else "chosen"
            raise InputError(
                f"pair {min(alone):.0f} has no label of a {which} reply in this step; a step takes "
                "whole pairs"
            )
        return len(both[0])
