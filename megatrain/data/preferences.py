"""Replies that are compared, or rated good or bad: rows with the inputs of their losses."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatrain.data.dataset import MicroBatch, PackedDataset
from megatrain.data.row_packing import Ints
from megatrain.loss import IGNORED, KTO, PairLoss, Reward

REPLIES = {"pairs": "pairs", "margins": "pairs", "rated": "rated"}
"""Kinds of data with replies, and which of them rows are laid out as."""

PLAIN = ("input_ids", "labels", "attention_mask")
_NUMBERS = ("pair", "example")


def plain_rows(step: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches with labels and a forward's inputs, without those of losses."""
    names = (*PLAIN, "position_ids")
    return [{name: micro[name] for name in names if name in micro} for micro in step]


def numbered(step: list[MicroBatch]) -> list[MicroBatch]:
    """Micro-batches with their pairs or replies numbered anew, unique in the step."""
    for name in _NUMBERS:
        first = 0.0
        for micro in step:
            if name in micro:
                micro[name] += first
                first = float(micro[name].max()) + 1
    return step


class ReplyDataset(PackedDataset):
    """Pairs, each a row of two lines of tokens, or rated replies; each reply has a line.

    Call `train_with` first: it says which loss the rows are for.
    """

    _loss: PairLoss | KTO
    _reference: Tensor | None = None
    _pad: int = -1

    def train_with(self, loss: PairLoss | KTO, *, pad: int = -1) -> None:
        """Give micro-batches the inputs of a loss.

        Args: `pad`: the model's padding token, for losses that score rows.
        """
        self._loss, self._pad = loss, pad

    def compare_with(self, reference: Tensor) -> None:
        """Give micro-batches the log-probabilities of replies in a reference: `[rows, lines]`."""
        self._reference = reference

    @property
    def fill(self) -> float:
        return super().fill / (2 if self.kind == "pairs" else 1)

    @property
    def lines(self) -> int:
        """Number of lines of tokens in a row."""
        return self._loss.lines

    def plain(self, rows: Sequence[int]) -> MicroBatch:
        """Rows as `Layout.batch` lays them out, a line for each reply, without a loss's inputs."""
        return self._layout.batch([[line] for row in rows for line in self.replies(row)])

    def batch(self, rows: Sequence[int]) -> MicroBatch:
        """A micro-batch as `plain` makes it, with the inputs of the loss."""
        batch, lines = self.plain(rows), self.lines
        labels, ids = batch["labels"], batch["input_ids"]
        kinds = torch.tensor([kind for row in rows for kind in self._kinds(row)])
        places = torch.arange(len(kinds)) // (lines if self.kind == "pairs" else 1)
        of_lines = {"pair": places, "example": places, "chosen": kinds, "desired": kinds}
        for name in self._loss.inputs:
            if name in of_lines:
                batch[name] = of_lines[name][:, None].expand(labels.shape).float().contiguous()
        if "margin" in self._loss.inputs:
            firsts = [int(self._segments(row).document[0]) for row in rows for _ in range(lines)]
            margins = torch.tensor([self.store.margin(document) for document in firsts])
            batch["margin"] = margins[:, None].expand(labels.shape).float().contiguous()
        if self._reference is not None:
            batch["reference_logp"] = at_first_label(self._reference[list(rows)].view(-1), labels)
        if isinstance(self._loss, Reward):
            batch["labels"] = scored(ids, batch.get("attention_mask"), self._pad)
        return batch

    def _kinds(self, row: int) -> list[int]:
        """For each line: 1 for a chosen or good reply, 0 for another, -1 for a mismatched one."""
        if self.kind == "pairs":
            return [1, 0]
        good = int(self.store.is_good(int(self._segments(row).document[0])))
        return [good, -1][: self.lines]

    def replies(self, row: int) -> Iterable[tuple[Ints, Ints]]:
        """Ids and labels of each line of a row; KTO adds a mismatched reply as the second."""
        yield from self.pieces(row)
        if self.kind == "rated" and self.lines == 2:
            yield self._mismatched(row)

    def _mismatched(self, row: int) -> tuple[Ints, Ints]:
        """The row's prompt with the reply of the row before, as TRL's KTO takes it."""
        (prompt_ids, labels), (other, learnt) = (
            next(iter(self.pieces(at))) for at in (row, (row - 1) % len(self))
        )
        begin, start = _first_label(labels), _first_label(learnt)
        parts = zip(
            (prompt_ids[:begin], labels[:begin]), (other[start:], learnt[start:]), strict=True
        )
        ids, targets = (np.concatenate(part)[: self.sequence_length] for part in parts)
        return ids, targets


def scored(ids: Tensor, mask: Tensor | None, pad: int) -> Tensor:
    """`[B, T]`: 0 at the token where transformers' models score a row, -100 elsewhere.

    This is the last token that is neither `pad` nor masked by `mask`.
    """
    present = (ids != pad) if mask is None else (ids != pad) & (mask == 1)
    last = (torch.arange(ids.shape[1]) * present).argmax(1, keepdim=True)
    return torch.full_like(ids, IGNORED).scatter(1, last, 0)


def _first_label(labels: Ints) -> int:
    return 1 + int((labels[1:] != IGNORED).argmax())


def at_first_label(sums: Tensor, labels: Tensor) -> Tensor:
    """`[B, T]`: each line's number at its first label, 0 elsewhere."""
    first = (labels != IGNORED).float().argmax(1)
    return torch.zeros(labels.shape).scatter(1, first[:, None], sums.float()[:, None])
