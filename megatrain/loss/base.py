"""The base classes of losses.

The head's logits `[N, V]` exist for some tokens at a time. A loss computes a value of each token,
and the divisor of the sum of these values over all micro-batches of a step.

Legend: B rows, T tokens of a row, N tokens of a micro-batch, V vocabulary, K tokens that a loss
chooses for each label.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple, get_args, get_origin

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.errors import InputError

IGNORED = -100
Tensors = Sequence[Tensor]
Weighed = tuple[list[Tensor], list[Tensor], dict[str, Tensor]]
"""Each micro-batch's share of a step's loss, its slopes, and measures; see `JointLoss.weigh`."""


def targets_of(labels_BT: Tensor, shift: int = 1, fill: float = IGNORED) -> Tensor:
    """The target of each position `[B, T]`: the label `shift` positions later; `fill` at the end.

    Weights and other values of labels, also `[B, T]`, are shifted in the same way.
    """
    targets_BT = torch.full_like(labels_BT, fill)
    targets_BT[:, : labels_BT.shape[1] - shift] = labels_BT[:, shift:]
    return targets_BT


def num_labelled(targets_BT: Tensor) -> int:
    """The number of positions that have a target."""
    return int((targets_BT != IGNORED).sum())


def logits_of(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The logit of each position's target `[N]`; if it has none, the logit of token 0."""
    return logits_NV.gather(1, targets_N.clamp(min=0)[:, None])[:, 0]


