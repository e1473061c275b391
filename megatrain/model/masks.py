"""Attention masks of long rows: said before the step that would not have room for one."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatrain.base.units import gib
from megatrain.compat.transformers import attention_of
from megatrain.errors import DoesNotFit
from megatrain.model.documents import BY_LENGTHS, is_packed

_WITH_MASKS = ("sdpa", "eager", BY_LENGTHS)  # the others read lengths


def check_masks(
    micro_batches: Sequence[Mapping[str, Tensor]], config: Any, itemsize: int, free_bytes: int
) -> None:
    """Refuse rows whose mask `[B, 1, T, T]` is larger than the device.

    A row of one document without padding needs none: causal attention is told as such, and its
    memory grows with T.

    Args:
        config: of the text model.
        itemsize: bytes of a number in the compute dtype; torch turns a mask of bools into numbers.

    Raises:
        DoesNotFit: with what the mask is for.
    """
    if attention_of(config) not in _WITH_MASKS:
        return
    for index, micro in enumerate(micro_batches):
        rows, tokens = micro["input_ids"].shape
        needed = rows * tokens**2 * (1 + itemsize)
        reason = _reason(micro, config) if needed > free_bytes else None
        if reason is not None:
            raise DoesNotFit(
                f"micro-batch {index} has rows of {tokens} tokens with {reason}: the attention "
                f"mask takes {gib(needed)}, and {gib(free_bytes)} are free; use shorter rows, or "
                "long rows of one document without padding"
            )


def _reason(micro: Mapping[str, Tensor], config: Any) -> str | None:
    """Why transformers makes a mask for these rows (masking_utils, `_ignore_causal_mask_sdpa`)."""
    if "attention_mask" in micro and not bool(micro["attention_mask"].all()):
        return "padding"
    if is_packed(micro):
        return None if attention_of(config) == BY_LENGTHS else "several documents"
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and micro["input_ids"].shape[1] >= window:
        return f"a sliding window of {window}"
    return None
