"""Packed rows: documents one after the other in a row, told apart by positions that start anew.

transformers hides one document from the next by the attention mask that it makes of the positions.
Not every model has such a mask: states, convolutions and some attention run on across documents.
So it is tried on the first such row: if what comes out for a document changes with the document
before it, packing is refused.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megatrain.errors import InputError

# Of the norm, in fp32 and bf16 alike: where documents are apart the difference is 0, or 3e-7 where
# experts take tokens in another order; of 60 families that mix documents the least had 1e-4.
TOLERANCE = 1e-5
NOISES = 10  # times the noise of such other orders, which is measured
# What changes more than this with the document after it has been seen by it, or sees it.
MOST_NOISE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}

_TOKENS = 8  # of each of the two documents tried


class Packing:
    """Lets packed rows pass to a model only if it keeps their documents apart."""

    def __init__(
        self,
        model_type: str,
        dtype: torch.dtype,
        logits: Callable[[list[dict[str, Tensor]]], list[Tensor]],
    ) -> None:
        """Args: `logits` gives those of each micro-batch, `[B, T, V]`, computed in `dtype`."""
        self._model_type, self._dtype, self._logits = model_type, dtype, logits
        self._apart = False

    def check(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Try the first packed row that ever comes.

        Raises:
            InputError: the model's documents see each other, or packed rows have padding.
        """
        packed = [micro for micro in micro_batches if is_packed(micro)]
        if any(not micro["attention_mask"].all() for micro in packed if "attention_mask" in micro):
            raise InputError(
                "rows of several documents (position_ids that start anew) come with padding in "
                "attention_mask, where transformers ignores that documents begin; fill such rows "
                "up with labels of -100 instead"
            )
        tried = trial(packed[0]["input_ids"]) if packed and not self._apart else None
        if tried is None:
            return
        if _mixed(self._logits(tried), MOST_NOISE[self._dtype]):
            raise InputError(
                f"{self._model_type} does not keep the documents of a packed row (position_ids "
                "that start anew) apart; train it without packing (data.packing: false)"
            )
        self._apart = True


def is_packed(micro: Mapping[str, Tensor]) -> bool:
    """Whether positions `[B, T]` start anew after a token of the same row."""
    if "position_ids" not in micro:
        return False
    positions_BT = micro["position_ids"]
    breaks = positions_BT[:, 1:] != positions_BT[:, :-1] + 1
    if "attention_mask" in micro:  # padding may have any position
        tokens = micro["attention_mask"].bool()
        breaks &= tokens[:, 1:] & tokens[:, :-1]
    return bool(breaks.any())


def trial(ids_BT: Tensor) -> list[dict[str, Tensor]] | None:
    """Four rows of two documents: a b, c b, b a and b c, where a and c differ in every token.

    What comes out for b differs in the first two if b sees the document before it; in the last two
    it differs by rounding only, if b does not see the document after it either. Made of tokens of
    `ids_BT` alone; None if it has too few different ones.
    """
    unique, index_BT = torch.unique(ids_BT, return_inverse=True)
    half = min(_TOKENS, ids_BT.shape[1] // 2)
    if half == 0 or len(unique) == 1:
        return None
    a, b = ids_BT[0, :half], ids_BT[0, half : 2 * half]
    c = unique.roll(1)[index_BT[0, :half]]
    positions = torch.arange(half).repeat(2)[None]
    return [
        {"input_ids": torch.cat(row)[None], "position_ids": positions}
        for row in ((a, b), (c, b), (b, a), (b, c))
    ]


def _mixed(logits: list[Tensor], most_noise: float) -> bool:
    half = logits[0].shape[1] // 2
    seen = _difference(*(each[:, half:] for each in logits[:2]))
    noise = _difference(*(each[:, :half] for each in logits[2:]))
    return noise > most_noise or seen > TOLERANCE + NOISES * noise


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm())