def log_probs_of(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The log-probability of each token's target `[N]`; undefined without a target."""
    return logits_of(logits_NV, targets_N) - logits_NV.logsumexp(1)


# Checks of settings, by the words with which `Loss.limits` and messages name them.
_RULES: dict[str, Callable[[float], bool]] = {
    "above 0": lambda x: 0 < x < math.inf,
    "0 or more": lambda x: 0 <= x < math.inf,
    "1 or more": lambda x: 1 <= x < math.inf,
    "2 or more": lambda x: 2 <= x < math.inf,
    "from 0 to 1": lambda x: 0 <= x <= 1,
    "from 0 to below 1": lambda x: 0 <= x < 1,
    "from 0 to below 0.5": lambda x: 0 <= x < 0.5,
}


class Loss(ABC):
    """A loss of a step; subclasses are frozen dataclasses, equal if they compute the same.

    Attributes:
        limits: by name of a setting, its range in words: a key of `_RULES`, such as "above 0".
        inputs: names of further tensors `[B, T]` of each micro-batch: a number for each label.
        choices: names of further tensors `[B, T, K]` of each micro-batch: first the ids (int64) of
            tokens whose logits the loss reads, then numbers for each of these tokens.
        temperature: above 0; divides the logits before anything else.
        scores: True if the loss reads the one number of a head that scores rows.
        embeds: True if the loss reads the hidden states of a model without a head.
    """

    limits: ClassVar[dict[str, str]] = {}
    scores: ClassVar[bool] = False
    embeds: ClassVar[bool] = False
    inputs: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[tuple[str, ...]] = ()
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Raises InputError: a setting is not as `limits` says, or none of its literals."""
        for name, rule in {"temperature": "above 0", **self.limits}.items():
            value, default = getattr(self, name), getattr(type(self), name, 0)
            if not ((value is None and default is None) or _RULES[rule](value)):
                raise InputError(f"{type(self).__name__}'s {name} is {value!r}; it must be {rule}")
        for setting in fields(self):  # type: ignore[arg-type]
            value, known = getattr(self, setting.name), get_args(setting.type)
            if get_origin(setting.type) is Literal and value not in known:
                raise InputError(
                    f"{type(self).__name__}'s {setting.name} is {value!r}; it must be one of "
                    f"{', '.join(known)}"
                )

    @property
    def head(self) -> "ClassHead | None":
        """The head that replaces a language model's for this loss; None: the model keeps its."""
        return ClassHead() if self.scores else None

    @abstractmethod
    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        """The loss of each token `[N]`, fp32, by torch's differentiable functions.

        Args:
            logits_NV: in fp32, divided by the temperature.
            targets_N: -100 for no target: the result there is ignored.
            extras: the tensors named in `inputs` `[N]` and `choices` `[N, K]`.
        """

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        """The divisor of the sum over all tokens of a step: here the number of labelled tokens.

        Args:
            targets: `[B, T]` of each micro-batch, -100 for no target.
            extras: the tensors named in `inputs` and `choices`, of each micro-batch.
        """
        return sum(num_labelled(target) for target in targets)

    def bare(self, step: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The micro-batches without the loss's `inputs` and `choices`."""
        dropped = {*self.inputs, *self.choices}
        return [{n: value for n, value in micro.items() if n not in dropped} for micro in step]

    def pooled(self, values: Tensor, targets_BT: Tensor) -> Tensor:
        """The values `[B, T, ...]` of tokens, or pooled ones `[B, ...]` of rows."""
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
        """Logits divided by the loss's temperature, in fp32; unchanged at 1."""
        return logits if self.temperature == 1 else logits.float() / self.temperature


class ClassHead(NamedTuple):
    """The head that replaces a language model's: it classifies rows, or tokens if `of_tokens`.

    With one label it gives a score. With no labels there is no head; `pooling` tells users of the
    model which hidden states are a row's embedding.
    """

    labels: tuple[str, ...] = ("LABEL_0",)
    of_tokens: bool = False
    problem_type: str | None = None
    pooling: str | None = None


def require_loss(loss: object) -> Loss:
    """Return `loss`. Raises InputError: it is not a Loss."""
    if not isinstance(loss, Loss):
        raise InputError(f"loss is {loss!r}; it must be one of megatrain.loss, such as DPO()")
    return loss


def cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Cross entropy summed over the labelled tokens, in fp32 (scalar)."""
    return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Cross entropy, the mean over all labelled tokens of the step, of logits over `temperature`.

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
    """The weighted mean of cross entropy; `token_weights` `[B, T]` has a weight for each label.

    The sum is divided by the sum of the weights of all labelled tokens of the step. Logits are
    divided by `temperature` first.

    Raises InputError: the temperature is not above 0.
    """

    temperature: float = 1.0
    inputs: ClassVar[tuple[str, ...]] = ("token_weights",)

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        return -log_probs_of(logits_NV, targets_N) * extras[0]

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        used = [w[t != IGNORED] for t, [w] in zip(targets, extras, strict=True)]
        lowest = min((float(weights.min()) for weights in used if len(weights)), default=0.0)
        if lowest < 0:
            raise InputError(f"token_weights holds {lowest}; weights must not be negative")
        total = float(sum(weights.double().sum() for weights in used))
        if total == 0 and any(map(len, used)):
            raise InputError("token_weights are 0 for all labels of this step; leave the step out")
        return total


@dataclass(frozen=True)
class Sloped(Loss):
    """The sum of `joint`'s values of tokens times `slopes` `[B, T, ...]`, its gradient by them."""

    joint: Loss
    inputs: ClassVar[tuple[str, ...]] = ("slopes",)

    def tempered(self, logits: Tensor) -> Tensor:
        return self.joint.tempered(logits)

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        values = self.joint.tokens(logits_NV, targets_N)
        return (values * extras[0].view_as(values)).view(len(values), -1).sum(1)


@dataclass(frozen=True)
class MultiLabel(Loss):
    """The mean over classes of binary cross entropy, as in transformers' multi-label problems.

    A micro-batch has, `[B, T, K]`: `classes`, the numbers of all K classes, int64; `truths`, 1.0 if
    the label has the class, else 0.0.
    """

    choices: ClassVar[tuple[str, ...]] = ("classes", "truths")

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        classes_NK, truths_NK = extras
        chosen_NK = logits_NV.gather(1, classes_NK)
        return F.binary_cross_entropy_with_logits(chosen_NK, truths_NK, reduction="none").mean(1)


@dataclass(frozen=True)
class LabelSmoothing(Loss):
    """`(1 - share) * cross entropy + share * its mean over all tokens of the vocabulary`.

    It is torch's `cross_entropy(label_smoothing=share)` (Szegedy et al., 2016, section 7).

    Raises InputError: `share` is not at least 0 and below 1.
    """

    share: float
    limits: ClassVar[dict[str, str]] = {"share": "from 0 to below 1"}

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        lse_N = logits_NV.logsumexp(1)
        log_prob_N = logits_of(logits_NV, targets_N) - lse_N
        return self.share * (lse_N - logits_NV.mean(1)) - (1 - self.share) * log_prob_N


@dataclass(frozen=True)
class Score(Loss):
    """Cross entropy, and 1 if the label is the likeliest token, `[N, 2]`; without gradients."""

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        right_N = logits_of(logits_NV, targets_N) >= logits_NV.amax(1)
        return torch.stack([-log_probs_of(logits_NV, targets_N), right_N.float()], 1)

    def summed(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        right = self.each_of(logits_NV, targets_N)[:, 1].sum()
        return torch.stack([cross_entropy_sum(logits_NV, targets_N), right])


@dataclass(frozen=True)
class TopTokens(Loss):
    """Log-probabilities and ids of the `top_k` likeliest tokens for each label.

    For each position this is `[2, K]`, in fp32, which holds ids below 2 ** 24 exactly; 0 without a
    target. There are no gradients.

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
    """A loss of all labels' log-probabilities, whose gradient at one depends on the others.

    The head visits the micro-batches twice: for all log-probabilities, then for the gradient of
    each log-probability, which is multiplied by the slope of the loss there (`Sloped`).

    Attributes:
        reads: the method of Engine that returns the values of the first visit.
        depends_on_step: True if a row's loss depends on the step's other rows: evaluate like steps.
    """

    reads: ClassVar[str] = "logprobs"
    depends_on_step: ClassVar[bool] = False

    @abstractmethod
    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        """A step's loss (scalar), before the division, by torch's differentiable functions.

        Args:
            log_prob_N: log-probabilities of all targets of the step; 0 without a target.
            targets_N: all targets; -100 for no target.
            extras: as for `tokens`; undefined without a target.
        """

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        """The log-probabilities, which the first visit computes."""
        return log_probs_of(logits_NV, targets_N)

    def measures(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """Measures to log beside the loss: scalars by name; NaN if undefined."""
        return {}

    def loss_and_measures(
        self, log_probs: Sequence[Tensor], micro_batches: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, float]:
        """Loss and measures, given `log_probs` at the labels' own positions. Raises InputError."""
        labels = [micro["labels"] for micro in micro_batches]
        extras = [[micro[name] for name in self.inputs] for micro in micro_batches]
        losses, _, measured = self.weigh(log_probs, labels, extras, self.normaliser(labels, extras))
        return {"loss": float(losses[0]), **as_numbers(measured)}

    def weigh(
        self, log_probs: Tensors, targets: Tensors, extras: Sequence[Tensors], normaliser: float
    ) -> Weighed:
        """Each micro-batch's share of the step's loss, its slopes, and the step's measures.

        Args:
            log_probs: `[B, T]` of each micro-batch, 0 without a target (or what `reads` returns).
            targets: `[B, T]` of each micro-batch, -100 for no target.
            extras: the tensors named in `inputs` and `choices`, of each micro-batch.

        Returns:
            Shares: the first one is the loss, the others are 0, or not finite if the loss is not;
            slopes: gradients of the loss by `log_probs`; measures.
        """
        flat_extras = []
        for tensors in zip(*extras, strict=True):  # one input of the loss, of all micro-batches
            pairs = zip(tensors, targets, strict=True)
            flat_extras.append(torch.cat([t.flatten(0, target.ndim - 1) for t, target in pairs]))
        with torch.enable_grad():
            pairs = zip(log_probs, targets, strict=True)
            flat_values = [value.flatten(0, target.ndim - 1) for value, target in pairs]
            log_probs_N = torch.cat(flat_values).detach().requires_grad_()
            targets_N = torch.cat([tensor.reshape(-1) for tensor in targets])
            loss = self.joint(log_probs_N, targets_N, *flat_extras) / normaliser
        [slopes_N] = torch.autograd.grad(loss, [log_probs_N])
        measured = self.measures(log_probs_N.detach(), targets_N, *flat_extras)
        parts = slopes_N.split([tensor.numel() for tensor in targets])
        slopes = [part.view_as(value) for part, value in zip(parts, log_probs, strict=True)]
        total = loss.detach().float()
        return [total, *[total * 0] * (len(slopes) - 1)], slopes, measured


def as_numbers(measured: Mapping[str, Tensor]) -> dict[str, float]:
    """Measures as Python numbers, without undefined ones (NaN)."""
    numbers = {name: float(value) for name, value in measured.items()}
    return {name: number for name, number in numbers.items() if not math.isnan(number)}


_NOT_KEPT = -1e8  # a lower log-probability stands for "no token"
_MOST = -1e-7  # the largest log of the kept tokens' probability: the tail keeps a little


@dataclass(frozen=True)
class Distillation(Loss):
    """A divergence from the teacher's likeliest tokens, mixed with cross entropy.

    The loss of a label is `(1 - cross_entropy) * divergence + cross_entropy * its cross entropy`.
    The divergence is over the teacher's K likeliest tokens, whose probabilities p (the teacher's)
    and q (the model's) are of the whole vocabulary, so they do not add up to 1.

    `beta` chooses the divergence, as in TRL's `generalized_jsd_loss` (Agarwal et al., 2023,
    https://arxiv.org/abs/2306.13649, equation 1): 0 is forward KL, the sum of
    `p * (log p - log q)` (Hinton et al., 2015, https://arxiv.org/abs/1503.02531, at temperature 1);
    1 is reverse KL; between them it is `beta * KL(p, m) + (1 - beta) * KL(q, m)` with
    `m = beta * p + (1 - beta) * q`. With `add_tail` all other tokens together count as one more
    token, so both are whole distributions; without it forward KL may be negative. The model's
    logits are divided by `temperature` here, the teacher's by the caller. As in TRL, the loss is
    not multiplied by `temperature ** 2`.

    A micro-batch has for each label, `[B, T, K]`:
        teacher_ids: the teacher's likeliest tokens for the label, int64.
        teacher_log_probs: their log-probabilities, floating-point; -1e9 stands for no token.

    Raises InputError: `cross_entropy` or `beta` is not from 0 to 1, `temperature` not above 0, or
        not 1 although `cross_entropy`, which takes undivided logits, is above 0.
    """

    cross_entropy: float = 0.0
    beta: float = 0.0
    add_tail: bool = False
    temperature: float = 1.0
    choices: ClassVar[tuple[str, ...]] = ("teacher_ids", "teacher_log_probs")
    limits: ClassVar[dict[str, str]] = {"cross_entropy": "from 0 to 1", "beta": "from 0 to 1"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cross_entropy and self.temperature != 1:
            raise InputError("distillation takes cross_entropy or a temperature; leave one out")

    def tokens(self, logits_NV: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        lse_N = logits_NV.logsumexp(1)
        log_prob_N = logits_of(logits_NV, targets_N) - lse_N
        # fp64, since the gradients of reverse KL are differences of nearly equal numbers.
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
        model_log_share, teacher_log_share = math.log1p(-self.beta), math.log(self.beta)
        mixed_NK = torch.logaddexp(model_NK + model_log_share, teacher_NK + teacher_log_share)
        return self.beta * _kl(teacher_NK, mixed_NK) + (1 - self.beta) * _kl(model_NK, mixed_NK)

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        """The number of labelled tokens. Raises InputError: a log-probability is above 0."""
        highest = max(float(log_probs.max()) for _, log_probs in extras)
        if highest > 0:
            raise InputError(f"teacher_log_probs holds {highest}; log-probabilities are at most 0")
        return super().normaliser(targets, extras)


def _kl(log_p_NK: Tensor, log_q_NK: Tensor) -> Tensor:
    return (log_p_NK.exp() * (log_p_NK - log_q_NK)).sum(1)


def _with_tail(log_probs_NK: Tensor) -> Tensor:
    """`[N, K + 1]`, with the log-probability of all other tokens at the end."""
    kept_N1 = log_probs_NK.logsumexp(1, keepdim=True).clamp(max=_MOST)
    return torch.cat([log_probs_NK, (-torch.expm1(kept_N1)).log()], 1)
