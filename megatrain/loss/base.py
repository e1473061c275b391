"""The base of losses: functions of statistics of each token's logits.

The head's logits `[N, V]` exist for some tokens at a time. A loss sees statistics of each token's
logits, and gives a value of each token. It also says what the sum is divided by, over all
micro-batches of a step.

Legend: B rows, T tokens of a row, N tokens of a micro-batch, V vocabulary, K tokens that a loss
chooses for each label.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatrain.errors import InputError

IGNORED = -100


def targets_of(labels_BT: Tensor, shift: int = 1, fill: float = IGNORED) -> Tensor:
    """The target of each position `[B, T]`: the label `shift` later; `fill` at a row's end.

    Also shifts other values that belong to labels.
    """
    targets_BT = torch.full_like(labels_BT, fill)
    targets_BT[:, : labels_BT.shape[1] - shift] = labels_BT[:, shift:]
    return targets_BT


def num_labelled(targets_BT: Tensor) -> int:
    """The number of positions that have a target."""
    return int((targets_BT != IGNORED).sum())


@dataclass(frozen=True)
class Statistics:
    """Numbers of each token's logits `[N]`, fp32.

    Attributes:
        log_prob: log-probability of the target; undefined without a target.
        lse: log-sum-exp of the logits.
        mean: of the logits; None where the loss does not ask for it.
        margin: the target's logit less the largest one, 0 or below; None likewise.
        chosen: logits of the tokens that the loss chooses `[N, K]`; None likewise.
        top: the largest logits `[N, 0, K]`, and whose they are `[N, 1, K]`; None likewise.
    """

    # Any, not Tensor | None: a loss knows which of them it has asked for.
    log_prob: Any
    lse: Any = None
    mean: Any = None
    margin: Any = None
    chosen: Any = None
    top: Any = None


class Loss(ABC):
    """A loss of a step; subclasses are frozen dataclasses, equal if they compute the same.

    Attributes:
        inputs: names of tensors `[B, T]` that it takes of each micro-batch beside the labels: one
            number for each label.
        choices: names of tensors `[B, T, K]` that it takes likewise: ids of tokens (int64) whose
            logits it reads, and after them numbers for each of these.
        uses_mean: it reads the logits' mean.
        uses_margin: it reads the margin, which has no gradient: only for evaluations.
        temperature: divides the logits before anything else, above 0.
        top_k: the number of largest logits that it reads, also without gradients.
    """

    inputs: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[tuple[str, ...]] = ()
    uses_mean: ClassVar[bool] = False
    uses_margin: ClassVar[bool] = False
    temperature: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise InputError(
                f"{type(self).__name__}'s temperature is {self.temperature!r}; it must be above 0"
            )

    @abstractmethod
    def tokens(self, statistics: Statistics, *extras: Tensor) -> Tensor:
        """The loss of each token `[N]`, fp32, by torch's differentiable functions.

        Args:
            extras: the tensors named in `inputs` `[N]` and `choices` `[N, K]`. Where a token has no
                target, these and `statistics` have values of no use.
        """

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        """The divisor of the sum over all tokens of a step: the labelled ones.

        Args:
            targets: `[B, T]` of each micro-batch, -100 for none.
            extras: the tensors named in `inputs` and `choices`, of each micro-batch.
        """
        return sum(num_labelled(target) for target in targets)

    def each(self, statistics: Statistics, targets_N: Tensor, *extras: Tensor) -> Tensor:
        """The loss of each token `[N]`, or several numbers `[N, ...]`; 0 without a target."""
        values = self.tokens(statistics, *extras)
        used = (targets_N != IGNORED).view(-1, *[1] * (values.ndim - 1))
        return torch.where(used, values, 0.0)

    def each_of(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        """The loss of each token `[N]`, from its logits; 0 where it has no target."""
        return self.each(self.statistics(logits_NV, targets_N, *extras), targets_N, *extras)

    def summed(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        """The losses of some tokens, added up (scalar, fp32), differentiable by the logits."""
        return self.each_of(logits_NV, targets_N, *extras).sum()

    def chosen(self, extras: Sequence[Tensor]) -> Tensor | None:
        """The ids of the tokens whose logits the loss reads, among what it is given."""
        return extras[len(self.inputs)] if self.choices else None

    def tempered(self, logits: Tensor) -> Tensor:
        """Logits as the loss reads them: divided by its temperature, in fp32; at 1 as they are."""
        return logits if self.temperature == 1 else logits.float() / self.temperature

    def statistics(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Statistics:
        """The statistics of some tokens' logits."""
        logits = self.tempered(logits_NV).float()
        lse_N = logits.logsumexp(1)
        picked_N = logits.gather(1, targets_N.clamp(min=0)[:, None])[:, 0]
        mean_N = logits.mean(1) if self.uses_mean else None
        margin_N = picked_N - logits.amax(1) if self.uses_margin else None
        ids_NK = self.chosen(extras)
        chosen_NK = None if ids_NK is None else logits.gather(1, ids_NK)
        top_N2K = None
        if self.top_k:
            values_NK, ids_NK = logits.topk(min(self.top_k, logits.shape[1]))
            top_N2K = torch.stack([values_NK, ids_NK.float()], 1)
        return Statistics(picked_N - lse_N, lse_N, mean_N, margin_N, chosen_NK, top_N2K)


def given_loss(loss: object) -> Loss:
    """Check that a caller's loss of a step is one. Raises InputError: it is none."""
    if not isinstance(loss, Loss):
        raise InputError(f"loss is {loss!r}; it must be one of megatrain.loss, such as DPO()")
    return loss
