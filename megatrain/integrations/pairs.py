"""TRL's trainers of pairs, `DPOTrainer` and `RewardTrainer`: their losses and their batches.

Both give micro-batches whose first half of rows are chosen replies, and the second those rejected.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from megatrain.data.preferences import scored
from megatrain.errors import InputError
from megatrain.integrations.accumulation import MicroBatchMeans
from megatrain.loss import DPO, Reward
from megatrain.loss.dpo import Variant

PREFERENCES, SCORES = "trl.trainer.dpo_trainer", "trl.trainer.reward_trainer"
PLAIN = ("input_ids", "labels", "attention_mask")
# Of DPOConfig, as they must stay.
_PLAIN_PAIRS = {
    "loss_weights": None,
    "f_divergence_type": "reverse_kl",
    "ld_alpha": None,
    "use_weighting": False,
    "sync_ref_model": False,
}


@dataclass(frozen=True)
class TrlDPO(MicroBatchMeans, DPO):
    """DPO, as DPOTrainer adds micro-batches."""


@dataclass(frozen=True)
class TrlReward(MicroBatchMeans, Reward):
    """Reward, as RewardTrainer adds micro-batches; measures have the names that it gives them."""

    def measures(self, log_prob_N: Tensor, targets_N: Tensor, *given: Tensor) -> dict[str, Tensor]:
        chosen, rejected = (
            replies.log_prob for replies in self.replies(log_prob_N, targets_N, *given)
        )
        every = torch.cat([chosen, rejected])
        named = {f"{name}_reward": getattr(every, name)() for name in ("min", "mean", "max")}
        named["accuracy"] = (chosen > rejected).float().mean()
        return named | {"margin": (chosen - rejected).mean()}


def comes_from(kind: type, module: str) -> bool:
    """Whether a trainer is one of a module, or derived from it."""
    return any(each.__module__ == module for each in kind.__mro__)


def pairs(step: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Micro-batches of DPOTrainer, without what a reference says."""
    labels = [micro["input_ids"].masked_fill(micro["completion_mask"] == 0, -100) for micro in step]
    return _numbered(step, labels)


def scored_pairs(step: list[dict[str, Tensor]], pad: int) -> list[dict[str, Tensor]]:
    """Micro-batches of RewardTrainer, with margins where the data have them."""
    labels = [scored(micro["input_ids"], micro["attention_mask"], pad) for micro in step]
    made = _numbered(step, labels)
    for micro, given in zip(made, step, strict=True):
        if "margin" in given:
            own = given["margin"].repeat(2)[:, None]
            micro["margin"] = own.expand(micro["labels"].shape).float()
    return made


def check_padding(own: int | None, pad: int) -> None:
    """Raises InputError: a model's own token for padding is not the tokenizer's, or there is none.

    A model is built otherwise with one: the token's embedding is never trained.
    """
    if own != pad:
        refuse(
            {
                f"a model whose pad_token_id is {own}": "load it with AutoModelForSequence"
                f"Classification.from_pretrained(..., pad_token_id={pad}), as the tokenizer has it"
            }
        )


def check_new_adapters(model: Any) -> None:
    """Raises InputError: DPOTrainer's reference, the base alone, is not the model with adapters."""
    for config in model.peft_config.values():
        if not getattr(config, "init_lora_weights", True):
            refuse(
                {
                    "peft_config with init_lora_weights: False": "DPOTrainer's reference is the "
                    "model without this adapter, which begins as another model; give it as "
                    "ref_model, or train get_peft_model(model, config)"
                }
            )


def _numbered(step: list[dict[str, Tensor]], labels: list[Tensor]) -> list[dict[str, Tensor]]:
    made, first = [], 0
    for micro, own in zip(step, labels, strict=True):
        rows = torch.arange(len(own))
        count = len(rows) // 2
        numbers = {"pair": first + rows % count, "chosen": rows < count}
        first += count
        beside = {n: v[:, None].expand(own.shape).float() for n, v in numbers.items()}
        given = micro["input_ids"], own, micro["attention_mask"]
        made.append(dict(zip(PLAIN, given, strict=True)) | beside)
    return made


@contextmanager
def without_reference(args: Any, paired: bool) -> Iterator[None]:
    """Let DPOTrainer make no reference model, as where its log-probabilities are known already.

    Raises:
        InputError: they are to be computed first.
    """
    if not paired:
        yield
        return
    if args is None:
        raise InputError("StreamedTrainer needs args=DPOConfig(...), by name")
    if args.precompute_ref_log_probs:
        refuse({"args.precompute_ref_log_probs": "the reference is streamed beside the model"})
    args.precompute_ref_log_probs = True
    try:
        yield
    finally:
        args.precompute_ref_log_probs = False


def pair_loss(args: Any) -> TrlDPO:
    """The loss of DPOTrainer's arguments. Raises InputError: it is none of `megatrain.loss`."""
    types: list[Any] = [args.loss_type] if isinstance(args.loss_type, str) else list(args.loss_type)
    wrong = {}
    for name, plain in _PLAIN_PAIRS.items():
        if (given := getattr(args, name, plain)) != plain:
            wrong[f"args.{name}"] = f"it is {given!r}; leave it out"
    if len(types) != 1 or types[0] not in get_args(Variant):
        wrong["args.loss_type"] = f"it must be one of {', '.join(get_args(Variant))}"
    elif args.label_smoothing and types[0] in ("sigmoid", "sigmoid_norm"):
        wrong["args.label_smoothing"] = (
            f"DPOTrainer's {types[0]} has none; set it to 0, take loss_type='robust', or a run "
            "file: loss.label_smoothing"
        )
    refuse(wrong)
    smoothing = args.label_smoothing if types[0] not in ("ipo", "hinge") else 0.0
    return TrlDPO(args.beta, smoothing, types[0])


def refuse(wrong: dict[str, str]) -> None:
    """Raises InputError: a setting asks for what would not be done."""
    for name, why in wrong.items():
        raise InputError(f"StreamedTrainer cannot heed {name}: {why}")
