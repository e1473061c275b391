"""Pairs of replies: rows with the inputs of their losses."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.data.dataset import ROWS, MicroBatch, PackedDataset, scored
from megatrain.data.row_packing import Ints
from megatrain.loss import DPO, IGNORED, Distillation

REPLIES = ("pairs", "margins", "anchors")
"""Kinds of data whose rows are several texts that a loss compares."""

PLAIN = ("input_ids", "labels", "attention_mask")
_OF_LOSSES = {*DPO.inputs, *Distillation.choices, "margin", "text"}


def plain_rows(step: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches with labels and a forward's inputs, without those of losses."""
    return [{n: value for n, value in micro.items() if n not in _OF_LOSSES} for micro in step]


def numbered(step: list[MicroBatch]) -> list[MicroBatch]:
    """Micro-batches with their pairs numbered anew, unique in the step."""
    first = 0.0
    for micro in step:
        if "pair" in micro:
            micro["pair"] += first
            first = float(micro["pair"].max()) + 1
    return step


class ReplyDataset(PackedDataset):
    """Rows of several lines of tokens: a better reply, and another; or an anchor, its positive, ...

    Attributes:
        loss: whose inputs micro-batches get; set it first.
        reference: log-probabilities of the replies, `[rows, lines]`; None: they get none.
    """

    loss: Any
    reference: Tensor | None = None

    @property
    def lines(self) -> int:
        """Lines of a row."""
        return self._layout.lines

    def pieces(self, row: int) -> Iterator[tuple[Ints, Ints]]:
        """As of any data set; a text to embed that is cut keeps the tokenizer's tokens after it."""
        after = self.store.notes.get("after", 0) * (self.kind == "anchors")
        for (at, _, end), piece in zip(self._segments(row), super().pieces(row), strict=True):
            if after and end < (length := self.store.length(at)):
                piece[0][-after:] = self.store.read(at, length - after, length)[0]
            yield piece

    def plain(self, rows: Sequence[int]) -> MicroBatch:
        """Rows as `Layout.batch` lays them out, a line for each reply, without a loss's inputs."""
        batch = self._layout.batch([[line] for row in rows for line in self.pieces(row)])
        if self.has_images:
            batch[ROWS] = torch.tensor([(row, line) for row in rows for line in range(self.lines)])
        return batch

    def batch(self, rows: Sequence[int]) -> MicroBatch:
        """A micro-batch as `plain` makes it, with the inputs of the loss."""
        batch = self.plain(rows)
        labels, ids = batch["labels"], batch["input_ids"]
        pairs = torch.arange(len(rows)).repeat_interleave(self.lines)
        text = torch.arange(self.lines).repeat(len(rows))
        of_lines = {"pair": pairs}
        of_lines |= {"text": text} if self.loss.embeds else {"chosen": text == 0}
        if "margin" in self.loss.inputs:
            firsts = [int(self._segments(row).document[0]) for row in rows]
            of_lines["margin"] = torch.tensor([self.store.margin(at) for at in firsts])[pairs]
        for name, values in of_lines.items():
            batch[name] = values[:, None].expand(labels.shape).float().contiguous()
        if self.reference is not None:
            batch["reference_logp"] = at_first_label(self.reference[list(rows)].view(-1), labels)
        mask = batch.get("attention_mask")
        if self.loss.scores:
            batch["labels"] = scored(ids, mask, self.pad)
        elif self.loss.embeds and self.loss.pooling == "mean":
            batch["labels"] = torch.zeros_like(ids) if mask is None else IGNORED * (1 - mask)
        elif self.loss.embeds:
            batch["labels"] = scored(ids, mask, -1)
        return batch


def at_first_label(sums: Tensor, labels: Tensor) -> Tensor:
    """`[B, T]`: each line's number at its first label, 0 elsewhere."""
    first = (labels != IGNORED).float().argmax(1)
    return torch.zeros(labels.shape).scatter(1, first[:, None], sums.float()[:, None])
