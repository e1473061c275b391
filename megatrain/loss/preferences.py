"""Losses of pairs of replies: a chosen one and a rejected one."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import IGNORED, JointLoss, Loss, Tensors

MOST_NUMBERS = 1 << 24  # fp32 holds all whole numbers below exactly


class Replies(NamedTuple):
    """Sums over the labels of each reply `[R]`, in fp64, which hides a GPU's order of summation."""

    log_prob: Tensor  # log-probability in the model
    reference: Tensor  # in a reference model, else 0
    length: Tensor  # number of labels

    @property
    def gain(self) -> Tensor:
        """How much likelier a reply is than in the reference model."""
        return self.log_prob - self.reference


def check_numbers(name: str, numbers: Tensor) -> None:
    """Raise InputError if numbers of pairs or rows are not whole, or too large."""
    if not ((numbers == numbers.round()) & (numbers >= 0) & (numbers < MOST_NUMBERS)).all():
        raise InputError(f"{name} must hold whole numbers from 0 to below {MOST_NUMBERS:,}")


def labels_of(index: int, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> Tensor:
    """The loss's input number `index`, at all labels of a step."""
    pairs = zip(targets, extras, strict=True)
    return torch.cat([inputs[index][target != IGNORED] for target, inputs in pairs])


def check_rows(name: str, numbers: Tensor, targets: Tensors, kinds: Tensor | int = 0) -> None:
    """Raise InputError if a reply has labels in several rows.

    Args: `numbers`, `kinds`: of all labels; a reply's labels have one number and one kind (0 or 1).
    """
    num_rows = sum(len(target) for target in targets)
    rows = torch.arange(num_rows).split([len(target) for target in targets])
    rows_BT = [row[:, None].expand(target.shape) for row, target in zip(rows, targets, strict=True)]
    row_of_label = labels_of(0, targets, [[row_BT] for row_BT in rows_BT])
    reply = 2 * numbers.long() + kinds
    # ascending, each reply once for each of its rows
    replies = (reply * num_rows + row_of_label).unique() // num_rows
    if len(twice := replies[1:][replies[1:] == replies[:-1]]):
        raise InputError(
            f"{name} {int(twice[0]) // 2} has a reply in several rows of this step; replies need "
            "numbers of their own, in other micro-batches, too"
        )


@dataclass(frozen=True)
class PairLoss(JointLoss):
    """A loss of pairs of replies: the mean over all pairs of a step.

    A micro-batch has for each label, as floating-point numbers `[B, T]`:
        pair: the number of its pair in the step, whose two replies may be in any micro-batches.
        chosen: 1 in the chosen reply, 0 in the rejected one.
    """

    lines: ClassVar[int] = 2  # rows of tokens for each pair of the data

    @abstractmethod
    def pairs(self, chosen: Replies, rejected: Replies) -> Tensor:
        """The loss of each pair `[P]`."""

    @abstractmethod
    def rewards(self, replies: Replies) -> Tensor:
        """The reward of each reply by the model `[P]`, as TRL's trainers log it."""

    def replies(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> list[Replies]:
        """The chosen replies and the rejected ones, in the order of pairs."""
        used = targets_N != IGNORED
        values = dict(zip(self.inputs, (extra[used] for extra in extras), strict=True))
        log_prob, chosen = log_prob_N[used], values["chosen"]
        reference = values.get("reference_logp", torch.zeros_like(chosen))
        numbers, pair = values["pair"].unique(return_inverse=True)
        reply = pair + len(numbers) * (chosen != 1)  # numbers the chosen replies first
        zeros = torch.zeros(2 * len(numbers), dtype=torch.float64, device=reply.device)
        summands = log_prob, reference, torch.ones_like(chosen)
        sums = torch.stack([zeros.index_add(0, reply, summand.double()) for summand in summands])
        return [Replies(*sums_of_kind) for sums_of_kind in sums.chunk(2, 1)]

    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        return self.pairs(*self.replies(log_prob_N, targets_N, *extras)).sum()

    def measures(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """Means over pairs, by TRL's names."""
        replies = self.replies(log_prob_N, targets_N, *extras)
        chosen, rejected = map(self.rewards, replies)
        return {
            "rewards/chosen": chosen.mean(),
            "rewards/rejected": rejected.mean(),
            "rewards/accuracies": (chosen > rejected).double().mean(),
            "rewards/margins": (chosen - rejected).mean(),
            "logps/chosen": replies[0].log_prob.mean(),
            "logps/rejected": replies[1].log_prob.mean(),
        }

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        """The number of pairs. Raises InputError: a bad number, or a reply is missing or twice."""
        pair, chosen = (labels_of(number, targets, extras) for number in (0, 1))
        check_numbers("pair", pair)
        if not ((chosen == 0) | (chosen == 1)).all():
            raise InputError("chosen must be 1 at labels of chosen replies, 0 at those of rejected")
        with_chosen = set(pair[chosen == 1].tolist())
        with_rejected = set(pair[chosen == 0].tolist())
        if incomplete := with_chosen ^ with_rejected:
            missing = "rejected" if min(incomplete) in with_chosen else "chosen"
            raise InputError(
                f"pair {min(incomplete):.0f} has no label of a {missing} reply in this step; "
                "a step takes whole pairs"
            )
        check_rows("pair", pair, targets, chosen.long())
        return len(with_chosen)


DpoVariant = Literal["sigmoid", "sigmoid_norm", "robust", "ipo", "hinge"]


@dataclass(frozen=True)
class DPO(PairLoss):
    """The mean over pairs of `-log sigmoid(beta * (gain of the chosen - gain of the rejected))`.

    A reply's gain is the sum of its labels' log-probabilities minus those in a reference model
    (Rafailov et al., 2023, https://arxiv.org/abs/2305.18290, equation 7). `label_smoothing` is the
    share of pairs that are taken as labelled the wrong way round.

    `loss_type`, by TRL's names: `sigmoid_norm` takes the mean of a reply's labels in place of their
    sum; `robust` makes the smoothed loss unbiased (Chowdhury et al., 2024,
    https://arxiv.org/abs/2403.00409); `ipo` is `(difference of means - 1 / (2 * beta)) ** 2` (Azar
    et al., 2023, https://arxiv.org/abs/2310.12036, equation 17); `hinge` is
    `max(0, 1 - beta * difference)` (Zhao et al., 2023, https://arxiv.org/abs/2305.10425).

    A micro-batch has for each label, as floating-point numbers `[B, T]`, `pair` and `chosen` (see
    `PairLoss`) and
        reference_logp: its log-probability in the reference model. If only a reply's sum is known,
            one label has the sum, and the others have 0.

    Raises InputError: `beta` is not above 0, `label_smoothing` not from 0 to below 0.5 (0 with ipo
        and hinge), or `loss_type` unknown.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: DpoVariant = "sigmoid"
    inputs: ClassVar[tuple[str, ...]] = ("pair", "chosen", "reference_logp")
    limits: ClassVar[dict[str, str]] = {"beta": "above 0", "label_smoothing": "from 0 to below 0.5"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.loss_type in ("ipo", "hinge"):
            raise InputError(f"DPO's {self.loss_type} has no label smoothing; leave it out")

    def rewards(self, replies: Replies) -> Tensor:
        return self.beta * replies.gain

    def pairs(self, chosen: Replies, rejected: Replies) -> Tensor:
        gains = [replies.gain for replies in (chosen, rejected)]
        if self.loss_type in ("ipo", "sigmoid_norm"):
            lengths = chosen.length, rejected.length
            gains = [gain / length for gain, length in zip(gains, lengths, strict=True)]
        difference, flipped_share = gains[0] - gains[1], self.label_smoothing
        if self.loss_type == "ipo":
            return (difference - 1 / (2 * self.beta)).square()
        margin = self.beta * difference
        if self.loss_type == "hinge":
            return F.relu(1 - margin)
        if self.loss_type == "robust":
            losses = (1 - flipped_share) * F.logsigmoid(margin) - flipped_share * F.logsigmoid(
                -margin
            )
            return -losses / (1 - 2 * flipped_share)
        return -(1 - flipped_share) * F.logsigmoid(margin) - flipped_share * F.logsigmoid(-margin)


@dataclass(frozen=True)
class TokenScore(Loss):
    """The score of each labelled token: the one logit of a head that scores rows."""

    scores: ClassVar[bool] = True

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        return logits_NV.logsumexp(1)  # of one logit: V is 1


@dataclass(frozen=True)
class Reward(PairLoss):
    """The mean over pairs of `-log sigmoid(score of the chosen - score of the rejected - margin)`.

    Bradley and Terry, 1952; with margins Touvron et al., 2023, https://arxiv.org/abs/2307.09288,
    equation 2. `center_rewards_coefficient` weights the mean of `(sum of both scores) ** 2`, which
    keeps scores around 0 (Eisenstein et al., 2023, https://arxiv.org/abs/2312.09244, appendix B).
    TRL's `RewardTrainer` computes the same.

    The model has a sequence head with one label (`AutoModelForSequenceClassification`). Labels are
    0 at the token of each reply that is scored, the last one that is no padding, and -100
    elsewhere. A micro-batch has for each label, as floating-point numbers `[B, T]`, `pair` and
    `chosen` (see `PairLoss`), and with `margin`
        margin: by how much the chosen reply is better; both replies have the same number.

    Raises InputError: the coefficient is not above 0.
    """

    center_rewards_coefficient: float | None = None
    margin: bool = False
    scores: ClassVar[bool] = True
    reads: ClassVar[str] = "rewards"
    inputs: ClassVar[tuple[str, ...]] = ("pair", "chosen")
    limits: ClassVar[dict[str, str]] = {"center_rewards_coefficient": "above 0"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin:
            object.__setattr__(self, "inputs", (*type(self).inputs, "margin"))

    tokens = TokenScore.tokens

    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        replies = self.replies(log_prob_N, targets_N, *extras)
        if not self.margin:
            return self.pairs(*replies).sum()
        # `replies` sums what takes the place of log-probabilities: scores above, margins here.
        margins = self.replies(extras[self.inputs.index("margin")], targets_N, *extras)[0].log_prob
        return self.pairs(replies[0]._replace(reference=margins), replies[1]).sum()

    def pairs(self, chosen: Replies, rejected: Replies) -> Tensor:
        # `log_prob` is a reply's score; `reference` its margin or 0, so `gain` is score - margin.
        losses = -F.logsigmoid(chosen.gain - rejected.gain)
        if self.center_rewards_coefficient is None:
            return losses
        squares = (chosen.log_prob + rejected.log_prob).square()
        return losses + self.center_rewards_coefficient * squares

    def rewards(self, replies: Replies) -> Tensor:
        return replies.log_prob

    def measures(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        measures = super().measures(log_prob_N, targets_N, *extras)
        return {name: value for name, value in measures.items() if name.startswith("rewards/")}

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        """The number of pairs. Raises InputError as PairLoss, or if a reply has two labels."""
        pair, chosen = (labels_of(number, targets, extras) for number in (0, 1))
        replies = torch.stack([pair, chosen], 1)
        if len(replies.unique(dim=0)) < len(replies):
            raise InputError("a reply has several labels; one token of each is scored")
        return super().normaliser(targets, extras)
