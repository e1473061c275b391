"""Losses of replies: of two which is the better, or of one whether it is good."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import IGNORED
from megatrain.loss.joint import JointLoss

MOST_NUMBERS = 1 << 24  # that fp32 tells apart


class Replies(NamedTuple):
    """Sums over the labels of each reply `[R]`, fp64: an order that a GPU chooses is not seen.

    Attributes:
        log_prob: of the model; reference: of a reference model, 0 without one.
        length: number of labels.
    """

    log_prob: Tensor
    reference: Tensor
    length: Tensor

    @property
    def gain(self) -> Tensor:
        """How much likelier a reply is than in the reference model."""
        return self.log_prob - self.reference

    @property
    def mean(self) -> Tensor:
        """The mean log-probability of a reply's labels."""
        return self.log_prob / self.length


def summed(places_N: Tensor, count: int, *values: Tensor) -> Replies:
    """The replies of labels: `places_N` has the number of each label's, below `count`.

    Args: `values` `[N]`: log-probabilities, those of the reference or 0, and 1 for a label.
    """
    zeros = torch.zeros(count, dtype=torch.float64, device=places_N.device)
    return Replies(*(zeros.index_add(0, places_N, value.double()) for value in values))


def check_numbers(name: str, numbers: Tensor) -> None:
    """Raises InputError: numbers of pairs or rows must be whole and small enough."""
    if not ((numbers == numbers.round()) & (numbers >= 0) & (numbers < MOST_NUMBERS)).all():
        raise InputError(f"{name} must hold whole numbers from 0 to below {MOST_NUMBERS:,}")


def check_settings(loss: str, beta: float, label_smoothing: float = 0.0) -> None:
    """Raises InputError: `beta` is not above 0, or the smoothing not from 0 to below 0.5."""
    if not 0 < beta < math.inf:
        raise InputError(f"{loss}'s beta is {beta!r}; it must be a number above 0")
    if not 0 <= label_smoothing < 0.5:
        raise InputError(
            f"{loss}'s label smoothing is {label_smoothing!r}; it must be from 0 to below 0.5"
        )


def check_type(loss: str, value: str, known: Any, name: str = "loss_type") -> None:
    """Raises InputError: what is given as `name` is none of the literals `known`."""
    if value not in get_args(known):
        names = ", ".join(get_args(known))
        raise InputError(f"{loss}'s {name} is {value!r}; it must be one of {names}")


def unlikeliness(margin: Tensor, wrong: float) -> Tensor:
    """`-log sigmoid(margin)`, of which the share `wrong` counts the other way round."""
    return -(1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)


def labels_of(name: int, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> Tensor:
    """The tensor of that number among a loss's inputs, of all labels of a step."""
    pairs = zip(targets, extras, strict=True)
    return torch.cat([beside[name][target != IGNORED] for target, beside in pairs])


def check_rows(name: str, numbers: Tensor, targets: Sequence[Tensor]) -> None:
    """Raises InputError: labels of one reply, as its number says, are in several rows of a step."""
    count = sum(len(target) for target in targets)
    rows = torch.arange(count).split([len(target) for target in targets])
    every = torch.cat(
        [
            row[:, None].expand(target.shape)[target != IGNORED]
            for row, target in zip(rows, targets, strict=True)
        ]
    )
    statistics = (numbers.long() * count + every).unique() // count
    if len(twice := statistics[1:][statistics[1:] == statistics[:-1]]):
        raise InputError(
            f"{name} {int(twice[0])} has a reply in several rows of this step; replies need "
            "numbers of their own, in other micro-batches, too"
        )


@dataclass(frozen=True)
class PairLoss(JointLoss):
    """A loss of pairs, the mean over all of a step.

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
        """Chosen and rejected ones, pair by pair."""
        used = targets_N != IGNORED
        values = dict(zip(self.inputs, (part[used] for part in extras), strict=True))
        log_prob, chosen = log_prob_N[used], values["chosen"]
        counts = values.get("reply", torch.ones_like(chosen))
        reference = values.get("reference_logp", torch.zeros_like(chosen))
        numbers, index = values["pair"].unique(return_inverse=True)
        places = index + len(numbers) * (chosen != 1)
        both = summed(places, 2 * len(numbers), log_prob * counts, reference * counts, counts)
        parts = (part.chunk(2) for part in both)
        return [Replies(*part) for part in zip(*parts, strict=True)]

    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        return self.pairs(*self.replies(log_prob_N, targets_N, *extras)).sum()

    def measures(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """Means over pairs, by TRL's names."""
        replies = self.replies(log_prob_N, targets_N, *extras)
        chosen, rejected = map(self.rewards, replies)
        whole = "reference_logp" in self.inputs
        logps = [of_kind.log_prob if whole else of_kind.mean for of_kind in replies]
        return {
            "rewards/chosen": chosen.mean(),
            "rewards/rejected": rejected.mean(),
            "rewards/accuracies": (chosen > rejected).double().mean(),
            "rewards/margins": (chosen - rejected).mean(),
            "logps/chosen": logps[0].mean(),
            "logps/rejected": logps[1].mean(),
        }

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        """The number of pairs. Raises InputError: a label is of none, a reply missing or twice."""
        pair, chosen = (labels_of(number, targets, extras) for number in (0, 1))
        check_numbers("pair", pair)
        if not ((chosen == 0) | (chosen == 1)).all():
            raise InputError("chosen must be 1 at labels of chosen replies, 0 at those of rejected")
        if "reply" in self.inputs:
            reply = labels_of(self.inputs.index("reply"), targets, extras)
            pair, chosen = pair[reply == 1], chosen[reply == 1]
        both = [set(pair[chosen == which].tolist()) for which in (1, 0)]
        if alone := both[0] ^ both[1]:
            which = "rejected" if min(alone) in both[0] else "chosen"
            raise InputError(
                f"pair {min(alone):.0f} has no label of a {which} reply in this step; a step takes "
                "whole pairs"
            )
        for kind in (0, 1):
            of_kind = [
                target.masked_fill(beside[1].ne(kind), IGNORED)
                for target, beside in zip(targets, extras, strict=True)
            ]
            check_rows("pair", labels_of(0, of_kind, extras), of_kind)
        return len(both[0])
