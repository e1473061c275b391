"""Checks before ranks work together: they need the same settings, and some are not supported."""

import zlib
from typing import Any

import torch
import transformers

from megatrain.compat import peft
from megatrain.compat.transformers import attention_of, configs, experts_of
from megatrain.errors import InputError
from megatrain.loss import JointLoss, MultiLabel, require_loss
from megatrain.model.adapters import adapted
from megatrain.model.spec import ModelSpec
from megatrain.parallel.distributed import Ranks, require_same
from megatrain.placement import Placement
from megatrain.source.source import EngineSetup, Source

NO_LABELS = "no labels"  # takes the place of a loss


def check_shared(opened: EngineSetup, placement: Placement) -> None:
    """Raises InputError: ranks cannot train in this placement, or differ in model or settings."""
    ranks = opened.ranks
    if ranks.size == 1:
        return
    ranks.agree(lambda: _refuse_unsupported(opened, placement))
    require_same(ranks.all_gather_object(_described(opened, placement)))


def check_call(opened: EngineSetup, steps: int, loss: object, alike: Any = None) -> None:
    """Raises InputError: ranks differ in a call, or its loss is not for the model.

    Args: `alike`: further arguments that all ranks must pass; None: nothing is trained.
    """
    ranks, spec = opened.ranks, opened.model.spec
    optimizer = None if alike is None else opened.model.optimizer

    def described() -> dict[str, str]:
        if optimizer is not None:
            optimizer.check()
        checked_loss = loss if loss is NO_LABELS else require_loss(loss)
        if checked_loss is not NO_LABELS and not _fits(checked_loss, spec):
            raise InputError(
                f"{type(loss).__name__} is not for a {type(spec.capture.model).__name__}: Reward "
                "is for one score of each row (AutoModelForSequenceClassification, num_labels=1), "
                "Contrastive for models without a head (AutoModel), cross entropy and MultiLabel "
                "for heads of classes (regression has no loss), other losses for language models"
            )
        if ranks.size == 1:
            return {}
        groups = [] if optimizer is None else optimizer.param_groups
        names = () if optimizer is None else ("param_names", *optimizer.rule.settings)
        settings = [{name: group[name] for name in names} for group in groups]
        return {
            "call": f"{'an evaluation' if optimizer is None else 'a step'} after {steps} steps",
            "loss": str(checked_loss),
            "settings of the optimizer": str(settings),
            "max_grad_norm, norm_limit, expected": str(alike),
        }

    ranks.barrier()
    require_same(ranks.agree(described))


def _fits(loss: Any, spec: ModelSpec) -> bool:
    """True if the model has the head that a loss needs."""
    task = spec.capture.task
    if loss.embeds or task == "FEATURE_EXTRACTION":
        return bool(loss.embeds) and task == "FEATURE_EXTRACTION"
    is_score = task == "SEQ_CLS" and spec.num_logits == 1
    if loss.scores or is_score:
        return bool(loss.scores and is_score)
    problem = getattr(spec.capture.model.config, "problem_type", None)
    if task == "SEQ_CLS" and problem not in (None, "single_label_classification"):
        return problem == "multi_label_classification" and isinstance(loss, MultiLabel)
    return task == "CAUSAL_LM" or not isinstance(loss, JointLoss)


def require_alone(ranks: Ranks, what: str) -> None:
    """Raises InputError if there are several ranks."""
    if ranks.size > 1:
        raise InputError(f"{what} is not for several ranks yet; save, and do it with one")


def _refuse_unsupported(opened: EngineSetup, placement: Placement) -> None:
    """Raises InputError: several ranks do not support the model or the placement."""
    spec, rule = opened.model.spec, opened.model.rule
    is_muon = rule is not None and rule.needs_matrices
    unsupported = opened.ranks.hosts > 1 or opened.sequence_ranks.size > 1 or is_muon
    if placement.own_experts and unsupported:
        raise InputError(
            "placement.own_experts is not for several hosts, sequence_parallel, Muon: set it false"
        )
    if len(spec.gathered) > 1:
        raise InputError(
            f"several ranks cannot share a model with {len(spec.gathered)} tables of tokens yet "
            f"({', '.join(spec.gathered)}); train it with one"
        )


def _described(opened: EngineSetup, placement: Placement) -> dict[str, str]:
    """Everything that must be the same on all ranks, by name."""
    from megatrain import __version__

    source, model = opened.source, opened.model
    adapter, folder = adapted(source.model), source.adapter_folder
    code = [(attention_of(part), experts_of(part)) for _, part in configs(source.model.config)]
    tiles = [(t.name, t.numel, t.trainable_numel, t.entries) for t in model.layouts]
    facts = {
        "version of megatrain": __version__,
        "version of torch": torch.__version__,
        "version of transformers": transformers.__version__,
        "kind of device": opened.device.kind,
        "model": source.model.config.to_json_string(use_diff=False),
        "layout of tiles": zlib.crc32(repr(tiles).encode()),
        "model in memory": _checksum(source),
        "optimizer": model.rule,
        "max_grad_norm": opened.max_grad_norm,
        "precision": opened.precision,
        "verify": opened.verify,
        "implementation of attention and experts": code,
        "base": source.base,
        "adapter": None if adapter is None else adapter.as_json(),
        "file of the adapter": folder and zlib.crc32((folder / peft.WEIGHTS_FILE).read_bytes()),
        "placement": placement.as_dict(),
        "seed": opened.seed,
    }
    return {name: str(value) for name, value in facts.items()}


def _checksum(source: Source) -> int:
    """A hash of the weights of a model in memory, which all ranks must have; 0: no such model."""
    checksum = 0
    if source.in_memory is not None:
        for tensor in (*source.in_memory.parameters(), *source.in_memory.buffers()):
            if not tensor.is_meta:
                flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                checksum = zlib.crc32(flat.numpy().data, checksum)
    return checksum
