"""The base of losses: functions of each token's logits.

The head's logits `[N, V]` exist for some tokens at a time. A loss gives a value of each token. It
also says what the sum is divided by, over all micro-batches of a step.

Legend: B rows, T tokens of a row, N tokens of a micro-batch, V vocabulary, K tokens that a loss
chooses for each label.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.errors import InputError

IGNORED = -100
Tensors = Sequence[Tensor]
Weighed = tuple[list[Tensor], list[Tensor], dict[str, Tensor]]
"""Each micro-batch's share of a step's loss, its slopes, and measures; see `JointLoss.weigh`."""


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


def logits_of(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The logit of each token's target `[N]`; that of token 0 without a target."""
    return logits_NV.gather(1, targets_N.clamp(min=0)[:, None])[:, 0]


def log_probs_of(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The log-probability of each token's target `[N]`; undefined without a target."""
    return logits_of(logits_NV, targets_N) - logits_NV.logsumexp(1)


class Loss(ABC):
    """A loss of a step; subclasses are frozen dataclasses, equal if they compute the same.

    Attributes:
        inputs: names of tensors `[B, T]` that it takes of each micro-batch beside the labels: one
            number for each label.
        choices: names of tensors `[B, T, K]` that it takes likewise: ids of tokens (int64) whose
            logits it reads, and after them numbers for each of these.
        temperature: divides the logits before anything else, above 0.
        scores: True if the loss reads the one number of a head that scores rows.
        embeds: True if the loss reads the hidden states of a model without a head.
    """

    scores: ClassVar[bool] = False
    embeds: ClassVar[bool] = False
    inputs: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[tuple[str, ...]] = ()
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise InputError(
                f"{type(self).__name__}'s temperature is {self.temperature!r}; it must be above 0"
            )

    @property
    def head(self) -> "ClassHead | None":
        """The head that a language model gets for this loss; None: it keeps its own."""
        return ClassHead() if self.scores else None

    @abstractmethod
    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        """The loss of each token `[N]`, fp32, by torch's differentiable functions.

        Args:
            logits_NV: in fp32, divided by the temperature.
            targets_N: -100 for none: there the result is of no use.
            extras: the tensors named in `inputs` `[N]` and `choices` `[N, K]`.
        """

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        """The divisor of the sum over all tokens of a step: the labelled ones.

        Args:
            targets: `[B, T]` of each micro-batch, -100 for none.
            extras: the tensors named in `inputs` and `choices`, of each micro-batch.
        """
        return sum(num_labelled(target) for target in targets)

    def bare(self, step: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The micro-batches without what the loss takes beside the labels."""
        own = {*self.inputs, *self.choices}
        return [{n: value for n, value in micro.items() if n not in own} for micro in step]

    def pooled(self, values: Tensor, targets_BT: Tensor) -> Tensor:
        """Tokens' values `[B, T, ...]` as they are, or what is made of them for rows `[B, ...]`."""
        return values

    def each_of(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        """The loss of each token `[N]`, or several numbers `[N, ...]`; 0 without a target."""
        values = self.tokens(self.tempered(logits_NV).float(), targets_N, *extras)
        used = (targets_N != IGNORED).view(-1, *[1] * (values.ndim - 1))
        return torch.where(used, values, 0.0)

    def summed(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        """The losses of some tokens, added up (scalar, fp32), differentiable by the logits."""
        return self.each_of(logits_NV, targets_N, *extras).sum()

    def tempered(self, logits: Tensor) -> Tensor:
        """Logits as the loss reads them: divided by its temperature, in fp32; at 1 as they are."""
        return logits if self.temperature == 1 else logits.float() / self.temperature


class ClassHead(NamedTuple):
    """A head in place of a language model's, of rows or `of_tokens`; one label: a score.

    No labels: none; `pooling` says to users of the model which hidden states are a row's embedding.
    """

    labels: tuple[str, ...] = ("LABEL_0",)
    of_tokens: bool = False
    problem_type: str | None = None
    pooling: str | None = None


def given_loss(loss: object) -> Loss:
    """Check that a caller's loss of a step is one. Raises InputError: it is none."""
    if not isinstance(loss, Loss):
        raise InputError(f"loss is {loss!r}; it must be one of megatrain.loss, such as DPO()")
    return loss


def cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Cross entropy summed over the labelled tokens, in fp32 (scalar)."""
    return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """The mean over all labelled tokens of the step; logits are divided by `temperature`.

    Raises InputError: the temperature is not above 0.
    """

    temperature: float = 1.0

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        return -log_probs_of(logits_NV, targets_N)

    def summed(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        return cross_entropy_sum(self.tempered(logits_NV), targets_N)


CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True)
class TokenWeights(Loss):
    """The weighted mean of cross entropy: `token_weights` `[B, T]` has one for each label.

    The sum is divided by the weights of all labelled tokens of the step. Logits are divided by
    `temperature` first.

    Raises InputError: the temperature is not above 0.
    """

    temperature: float = 1.0
    inputs: ClassVar[tuple[str, ...]] = ("token_weights",)

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        return -log_probs_of(logits_NV, targets_N) * extras[0]

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


@dataclass(frozen=True)
class Sloped(Loss):
    """A loss with these `slopes` `[B, T, ...]` by the values that another gives labelled tokens."""

    of: Loss
    inputs: ClassVar[tuple[str, ...]] = ("slopes",)

    def tempered(self, logits: Tensor) -> Tensor:
        return self.of.tempered(logits)

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        values = self.of.tokens(logits_NV, targets_N)
        return (values * extras[0].view_as(values)).view(len(values), -1).sum(1)


@dataclass(frozen=True)
class MultiLabel(Loss):
    """Binary cross entropy of each class, as transformers' `multi_label_classification`.

    A micro-batch has, `[B, T, K]`: `classes`, the numbers of all K classes, int64; `truths`, 1
    where the label has the class, else 0, floating-point.
    """

    choices: ClassVar[tuple[str, ...]] = ("classes", "truths")

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        classes_NK, truths_NK = extras
        chosen_NK = logits_NV.gather(1, classes_NK)
        return F.binary_cross_entropy_with_logits(chosen_NK, truths_NK, reduction="none").mean(1)


@dataclass(frozen=True)
class LabelSmoothing(Loss):
    """`(1 - share) * cross entropy + share * its mean over all tokens of the vocabulary`.

    As torch's `cross_entropy(label_smoothing=share)` (Szegedy et al., 2016, section 7).

    Raises InputError: `share` is not at least 0 and below 1.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise InputError(f"label smoothing is {self.share!r}; it must be from 0 to below 1")

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        lse_N = logits_NV.logsumexp(1)
        log_prob_N = logits_of(logits_NV, targets_N) - lse_N
        return self.share * (lse_N - logits_NV.mean(1)) - (1 - self.share) * log_prob_N


@dataclass(frozen=True)
class Score(Loss):
    """Cross entropy and 1 for a label that is the likeliest token, `[N, 2]`; without gradients."""

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        right_N = logits_of(logits_NV, targets_N) >= logits_NV.amax(1)
        return torch.stack([-log_probs_of(logits_NV, targets_N), right_N.float()], 1)

    def summed(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        right = self.each_of(logits_NV, targets_N)[:, 1].sum()
        return torch.stack([cross_entropy_sum(logits_NV, targets_N), right])


@dataclass(frozen=True)
class TopTokens(Loss):
    """The `top_k` likeliest tokens in a label's place: their log-probabilities, and their ids.

    Each token has `[2, K]` in place of a loss, in fp32, which holds ids below 2 ** 24 exactly; 0
    where it has no target. Without gradients.

    Raises InputError: `top_k` is not at least 1, or `temperature` not above 0.
    """

    top_k: int = 1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if type(self.top_k) is not int or self.top_k < 1:
            raise InputError(f"top_k is {self.top_k!r}; it must be an integer of at least 1")
        super().__post_init__()

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        largest_NK, ids_NK = logits_NV.topk(min(self.top_k, logits_NV.shape[1]))
        log_probs_NK = (largest_NK - logits_NV.logsumexp(1, keepdim=True)).clamp(max=0.0)
        return torch.stack([log_probs_NK, ids_NK.float()], 1)


class JointLoss(Loss):
    """A loss whose derivative at one token depends on others; it reads labels' log-probabilities.

    The head is visited twice: for the log-probabilities of all micro-batches, and for the gradients
    of each, times the slope of the loss by it (`Sloped`).

    Attributes:
        reads: the method of Engine that gives the values of the first visit.
        depends_on_step: which rows are together decides its value: it is evaluated as in steps.
    """

    reads: ClassVar[str] = "logprobs"
    depends_on_step: ClassVar[bool] = False

    @abstractmethod
    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        """A step's loss (scalar), before the division, by torch's differentiable functions.

        Args:
            log_prob_N: of all its targets, micro-batch after micro-batch; 0 without a target.
            targets_N: -100 for none.
            extras: as for `tokens`; undefined where a token has no target.
        """

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        """The log-probabilities: all that the first visit computes."""
        return log_probs_of(logits_NV, targets_N)

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
        self, log_probs: Tensors, targets: Tensors, extras: Sequence[Tensors], normaliser: float
    ) -> Weighed:
        """Each micro-batch's share of the step's loss, its slopes by labels, and the measures.

        Args:
            log_probs: `[B, T]` of each micro-batch, 0 where there is no target; or further numbers.
            targets: `[B, T]` of each, -100 for none.
            extras: the tensors named in `inputs` and `choices`, of each.

        Returns:
            Scalars, all but the first 0 unless the loss is not finite; and slopes by `log_probs`.
        """
        flat = [
            torch.cat([e.flatten(0, t.ndim - 1) for e, t in zip(part, targets, strict=True)])
            for part in zip(*extras, strict=True)
        ]
        with torch.enable_grad():
            pairs = zip(log_probs, targets, strict=True)
            flat_values = [value.flatten(0, target.ndim - 1) for value, target in pairs]
            log_probs_N = torch.cat(flat_values).detach().requires_grad_()
            targets_N = torch.cat([tensor.reshape(-1) for tensor in targets])
            loss = self.joint(log_probs_N, targets_N, *flat) / normaliser
        [slopes_N] = torch.autograd.grad(loss, [log_probs_N])
        measured = self.measures(log_probs_N.detach(), targets_N, *flat)
        parts = slopes_N.split([tensor.numel() for tensor in targets])
        slopes = [part.view_as(value) for part, value in zip(parts, log_probs, strict=True)]
        total = loss.detach().float()
        return [total, *[total * 0] * (len(slopes) - 1)], slopes, measured


def as_numbers(measured: Mapping[str, Tensor]) -> dict[str, float]:
    """Measures as Python numbers, without undefined ones (NaN)."""
    numbers = {name: float(value) for name, value in measured.items()}
    return {name: number for name, number in numbers.items() if number == number}


_NOT_KEPT = -1e8  # log-probabilities below stand for none
_MOST = -1e-7  # of the log of all kept probabilities together: something is left for the others


@dataclass(frozen=True)
class Distillation(Loss):
    """A divergence from the teacher's likeliest tokens, mixed with cross entropy.

    Of each label `(1 - share) * divergence + share * cross entropy`, over the K tokens that were
    kept of the teacher, whose probabilities are not scaled up for the tokens left out. p is the
    teacher's, q the model's, of the whole vocabulary; `share` is `cross_entropy`.

    `beta` chooses the divergence, as of TRL's `generalized_jsd_loss` (Agarwal et al., 2023,
    https://arxiv.org/abs/2306.13649, equation 1): at 0 forward KL, the sum of
    `p * (log p - log q)` (Hinton et al., 2015, https://arxiv.org/abs/1503.02531, at temperature 1),
    at 1 reverse KL, between them `beta * KL(p, m) + (1 - beta) * KL(q, m)` with
    `m = beta * p + (1 - beta) * q`. With `add_tail` all other tokens together count as one more,
    so that both are whole distributions: without, forward KL of few tokens may be negative.
    All logits are divided by `temperature` first, the teacher's before they are given; as in TRL,
    the loss is not multiplied by its square.

    A micro-batch has for each label, `[B, T, K]`:
        teacher_ids: the tokens that the teacher finds likeliest in the label's place, int64.
        teacher_log_probs: their log-probabilities, floating-point; -1e9 where fewer were kept.

    Raises InputError: `cross_entropy` or `beta` is not from 0 to 1, `temperature` not above 0, or
        not 1 beside a share of cross entropy, which is of the logits as they are.
    """

    cross_entropy: float = 0.0
    beta: float = 0.0
    add_tail: bool = False
    temperature: float = 1.0
    choices: ClassVar[tuple[str, ...]] = ("teacher_ids", "teacher_log_probs")

    def __post_init__(self) -> None:
        shares = {"share of cross entropy": self.cross_entropy, "beta of distillation": self.beta}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise InputError(f"the {name} is {share!r}; it must be from 0 to 1")
        super().__post_init__()
        if self.cross_entropy and self.temperature != 1:
            raise InputError("distillation takes cross_entropy or a temperature; leave one out")

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        lse_N = logits_NV.logsumexp(1)
        log_prob_N = logits_of(logits_NV, targets_N) - lse_N
        # In fp64: the slopes of reverse KL are differences of what is nearly the same.
        model_NK = logits_NV.gather(1, extras[0]).double() - lse_N.double()[:, None]
        teacher_NK = extras[1].double()
        if self.beta or self.add_tail:
            model_NK = torch.where(teacher_NK > _NOT_KEPT, model_NK, teacher_NK)
        if self.add_tail:
            teacher_NK, model_NK = _with_tail(teacher_NK), _with_tail(model_NK)
        divergence_N = self._divergence(teacher_NK, model_NK).float()
        return (1 - self.cross_entropy) * divergence_N - self.cross_entropy * log_prob_N

    def _divergence(self, teacher_NK: Tensor, model_NK: Tensor) -> Tensor:
        """The divergence of each token `[N]`, from log-probabilities `[N, K]`."""
        if self.beta == 0:
            return _kl(teacher_NK, model_NK)
        if self.beta == 1:
            return _kl(model_NK, teacher_NK)
        model_log, teacher_log = math.log1p(-self.beta), math.log(self.beta)  # of their shares
        mixed_NK = torch.logaddexp(model_NK + model_log, teacher_NK + teacher_log)
        return self.beta * _kl(teacher_NK, mixed_NK) + (1 - self.beta) * _kl(model_NK, mixed_NK)

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        """The labelled tokens. Raises InputError: a log-probability is above 0."""
        highest = max(float(log_probs.max()) for _, log_probs in extras)
        if highest > 0:
            raise InputError(f"teacher_log_probs holds {highest}; log-probabilities are at most 0")
        return super().normaliser(targets, extras)


def _kl(one_NK: Tensor, other_NK: Tensor) -> Tensor:
    return (one_NK.exp() * (one_NK - other_NK)).sum(1)


def _with_tail(log_probs_NK: Tensor) -> Tensor:
    """`[N, K + 1]`, with the log-probability of all other tokens at the end."""
    kept_N1 = log_probs_NK.logsumexp(1, keepdim=True).clamp(max=_MOST)
    return torch.cat([log_probs_NK, (-torch.expm1(kept_N1)).log()], 1)
