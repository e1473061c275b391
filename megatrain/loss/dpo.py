"""Direct preference optimisation: a chosen reply becomes likelier than a rejected one."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.replies import PairLoss, Replies, check_settings, check_type, unlikeliness

DpoVariant = Literal["sigmoid", "sigmoid_norm", "robust", "ipo", "hinge"]


@dataclass(frozen=True)
class DPO(PairLoss):
    """The mean over pairs of `-log sigmoid(beta * (gain of the chosen - gain of the rejected))`.

    A gain is the sum, over the labels of a reply, of how much likelier each is than in a reference
    model (Rafailov et al., 2023, https://arxiv.org/abs/2305.18290, equation 7). With smoothing that
    share of the pairs counts the other way round, as if it were labelled wrongly.

    `loss_type`, by TRL's names: `sigmoid_norm` takes the mean of a reply's labels in place of their
    sum; `robust` makes the smoothed loss unbiased (Chowdhury et al., 2024,
    https://arxiv.org/abs/2403.00409); `ipo` is `(difference of means - 1 / (2 * beta)) ** 2` (Azar
    et al., 2023, https://arxiv.org/abs/2310.12036, equation 17); `hinge` is
    `max(0, 1 - beta * difference)` (Zhao et al., 2023, https://arxiv.org/abs/2305.10425).

    A micro-batch has for each label, as floating-point numbers `[B, T]`, `pair` and `chosen` (see
    `PairLoss`) and
        reference_logp: its log-probability in the reference model; of a reply whose sum alone is
            known, that at one label and 0 at the others.

    Raises:
        InputError: `beta` is not above 0, `label_smoothing` not at least 0 and below 0.5 (0 with
            ipo and hinge), or the type unknown.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: DpoVariant = "sigmoid"
    inputs: ClassVar[tuple[str, ...]] = ("pair", "chosen", "reference_logp")

    def __post_init__(self) -> None:
        check_settings("DPO", self.beta, self.label_smoothing)
        check_type("DPO", self.loss_type, DpoVariant)
        if self.label_smoothing and self.loss_type in ("ipo", "hinge"):
            raise InputError(f"DPO's {self.loss_type} has no label smoothing; leave it out")

    def rewards(self, replies: Replies) -> Tensor:
        return self.beta * replies.gain

    def pairs(self, chosen: Replies, rejected: Replies) -> Tensor:
        gains = [replies.gain for replies in (chosen, rejected)]
        if self.loss_type in ("ipo", "sigmoid_norm"):
            lengths = chosen.length, rejected.length
            gains = [gain / length for gain, length in zip(gains, lengths, strict=True)]
        difference, wrong = gains[0] - gains[1], self.label_smoothing
        if self.loss_type == "ipo":
            return (difference - 1 / (2 * self.beta)).square()
        margin = self.beta * difference
        if self.loss_type == "hinge":
            return F.relu(1 - margin)
        if self.loss_type == "robust":
            both = (1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)
            return -both / (1 - 2 * wrong)
        return unlikeliness(margin, wrong)
