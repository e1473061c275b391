"""Adds a step's micro-batches as a Trainer does: with a divisor for each, not over all rows.

A micro-batch is weighted by the Trainer's step it is in. Where a stream without a length ends
within a step, the Trainer adds the gradient of that part to that of the next step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss import CROSS_ENTROPY, Loss, PairLoss, TokenWeights, num_labelled, targets_of


class Waiting(NamedTuple):
    """A micro-batch until its step is taken.

    Attributes:
        inputs: on the host.
        items: labels of the Trainer's step, which divide the sum of its losses; None: the Trainer
            takes the mean of each micro-batch, divided by their number.
        num_micro: micro-batches of the Trainer's step.
    """

    inputs: dict[str, Tensor]
    items: float | None
    num_micro: int


@dataclass(frozen=True)
class MicroBatchMeans(PairLoss):
    """Mix-in for a loss of pairs: its mean over each micro-batch, weighted by shares.

    Micro-batches hold whole pairs, each reply a row. Measures are the means of those of each
    micro-batch.

    Attributes:
        shares: the weight of each micro-batch's mean.
    """

    shares: tuple[float, ...] = (1.0,)

    def weigh(
        self,
        log_probs: Sequence[Tensor],
        targets: Sequence[Tensor],
        extras: Sequence[Sequence[Tensor]],
        normaliser: float,
    ) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        """See `JointLoss.weigh`; the normaliser of all pairs is not used."""
        losses, weights, measured = [], [], []
        for micro in zip(log_probs, targets, extras, self.shares, strict=True):
            row_log_probs, labels, beside, share = micro
            [loss], [weight], measures_now = super().weigh(
                [row_log_probs], [labels], [beside], len(labels) / 2
            )
            losses.append(share * loss)
            weights.append(share * weight)
            measured.append(measures_now)
        total = torch.stack(losses).sum()
        means = {
            name: torch.stack([measures[name] for measures in measured]).mean()
            for name in measured[0]
        }
        return [total, *[total * 0] * (len(weights) - 1)], weights, means


@dataclass(frozen=True)
class WeightedSum(TokenWeights):
    """The sum of cross entropy by `token_weights`, not divided."""

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        """1; weights are divided already."""
        return 1.0


WEIGHTED_SUM = WeightedSum()


def shares(step: Sequence[Waiting]) -> tuple[float, ...]:
    """The weight of each micro-batch's mean."""
    return tuple(1 / micro.num_micro for micro in step)


def weighed(step: Sequence[Waiting], shift: int) -> tuple[list[dict[str, Tensor]], Loss]:
    """The micro-batches, with weights for their labels if needed, and the loss.

    Args:
        shift: how many tokens a label lies behind the logits that predict it.

    Raises InputError: the Trainer would divide by 0.
    """
    rows = [micro.inputs for micro in step]
    if any("labels" not in row for row in rows):
        return rows, CROSS_ENTROPY
    counts = [num_labelled(targets_of(row["labels"], shift)) for row in rows]
    parts = [
        micro.num_micro * count if micro.items is None else micro.items
        for micro, count in zip(step, counts, strict=True)
    ]
    if all(part == sum(counts) for part in parts):
        return rows, CROSS_ENTROPY
    if 0 in parts:
        raise InputError(
            f"micro-batch {parts.index(0)} of this step has no label, and Trainer's loss of it is "
            "not a number; leave such rows out"
        )
    weights = [torch.full(r["labels"].shape, 1 / part) for r, part in zip(rows, parts, strict=True)]
    return [r | {"token_weights": w} for r, w in zip(rows, weights, strict=True)], WEIGHTED_SUM
