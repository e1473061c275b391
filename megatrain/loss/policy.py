"""Losses of a policy: of replies that the model has generated, each with a reward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss.base import IGNORED, JointLoss, num_labelled
from megatrain.loss.preferences import check_numbers, check_rows, labels_of

PolicyVariant = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
Level = Literal["token", "sequence"]
Scale = Literal["group", "batch", "none"]
_SMALL = 1e-4  # added to standard deviations, as in TRL


class _Labels(NamedTuple):
    """The labels of a step `[L]`, in any order.

    `row`: the number of each label's reply, below `replies`; `length`: the number of labels of that
    reply; `inputs`: the loss's inputs by name.
    """

    log_prob: Tensor
    row: Tensor
    length: Tensor
    replies: int
    inputs: dict[str, Tensor]

    def summed(self, values: Tensor) -> Tensor:
        """The sum over each reply `[R]`, fp64."""
        zeros = torch.zeros(self.replies, dtype=torch.float64, device=values.device)
        return zeros.index_add(0, self.row, values.double())

    def means(self, values: Tensor) -> Tensor:
        """The mean over each reply `[R]`, fp64."""
        return self.summed(values / self.length)


@dataclass(frozen=True)
class GRPO(JointLoss):
    """Group-relative policy optimisation: `-min(ratio * advantage, clipped ratio * advantage)`.

    Shao et al., 2024, https://arxiv.org/abs/2402.03300, equation 3, with TRL's names and defaults.
    Every row is a reply. The ratio is a label's probability over its old one, clipped to
    `1 - epsilon` and `1 + epsilon_high`; `delta` bounds the unclipped ratio. With
    `importance_sampling_level` "sequence" it is the geometric mean over the reply. An advantage is
    the reward minus the mean of its group, divided by the standard deviation of the group, of the
    batch, or by 1 (`scale_rewards`). `beta` weights the divergence from a reference model, which is
    `exp(d) - d - 1` for each label, times the ratio with `use_bias_correction_kl`: so its gradient
    is that of the true divergence (DeepSeek-AI, 2025, arXiv 2512.02556, section 3.1).

    `loss_type`: grpo is the mean over replies of each reply's mean; bnpo and dapo are the mean over
    all labels of the step; dr_grpo is the sum, divided by replies times `max_completion_length`;
    cispo is dapo with `-clipped ratio * advantage * log-probability`, the ratio clipped to
    `epsilon_high` and without gradient.

    A micro-batch has for each label, as floating-point numbers `[B, T]`:
        example: the number of the label's reply in the step.
        advantage: how much better the reply is than the other replies to its prompt.
        old_logp: the label's log-probability in the model that made the reply.
        reference_logp: the label's log-probability in a reference model; only with `beta`.

    Attributes:
        num_iterations: steps that learn from the same replies.
        max_completion_length: the most tokens of a reply.
        mask_truncated_completions: learn nothing from replies that did not end by themselves.
        temperature: of sampling. All log-probabilities, `old_logp` and `reference_logp` too, are of
            logits divided by it.

    Raises InputError: a setting is out of range or unknown.
    """

    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    num_generations: int = 8
    num_iterations: int = 1
    max_completion_length: int = 512
    mask_truncated_completions: bool = False
    temperature: float = 1.0
    delta: float | None = None
    loss_type: PolicyVariant = "dapo"
    importance_sampling_level: Level = "token"
    scale_rewards: Scale = "group"
    use_bias_correction_kl: bool = True

    limits: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("beta", "epsilon", "epsilon_high"), "0 or more"),
        **dict.fromkeys(("num_iterations", "max_completion_length"), "1 or more"),
        "num_generations": "2 or more",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta is not None and not self.delta > 1 + self.epsilon:
            raise InputError(f"GRPO's delta is {self.delta!r}; it must be above 1 + epsilon")
        if self.delta is not None and self.loss_type == "cispo":
            raise InputError("GRPO's cispo has no delta; leave it out")

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("example", "advantage", "old_logp", *(["reference_logp"] if self.beta else []))

    @property
    def lines(self) -> int:
        """Replies to one prompt of the data."""
        return self.num_generations

    @property
    def high(self) -> float:
        """The distance above 1 at which ratios are clipped."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def advantages(self, rewards_R: Tensor) -> Tensor:
        """The advantage of each reply `[R]` over the replies to its prompt; 0 for NaN rewards."""
        if len(rewards_R) % self.num_generations:
            raise InputError(
                f"{len(rewards_R)} rewards are no whole groups of {self.num_generations} replies"
            )
        if rewards_R.isinf().any():
            raise InputError("a reward is infinite; give finite numbers, or NaN for no reward")
        grouped = rewards_R.double().view(-1, self.num_generations)
        centred = grouped - grouped.nanmean(1, keepdim=True)
        if self.scale_rewards != "none":
            samples = grouped if self.scale_rewards == "group" else grouped.view(1, -1)
            squares = (samples - samples.nanmean(1, keepdim=True)).square()
            degrees = (~samples.isnan()).sum(1, keepdim=True) - 1  # with 0 the deviation is NaN
            deviation = (squares.nansum(1, keepdim=True) / degrees).sqrt()
            centred = centred / (deviation + _SMALL)
        return centred.nan_to_num(0.0).flatten().float()

    def _labels(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> _Labels:
        used = targets_N != IGNORED
        inputs = dict(zip(self.inputs, (extra[used] for extra in extras), strict=True))
        numbers, row = inputs["example"].unique(return_inverse=True)
        length = torch.bincount(row, minlength=len(numbers))[row]
        return _Labels(log_prob_N[used], row, length, len(numbers), inputs)

    def _ratio(self, labels: _Labels) -> Tensor:
        difference = labels.log_prob - labels.inputs["old_logp"]
        if self.importance_sampling_level == "sequence":
            difference = labels.summed(difference)[labels.row].to(difference.dtype) / labels.length
        return difference.exp()

    def _divergence(self, labels: _Labels, ratio: Tensor) -> Tensor:
        difference = labels.inputs["reference_logp"] - labels.log_prob
        divergence = difference.exp() - difference - 1
        return divergence * ratio if self.use_bias_correction_kl else divergence

    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> Tensor:
        labels = self._labels(log_prob_N, targets_N, *extras)
        advantage, ratio = labels.inputs["advantage"], self._ratio(labels)
        if self.loss_type == "cispo":
            losses = -ratio.detach().clamp(max=self.high) * advantage * labels.log_prob
        else:
            clipped = ratio.clamp(1 - self.epsilon, 1 + self.high)
            bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
            losses = -torch.min(bounded * advantage, clipped * advantage)
        if self.beta:
            losses = losses + self.beta * self._divergence(labels, ratio)
        if self.loss_type == "grpo":
            losses = losses / labels.length
        return losses.double().sum()

    def measures(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """The divergence and the shares of clipped ratios, by TRL's names."""
        labels = self._labels(log_prob_N, targets_N, *extras)
        ratio, is_by_reply = self._ratio(labels), self.importance_sampling_level == "sequence"
        measured = {"kl": self._divergence(labels, ratio).double().mean()} if self.beta else {}
        advantage = labels.inputs["advantage"]
        if self.loss_type == "cispo":
            clipped = ((ratio > self.high) & (advantage > 0)).double()
            mean = (labels.means(clipped) if is_by_reply else clipped).mean()
            return measured | {"cispo_clip_ratio": mean}
        if not labels.replies:
            return measured
        is_low = ((ratio < 1 - self.epsilon) & (advantage < 0)).double()
        is_high = ((ratio > 1 + self.high) & (advantage > 0)).double()
        low_R, high_R = labels.means(is_low), labels.means(is_high)
        shares = (low_R, high_R) if is_by_reply else (is_low, is_high)
        low_mean, high_mean = (share.mean() for share in shares)
        ratios = {"low_mean": low_mean, "high_mean": high_mean, "region_mean": low_mean + high_mean}
        ratios |= {"low_min": low_R.min(), "high_max": high_R.max()}
        return measured | {f"clip_ratio/{name}": value for name, value in ratios.items()}

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        """The divisor of `loss_type`. Raises InputError: two replies have the same number."""
        example = labels_of(0, targets, extras)
        check_numbers("example", example)
        check_rows("example", example, targets)
        num_replies = sum(len(target) for target in targets)
        if self.loss_type == "dr_grpo":
            return num_replies * self.max_completion_length
        if self.loss_type == "grpo":
            return num_replies
        return max(1, sum(num_labelled(target) for target in targets))
