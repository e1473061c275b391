"""Losses of all tokens of a step together, as of pairs of rows in different micro-batches."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatrain.loss.base import Loss, Statistics
from megatrain.loss.tokens import TOKEN_WEIGHTS


class JointLoss(Loss):
    """A loss whose derivative at one token depends on others; it reads labels' log-probabilities.

    The head is visited twice: for the log-probabilities of all micro-batches, and for the gradients
    of every label's cross entropy with the weight that it has in the loss.

    Attributes:
        weighed: what the second visit minimises, given these weights, at the same temperature.
    """

    weighed: Loss = TOKEN_WEIGHTS

    @abstractmethod
    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        """A step's loss (scalar), before the division, by torch's differentiable functions.

        Args:
            log_prob_N: of all its targets, micro-batch after micro-batch; 0 without a target.
            targets_N: -100 for none.
            extras: as for `tokens`; undefined where a token has no target.
        """

    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        """The log-probabilities: all that the first visit computes."""
        return statistics.log_prob

    def measures(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """Measures to log with the loss: scalars by name; NaN if undefined."""
        return {}

    def loss_and_measures(
        self, log_probs: Sequence[Tensor], micro_batches: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, float]:
        """Loss and measures of micro-batches whose labels have `log_probs`, in the labels' places.

        Raises InputError: as of a step.
        """
        labels = [micro["labels"] for micro in micro_batches]
        extras = [[micro[name] for name in self.inputs] for micro in micro_batches]
        losses, _, measured = self.weigh(log_probs, labels, extras, self.normaliser(labels, extras))
        return {"loss": float(losses[0]), **as_numbers(measured)}

    def weigh(
        self,
        log_probs: Sequence[Tensor],
        targets: Sequence[Tensor],
        extras: Sequence[Sequence[Tensor]],
        normaliser: float,
    ) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        """Each micro-batch's share of the step's loss, its labels' weights, and the measures.

        Args:
            log_probs: `[B, T]` of each micro-batch, 0 where there is no target.
            targets: `[B, T]` of each, -100 for none.
            extras: the tensors named in `inputs` and `choices`, of each.

        Returns:
            Scalars, all but the first 0 unless the loss is not finite; and TokenWeights' `[B, T]`.
        """
        flat = [
            torch.cat([tensor.flatten(0, 1) for tensor in part])
            for part in zip(*extras, strict=True)
        ]
        with torch.enable_grad():
            log_probs_N = (
                torch.cat([tensor.reshape(-1) for tensor in log_probs]).detach().requires_grad_()
            )
            targets_N = torch.cat([tensor.reshape(-1) for tensor in targets])
            loss = self.joint(log_probs_N, targets_N, *flat) / normaliser
        [slopes_N] = torch.autograd.grad(loss, [log_probs_N])
        measured = self.measures(log_probs_N.detach(), targets_N, *flat)
        parts = (-slopes_N).split([tensor.numel() for tensor in targets])
        weights = [part.view_as(tensor) for part, tensor in zip(parts, targets, strict=True)]
        total = loss.detach().float()
        return [total, *[total * 0] * (len(weights) - 1)], weights, measured


def as_numbers(measured: Mapping[str, Tensor]) -> dict[str, float]:
    """Measures as Python numbers, without undefined ones (NaN)."""
    numbers = {name: float(value) for name, value in measured.items()}
    return {name: number for name, number in numbers.items() if number == number}
