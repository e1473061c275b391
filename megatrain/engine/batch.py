"""The micro-batches of one optimizer step, checked and brought to the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.errors import InputError
from megatrain.loss import IGNORED, num_labelled, targets_of
from megatrain.model.program import MicroBatch
from megatrain.model.skeleton import Rows

KEYS = ("input_ids", "attention_mask", "position_ids", "labels")


@dataclass
class Batch:
    """One step's micro-batches.

    Attributes:
        micro: on the device.
        num_labelled: positions with a target, over all micro-batches.
        num_tokens: all positions, padding included.
        unique_U: the token ids whose rows are gathered (CPU); `micro[i].rows.index` points into it.
        seed: makes the random numbers of this step.
    """

    micro: list[MicroBatch]
    num_labelled: int
    num_tokens: int
    unique_U: Tensor
    seed: int


def prepare(
    micro_batches: Sequence[Mapping[str, Tensor]],
    device: torch.device,
    vocab_size: int,
    *,
    labelled: bool,
    seed: int,
    label_shift: int = 1,
    constants: Sequence[int] = (),
    max_tokens: int | None = None,
) -> Batch:
    """Check CPU micro-batches and move them to `device`.

    Args:
        label_shift: how many tokens a label is after what predicts it.
        constants: token ids whose rows are needed besides the batch's own.
        max_tokens: positions that the model has; None: any number.

    Raises:
        InputError: no micro-batch, unknown keys, wrong shapes or types, ids outside the
            vocabulary, positions that the model does not have, or (with `labelled`) no position
            that has a target.
    """
    if not isinstance(micro_batches, list | tuple) or not micro_batches:
        given = "none" if micro_batches == [] else f"a {type(micro_batches).__name__}"
        raise InputError(f"a step needs a list of at least one micro-batch; it got {given}")
    for index, micro in enumerate(micro_batches):
        _check(index, micro, vocab_size, labelled)
        _check_positions(f"micro-batch {index}", micro, max_tokens)
    targets = [targets_of(m["labels"], label_shift) if labelled else None for m in micro_batches]
    count = sum(num_labelled(each) for each in targets if each is not None)
    if labelled and count == 0:
        raise InputError("no token of this step has a label; check the data's labels (all -100)")
    ids = torch.cat([m["input_ids"].reshape(-1) for m in micro_batches])
    every = torch.cat([ids, torch.tensor(constants, dtype=ids.dtype)])
    unique_U, index = torch.unique(every, return_inverse=True)
    lengths = [m["input_ids"].numel() for m in micro_batches]
    parts = index[: len(ids)].split(lengths)
    moved = [
        _moved(micro, target, part.view(micro["input_ids"].shape), unique_U, device)
        for micro, target, part in zip(micro_batches, targets, parts, strict=True)
    ]
    return Batch(moved, count, len(ids), unique_U, seed)


def _moved(
    micro: Mapping[str, Tensor],
    targets_BT: Tensor | None,
    index_BT: Tensor,
    unique_U: Tensor,
    device: torch.device,
) -> MicroBatch:
    # A mask of ones says nothing, and lets transformers take the fast causal path.
    inputs = {
        key: (micro[key].clone() if micro[key].is_inference() else micro[key]).to(device)
        for key in KEYS[:3]
        if key in micro and not (key == "attention_mask" and bool(micro[key].all()))
    }
    rows = Rows(inputs["input_ids"], index_BT.to(device), {}, unique_U)
    return MicroBatch(inputs, None if targets_BT is None else targets_BT.to(device), rows)


def _check(index: int, micro: Mapping[str, Tensor], vocab_size: int, labelled: bool) -> None:
    where = f"micro-batch {index}"
    if not isinstance(micro, Mapping):
        raise InputError(f"{where} is a {type(micro).__name__}; it must be a dictionary of tensors")
    unknown = sorted(set(micro) - set(KEYS))
    if unknown:
        raise InputError(f"{where} has an unknown key {unknown[0]!r}; known: {', '.join(KEYS)}")
    for key in ("input_ids", "labels") if labelled else ("input_ids",):
        if key not in micro:
            raise InputError(f"{where} has no {key}")
    for key, value in micro.items():
        if not isinstance(value, Tensor):
            raise InputError(f"{where}: {key} is a {type(value).__name__}; it must be a tensor")
    shape = micro["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"{where}: input_ids must be [rows, tokens], not {list(shape)}")
    for key, value in micro.items():
        if value.shape != shape or value.dtype != torch.int64 or value.device.type != "cpu":
            raise InputError(
                f"{where}: {key} is {list(value.shape)} {value.dtype} on {value.device}; it must "
                f"be {list(shape)} torch.int64 on the cpu"
            )
    _check_ids(f"{where}: input_ids", micro["input_ids"], vocab_size)
    if labelled:
        labels = micro["labels"]
        _check_ids(f"{where}: labels", labels[labels != IGNORED], vocab_size)


def _check_positions(where: str, micro: Mapping[str, Tensor], max_tokens: int | None) -> None:
    tokens = micro["input_ids"].shape[1]
    if max_tokens is not None and tokens > max_tokens:
        raise InputError(
            f"{where} has rows of {tokens} tokens, but the model has {max_tokens} positions "
            "(max_position_embeddings); cut the rows"
        )
    positions = micro.get("position_ids", torch.zeros(1))
    if positions.min() < 0:
        raise InputError(f"{where}: position_ids holds {int(positions.min())}, which is negative")
    if max_tokens is not None and positions.max() >= max_tokens:
        raise InputError(
            f"{where}: position_ids holds {int(positions.max())}, but the model has {max_tokens} "
            "positions (max_position_embeddings)"
        )


def _check_ids(where: str, ids: Tensor, vocab_size: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise InputError(
            f"{where} holds token {int(outside[0])}, outside the model's vocabulary of "
            f"{vocab_size}; use the model's own tokenizer"
        )
