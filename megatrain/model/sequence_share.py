"""The share that each of several ranks has of every row.

All ranks are given the same micro-batches and cut them here, once labels have been moved to what
predicts them. Causal attention lets no token see what comes after it, so rows are filled up at
their end: with tokens that nothing sees and that predict nothing.

Legend: B rows, T tokens of a row, N ranks, S tokens of a share.
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.errors import InputError
from megatrain.loss import IGNORED, JointLoss, Loss
from megatrain.parallel.distributed import ALONE, Ranks

_TAKEN = ("input_ids", "labels", "position_ids", "attention_mask")
Judged = tuple[Tensor, list[Tensor]]
Micro = Mapping[str, Tensor]


class SequenceShare:
    """A rank's share of every row; that of a rank that is alone is all of it."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        """Args: `ranks` that share every row."""
        self.ranks, self._size = ranks, ranks.size

    def tokens(self, whole: int) -> int:
        """Tokens of a share of a row of so many."""
        return -(-whole // self._size)

    def check(
        self,
        micro_batches: Sequence[Micro],
        losses: Sequence[Judged],
        loss: Loss | None,
        max_tokens: int | None,
    ) -> int:
        """A checksum of what all ranks have to be given alike.

        Args:
            losses: targets `[B, T]` of each micro-batch, and what the loss takes beside them.

        Raises:
            InputError: rows that ranks cannot share.
        """
        if self._size == 1:
            return 0
        if isinstance(loss, JointLoss):
            raise InputError(
                f"{type(loss).__name__} compares rows, which ranks cannot share yet; leave "
                "sequence_parallel out"
            )
        taken = (*_TAKEN, *(() if loss is None else (*loss.inputs, *loss.choices)))
        found = 0
        for index, micro in enumerate(micro_batches):
            targets = losses[index][0] if losses else None
            self._check_micro(f"micro-batch {index}", micro, taken, targets, max_tokens)
            for name in sorted(micro):
                found = zlib.crc32(micro[name].contiguous().view(torch.uint8).numpy().data, found)
        return found

    def _check_micro(
        self,
        where: str,
        micro: Micro,
        taken: Sequence[str],
        targets: Tensor | None,
        max_tokens: int | None,
    ) -> None:
        tokens = micro["input_ids"].shape[1]
        if other := [name for name in micro if name not in taken]:
            raise InputError(
                f"{where} has {other[0]!r}, which ranks that share rows do not take yet; leave it "
                "or sequence_parallel out"
            )
        filled = self.tokens(tokens) * self._size
        if max_tokens is not None and filled > max_tokens:
            raise InputError(
                f"{where} has rows of {tokens} tokens, which {self._size} ranks fill up to "
                f"{filled}, and the model has {max_tokens} positions; cut the rows"
            )
        places = micro.get("position_ids")
        if places is not None and bool((places != torch.arange(tokens)).any()):
            raise InputError(
                f"{where} has position_ids other than 0, 1, 2, ..., as packed rows do, which ranks "
                "cannot share yet; leave packing (data.packing) or sequence_parallel out"
            )
        mask = micro.get("attention_mask")
        if mask is None:
            return
        hidden = mask == 0
        predicts = targets is not None and bool((hidden & (targets != IGNORED)).any())
        if predicts or bool((mask[:, 1:] > mask[:, :-1]).any()):
            raise InputError(
                f"{where} has an attention_mask that hides more than the end of rows, without "
                "labels, which ranks cannot share; fill rows up at their end"
            )

    def micro(self, micro: Micro) -> Micro:
        """The share of a micro-batch, without labels; what it needs of a mask is in the order."""
        if self._size == 1:
            return micro
        ids = self._cut(micro["input_ids"], 0)
        rows, tokens = ids.shape
        first = self.ranks.rank * tokens
        places = torch.arange(first, first + tokens).expand(rows, tokens).contiguous()
        return {"input_ids": ids, "position_ids": places}

    def judged(self, losses: Sequence[Judged]) -> list[Judged]:
        """The share of targets, and of what a loss takes beside them."""
        return [(self._cut(t, IGNORED), [self._cut(g, 0) for g in given]) for t, given in losses]

    def _cut(self, whole: Tensor, fill: int) -> Tensor:
        if self._size == 1:
            return whole
        own = self.tokens(whole.shape[1])
        short = own * self._size - whole.shape[1]
        filled = F.pad(whole, (0, 0) * (whole.ndim - 2) + (0, short), value=fill)
        return filled[:, self.ranks.rank * own :][:, :own].contiguous()

    def joined(self, found: Sequence[Tensor], micro_batches: Sequence[Micro]) -> list[Tensor]:
        """Whole rows `[B, T, ...]` on the CPU, of the shares that all ranks have found."""
        if self._size == 1:
            return [each.cpu() for each in found]
        every = self.ranks.all_gather_object([each.cpu() for each in found])
        rows = (torch.cat(shares, 1) for shares in zip(*every, strict=True))
        pairs = zip(rows, micro_batches, strict=True)
        return [each[:, : micro["input_ids"].shape[1]] for each, micro in pairs]


WHOLE = SequenceShare()
