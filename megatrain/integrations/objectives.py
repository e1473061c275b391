"""Losses of trainers, and predictions for `compute_metrics` and `Trainer.predict`.

The loss is cross entropy, or for DPOTrainer and RewardTrainer a loss of pairs, whose micro-batches
have chosen replies in the first half of their rows and rejected ones in the second. The losses of a
step's micro-batches are divided and added as the Trainer does it: each has its own divisor. If a
stream without a length ends within a step, the Trainer adds that part's gradient to the next step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any, ClassVar, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatrain import loss as losses
from megatrain.api import Engine
from megatrain.data.dataset import scored
from megatrain.errors import InputError
from megatrain.integrations.heeded import refuse
from megatrain.loss import Replies, Tensors, Weighed

_NOT_OF_MODEL = ("completion_mask", "margin", "ref_chosen_logps", "ref_rejected_logps")
MicroBatches = list[dict[str, Tensor]]
Measured = tuple[float, dict[str, float]]  # a loss and its measures
_NLL_TYPES = ("nll", "chunked_nll")  # of SFTTrainer, mathematically one


class Waiting(NamedTuple):
    """A micro-batch that waits on the host for its step, which has `num_micro` of them."""

    inputs: dict[str, Tensor]
    # labels of the Trainer's step, by which it divides the sum of losses; None: the Trainer divides
    # each micro-batch's mean by `num_micro`
    items: float | None
    num_micro: int


@dataclass(frozen=True)
class MicroBatchMeans(losses.PairLoss):
    """Mix-in for a loss of pairs: the sum over micro-batches of their mean loss times their share.

    Measures are means over micro-batches.
    """

    shares: tuple[float, ...] = (1.0,)

    def weigh(
        self, log_probs: Tensors, targets: Tensors, extras: Sequence[Tensors], normaliser: float
    ) -> Weighed:
        terms, weights, measured = [], [], []  # of each micro-batch
        for values, labels, beside, share in zip(
            log_probs, targets, extras, self.shares, strict=True
        ):
            [loss], [weight], measures = super().weigh(
                [values], [labels], [beside], len(labels) / 2
            )
            terms.append(share * loss)
            weights.append(share * weight)
            measured.append(measures)
        total = torch.stack(terms).sum()
        means = {n: torch.stack([part[n] for part in measured]).mean() for n in measured[0]}
        return [total, *[total * 0] * (len(weights) - 1)], weights, means


@dataclass(frozen=True)
class WeightedSum(losses.TokenWeights):
    """The sum of cross entropies weighted by `token_weights`, without a divisor."""

    def normaliser(self, targets: Sequence[Tensor], extras: Sequence[Sequence[Tensor]]) -> float:
        return 1.0


@dataclass(frozen=True)
class TrlDPO(MicroBatchMeans, losses.DPO):
    """DPO as DPOTrainer computes it, with its count of each reply's tokens as `length`."""

    inputs: ClassVar[tuple[str, ...]] = (*losses.DPO.inputs, "length")

    def replies(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> list[Replies]:
        replies = super().replies(log_prob_N, targets_N, *extras)
        # Each label has its reply's length, so that sums over labels are its multiples.
        sums = super().replies(extras[-1], targets_N, *extras)
        return [
            reply._replace(length=summed.log_prob / summed.length)
            for reply, summed in zip(replies, sums, strict=True)
        ]


@dataclass(frozen=True)
class TrlReward(MicroBatchMeans, losses.Reward):
    """Reward as RewardTrainer computes it; measures have RewardTrainer's names."""

    def measures(self, log_prob_N: Tensor, targets_N: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        chosen, rejected = (r.log_prob for r in self.replies(log_prob_N, targets_N, *extras))
        scores = torch.cat([chosen, rejected])
        named = {f"{name}_reward": getattr(scores, name)() for name in ("min", "mean", "max")}
        named["accuracy"] = (chosen > rejected).float().mean()
        return named | {"margin": (chosen - rejected).mean()}


class Objective:
    """Cross entropy, as Trainer and SFTTrainer minimise it."""

    loss: losses.Loss = losses.CROSS_ENTROPY

    def __init__(self, args: Any) -> None:
        """Raises InputError: the arguments ask for another loss."""
        if getattr(args, "loss_type", "nll") not in _NLL_TYPES:
            refuse("args.loss_type", f"it must be one of {', '.join(_NLL_TYPES)}")
        if getattr(args, "label_names", None) not in (None, ["labels"]):
            refuse("args.label_names", "labels are named labels")
        self._is_trl = hasattr(args, "loss_type")

    def step(self, waiting: Sequence[Waiting], engine: Engine) -> tuple[MicroBatches, losses.Loss]:
        """The micro-batches and the loss of a step, with the Trainer's divisors.

        If divisors differ, rows have token weights. TRL's loss without labels is 0.
        """
        rows = [micro.inputs for micro in waiting]
        if any("labels" not in row for row in rows):
            return rows, losses.CROSS_ENTROPY
        targets = [losses.targets_of(row["labels"], engine.label_shift) for row in rows]
        counts = [*map(losses.num_labelled, targets)]
        divisors = [
            micro.num_micro * count if micro.items is None else micro.items
            for micro, count in zip(waiting, counts, strict=True)
        ]
        if self._is_trl and not any(counts):
            rows, divisors = [row | {"labels": row["input_ids"]} for row in rows], [inf] * len(rows)
        elif all(divisor == sum(counts) for divisor in divisors):
            return rows, losses.CROSS_ENTROPY
        elif 0 in divisors:
            raise InputError(
                f"micro-batch {divisors.index(0)} of this step has no label, so Trainer's loss is "
                "not a number; leave such rows out"
            )
        weighted = [
            row | {"token_weights": torch.full(row["labels"].shape, 1 / divisor)}
            for row, divisor in zip(rows, divisors, strict=True)
        ]
        return weighted, WeightedSum()

    def value(self, rows: MicroBatches, loss: Any, engine: Engine) -> Measured:
        """The loss of micro-batches without an update; NaN without a label."""
        targets = [losses.targets_of(row["labels"], engine.label_shift) for row in rows]
        if loss is losses.CROSS_ENTROPY and not any(map(losses.num_labelled, targets)):
            return nan, {}
        return engine.evaluate(rows, loss), {}


class _Pairs(Objective):
    """A loss of pairs of replies."""

    def rows(self, step: MicroBatches) -> MicroBatches:
        """The micro-batches with labels and the loss's other inputs."""
        raise NotImplementedError

    def step(self, waiting: Sequence[Waiting], engine: Engine) -> tuple[MicroBatches, losses.Loss]:
        rows = self.rows([micro.inputs for micro in waiting])
        shares = tuple(1 / micro.num_micro for micro in waiting)
        return rows, replace(self.loss, shares=shares)  # type: ignore[type-var]

    def value(self, rows: MicroBatches, loss: losses.JointLoss, engine: Engine) -> Measured:
        values = getattr(engine, loss.reads)(loss.bare(rows))
        measures = loss.loss_and_measures(values, rows)
        return measures.pop("loss"), measures


class Preferences(_Pairs):
    """The loss of DPOTrainer."""

    def __init__(self, args: Any) -> None:
        types, variants = args.loss_type, get_args(losses.DpoVariant)
        if len(types) != 1 or types[0] not in variants:
            refuse("args.loss_type", f"it must be one of {', '.join(variants)}")
        if args.label_smoothing and types[0] in ("sigmoid", "sigmoid_norm"):
            refuse(
                "args.label_smoothing",
                f"DPOTrainer's {types[0]} has none; set it to 0, take loss_type='robust', or a run "
                "file: loss.label_smoothing",
            )
        smoothing = 0.0 if types[0] in ("ipo", "hinge") else args.label_smoothing  # as in TRL
        self.loss = TrlDPO(args.beta, smoothing, types[0])
        self.reference: Engine | None = None

    def rows(self, step: MicroBatches) -> MicroBatches:
        labels = [m["input_ids"].masked_fill(m["completion_mask"] == 0, -100) for m in step]
        rows = _numbered(step, labels)
        assert self.reference is not None
        references = self.reference.logprobs(self.loss.bare(rows))
        for micro, inputs, reference in zip(rows, step, references, strict=True):
            length = inputs["completion_mask"].sum(1, keepdim=True).clamp(min=1)
            micro |= {"reference_logp": reference, "length": length.expand_as(reference).float()}
        return rows


class Scores(_Pairs):
    """The loss of RewardTrainer, with margins if the data have them."""

    def __init__(self, args: Any, pad: int, pad_of_model: int | None) -> None:
        """Args: `pad`: the token that fills rows; `pad_of_model`: the configuration's."""
        if pad_of_model != pad:
            refuse(
                f"a model whose pad_token_id is {pad_of_model}",
                "load it with AutoModelForSequenceClassification.from_pretrained(..., "
                f"pad_token_id={pad}), as the tokenizer has it",
            )
        self.loss, self.pad = TrlReward(args.center_rewards_coefficient), pad

    def rows(self, step: MicroBatches) -> MicroBatches:
        for micro in step:
            tokens = micro["input_ids"].shape
            for name, expected, reason in (
                ("attention_mask", tokens, "of tokens, 1 or 0, for each row"),
                ("margin", (tokens[0] // 2,), "one number for each pair; squeeze it"),
            ):
                if name in micro and micro[name].shape != expected:
                    shape = tuple(micro[name].shape)
                    raise InputError(
                        f"{name} of a batch is {shape}; it must be {tuple(expected)}: {reason}"
                    )
        labels = [scored(micro["input_ids"], micro["attention_mask"], self.pad) for micro in step]
        rows = _numbered(step, labels)
        for micro, inputs in zip(rows, step, strict=True):
            if "margin" in inputs:
                margins = inputs["margin"].repeat(2)[:, None]  # chosen rows, then rejected ones
                micro["margin"] = margins.expand(micro["labels"].shape).float()
        return rows

    def step(self, waiting: Sequence[Waiting], engine: Engine) -> tuple[MicroBatches, losses.Loss]:
        rows, loss = super().step(waiting, engine)
        return rows, replace(loss, margin="margin" in rows[0])  # type: ignore[type-var]


def _numbered(step: MicroBatches, labels: list[Tensor]) -> MicroBatches:
    """The micro-batches with labels, the number of each row's pair, and 1 for chosen replies."""
    numbered = []
    first = 0  # the number of the micro-batch's first pair
    for micro, targets in zip(step, labels, strict=True):
        rows = torch.arange(len(targets))
        count = len(rows) // 2
        numbers = {"pair": first + rows % count, "chosen": rows < count}
        first += count
        columns = {n: v[:, None].expand(targets.shape).float() for n, v in numbers.items()}
        of_model = {name: value for name, value in micro.items() if name not in _NOT_OF_MODEL}
        numbered.append(of_model | {"labels": targets} | columns)
    return numbered


def predicted(
    engine: Engine, inputs: dict[str, Tensor], items: float | None
) -> tuple[Any, Tensor, Any]:
    """Loss, logits `[B, T, V]` in fp32 and labels `[B, T]` of a batch, on the CPU.

    The loss is the sum of cross entropies divided by `items`, or by the number of labels (None);
    without labels it is None.
    """
    labels = inputs.get("labels")
    logits = engine.logits({name: value for name, value in inputs.items() if name != "labels"})
    if labels is None:
        return None, logits, None
    last = logits.shape[1] - engine.label_shift
    targets = labels[:, engine.label_shift :].flatten()
    total = cross_entropy(logits[:, :last].flatten(0, 1), targets, reduction="sum")
    return total / ((targets != -100).sum() if items is None else items), logits, labels
