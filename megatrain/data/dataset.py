"""Data sets of token rows, and the micro-batches made of their rows."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.base.units import align
from megatrain.data import row_packing
from megatrain.data.images import ImageProcessor, Medium
from megatrain.data.row_packing import Ints, PackedRows, Segments, shuffled
from megatrain.data.sources import DataKind
from megatrain.data.token_store import Tokens, TokenStore
from megatrain.errors import InputError
from megatrain.loss import IGNORED

MicroBatch = dict[str, Tensor]
Overlong = Literal["truncate", "drop", "error"]

ROWS = "image_rows"
"""Name of a micro-batch's tensor `[lines, 2]`: each line's row, and its number in the row."""
CLASSES = ("classes", "class_sets", "tags")
"""Kinds of data with classes: one for each text, several, or one for each word."""
REPLIES = ("pairs", "margins", "anchors")
"""Kinds of data whose rows have several texts, which a loss compares."""
_DOCUMENTS = {"text": "documents", "pairs": "replies", "margins": "replies"}
_DOCUMENTS |= dict.fromkeys(("anchors", *CLASSES), "texts")

PLAIN = ("input_ids", "labels", "attention_mask")
"""Names of the tensors of `ReplyDataset.plain`: all but the loss's inputs."""
_log = logging.getLogger("megatrain.data")
_WIDTH_MULTIPLE = 8  # of tokens in unpacked batches, for matrix units
_MAX_PLACES = 8  # places that one description names


def documents_named(kind: str) -> str:
    """The word for documents of this kind of data, for messages."""
    return _DOCUMENTS.get(kind, "conversations")


@dataclass(frozen=True)
class Layout:
    """Arranges documents in rows of `sequence_length` tokens, and rows in micro-batches."""

    kind: DataKind
    sequence_length: int
    packing: bool
    overlong: Overlong
    pad_id: int
    num_classes: int = 0
    lines: int = 1  # documents of a row, which a loss compares

    def arrange(self, documents: Segments) -> PackedRows:
        """The rows of these documents, without rows that have no token to predict."""
        if self.lines > 1:
            return PackedRows(documents, np.arange(0, len(documents) + 1, self.lines))
        if not self.packing:
            rows = row_packing.split_rows(documents, self.sequence_length)
        elif self.kind == "text":
            rows = row_packing.fill_rows(documents, self.sequence_length)
        else:
            rows = row_packing.fit_rows(documents, self.sequence_length)
        if len(rows) == 0 or self.num_classes:  # a text of one token has a class to predict
            return rows
        # The first token of a segment is not predicted: a segment of one token teaches nothing.
        longest = np.maximum.reduceat(rows.segments.lengths, rows.first[:-1])
        return rows.keep(longest > 1)

    def batch(self, rows: Sequence[Sequence[Tokens]]) -> MicroBatch:
        """A micro-batch of rows, each given as its segments' tokens; on the CPU.

        Its tensors are int64 `[rows, width]`: input_ids, and labels (-100: not predicted). Packed
        rows have `sequence_length` tokens, and position_ids if a row has several segments. Padding
        counts as a segment: transformers separates segments only without an attention_mask.
        Unpacked rows are as wide as the longest, with an attention_mask if others are shorter.
        """
        lengths = np.array([sum(len(segment.ids) for segment in row) for row in rows])
        width = self.sequence_length
        if not self.packing:
            width = min(align(int(lengths.max()), _WIDTH_MULTIPLE), width)
        shape = (len(rows), width)
        input_ids = np.full(shape, self.pad_id, np.int64)
        labels = np.full(shape, -100, np.int64)
        positions = np.tile(np.arange(width), (len(rows), 1))
        for line, row in enumerate(rows):
            start = 0
            for segment in row:
                stop = start + len(segment.ids)
                input_ids[line, start:stop] = segment.ids
                labels[line, start:stop] = segment.labels
                labels[line, start] = -100
                positions[line, stop:] = np.arange(width - stop)  # of the next segment
                start = stop
        batch = {"input_ids": input_ids, "labels": labels}
        if not self.packing and (lengths < width).any():
            batch["attention_mask"] = (np.arange(width) < lengths[:, None]).astype(np.int64)
        elif self.packing and (positions[:, -1] < width - 1).any():  # several segments in a row
            batch["position_ids"] = positions
        return {name: torch.from_numpy(array) for name, array in batch.items()}


class PackedDataset:
    """Rows of at most `sequence_length` tokens; the tokens stay on disk.

    The data and the seed decide the order of rows. `fingerprint` is equal exactly when the rows
    are: it depends on tokens and settings, not on paths or times.

    Attributes:
        kind: text, chat (completions included), pairs, or classes.
        packing: True if rows may hold several documents (and all have the same length).
        has_images: True if a document has images; `with_images` then completes micro-batches.
        pad: the model's padding token, for heads that score rows.
    """

    image_processor = ImageProcessor(None)
    pad = -1

    def __init__(self, store: TokenStore, documents: Segments, layout: Layout, part: str) -> None:
        self.store = store  # the tokens on disk
        self.documents = documents  # the documents to learn from
        self._layout, self._part = layout, part  # `part`: how they were chosen, in words
        self.kind, self.packing = layout.kind, layout.packing
        self.sequence_length, self.has_images = layout.sequence_length, store.has_images
        self._rows = layout.arrange(documents)
        if len(self._rows) == 0:
            raise InputError(
                f"{store.names[0]}: no row with a token to predict ({part}): give more data, or "
                "hold out another fraction"
            )

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def fingerprint(self) -> str:
        """A hex digest of all tokens and settings that decide the rows."""
        layout = self._layout
        parts = [self.store.digest, layout.kind, layout.sequence_length, layout.packing,
                 layout.overlong, self._part]  # fmt: skip
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    @cached_property
    def row_lengths(self) -> Ints:
        """`[rows]`: tokens in each row, padding not counted."""
        return np.add.reduceat(self._rows.segments.lengths, self._rows.first[:-1])

    @cached_property
    def num_tokens(self) -> int:
        """Tokens in all rows, padding not counted."""
        return int(self.row_lengths.sum())

    @property
    def fill(self) -> float:
        """The share of rows that is tokens rather than padding, 0 to 1."""
        return self.num_tokens / (len(self) * self.sequence_length * self._layout.lines)

    def hold_out(self, fraction: float) -> tuple[Self, Self]:
        """Disjoint data sets to train and to evaluate on, which data and seed decide.

        About `fraction` of the tokens (text; at most one document is cut) or conversations (chat)
        go to the second one.

        Raises InputError: the fraction leaves a part without rows.
        """
        documents = self.documents
        if self._layout.kind == "text":
            train_tokens = int(documents.lengths.sum() * (1 - fraction))
            documents = documents.cut(np.array([train_tokens]))
            split = int(np.searchsorted(documents.lengths.cumsum(), train_tokens, side="right"))
        else:
            per_row = self._layout.lines
            num_rows = len(documents) // per_row
            split = per_row * (num_rows - max(1, round(num_rows * fraction)))
        train = self._with_documents(documents[:split], f"train {fraction}")
        return train, self._with_documents(documents[split:], f"evaluation {fraction}")

    def batches(self, size: int, rows_per_step: int = 1 << 62) -> Iterator[MicroBatch]:
        """Micro-batches of all rows in order, `size` rows in each; none has rows of two steps."""
        for first in range(0, len(self), rows_per_step):
            rows = range(len(self))[first : first + rows_per_step]
            yield from (self.batch(rows[i : i + size]) for i in range(0, len(rows), size))

    def batch(self, rows: Sequence[int]) -> MicroBatch:
        """The micro-batch of these rows, as of `Layout.batch`; `with_images` completes it."""
        batch = self._layout.batch([list(self.pieces(row)) for row in rows])
        if self.has_images:
            batch[ROWS] = torch.tensor([(row, 0) for row in rows])  # rows have one line each
        return batch

    def images(self, row: int, lines: slice, *, whole: bool = True) -> list[Medium]:
        """The images of the documents `lines` of a row; not `whole`: without their bytes."""
        documents = self._segments(row).document[lines].tolist() if self.has_images else ()
        return [image for n in documents for image in self.store.images_of(n, whole=whole).media]

    def most_images(self) -> MicroBatch | None:
        """A micro-batch of blank images, as large as those of the row with most tokens of images.

        None: no row has images.

        Raises InputError: the model's processor cannot be used.
        """
        if not self.has_images:
            return None
        processor = self.image_processor
        lines = slice(None if self.packing else 1)  # the replies of a row have the same images
        images_by_row = (self.images(row, lines, whole=False) for row in range(len(self)))

        def num_tokens(images: list[Medium]) -> int:
            return sum(len(processor.replacement(*image.shape)) for image in images)

        images = max(images_by_row, key=num_tokens)
        return processor.example([image.shape for image in images]) if images else None

    def with_images(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch, with the tensors that the model's processor makes of its images.

        Raises InputError: an image's file has changed.
        """
        if ROWS not in batch:  # it has no images, or has their tensors already
            return batch
        batch = dict(batch)
        images: list[list[Medium]] = []  # of each document
        for row, line in batch.pop(ROWS).tolist():
            # A packed row is one line of several documents; in other rows each line is a document.
            documents = range(len(self._segments(row))) if self.packing else (line,)
            images += [self.images(row, slice(n, n + 1)) for n in documents]
        return batch | self.image_processor.inputs(batch["input_ids"].tolist(), images)

    def describe(self, row: int) -> str:
        """The origin of a row in words: `file:line`, and the token where a piece begins."""
        places = self.places(row)
        unlisted = len(places) - _MAX_PLACES
        return ", ".join(places[:_MAX_PLACES]) + (f" and {unlisted} more" if unlisted > 0 else "")

    def places(self, row: int) -> list[str]:
        """`file:line` of each segment of a row, and the token where a piece begins."""
        return [
            self.store.place(document) + (f" (from token {begin})" if begin else "")
            for document, begin, _ in self._segments(row)
        ]

    def pieces(self, row: int) -> Iterator[Tokens]:
        """The tokens of each segment of a row."""
        return (self.store.read(*segment) for segment in self._segments(row))

    def _with_documents(self, documents: Segments, part: str) -> Self:
        data = type(self)(self.store, documents, self._layout, f"{self._part}, {part}")
        data.image_processor = self.image_processor
        return data

    def _segments(self, row: int) -> Segments:
        return self._rows.segments[slice(self._rows.first[row], self._rows.first[row + 1])]


class ClassDataset(PackedDataset):
    """Rows of one text each, whose labels are classes."""

    def pieces(self, row: int) -> Iterator[Tokens]:
        [text] = super().pieces(row)
        text.labels[:-1] = IGNORED  # a text's class is the label of its last token
        if self.kind == "tags":
            text.labels[:] = self._labels(row)[: len(text.ids)]
        yield text

    def batch(self, rows: Sequence[int]) -> MicroBatch:
        batch = super().batch(rows)
        classes_by_row = [self._labels(row) for row in rows]
        if self.kind == "tags":  # the first token has a tag, although texts do not predict it
            batch["labels"][:, 0] = torch.tensor([int(tags[0]) for tags in classes_by_row])
            return batch
        labels = scored(batch["input_ids"], batch.get("attention_mask"), self.pad)
        if self.kind == "classes":
            labels = labels.where(labels < 0, torch.tensor(np.stack(classes_by_row)))
        else:
            count = self._layout.num_classes
            shape = (*labels.shape, count)
            truths = torch.zeros(len(rows), count)
            for truth, classes in zip(truths, classes_by_row, strict=True):
                truth[torch.from_numpy(classes)] = 1
            batch["classes"] = torch.arange(count).expand(shape).contiguous()
            batch["truths"] = truths[:, None].expand(shape).contiguous()
        return batch | {"labels": labels}

    def _labels(self, row: int) -> Ints:
        return self.store.labels(int(self._segments(row).document[0]))


class ReplyDataset(PackedDataset):
    """Rows of several lines of tokens: a better and a worse reply, or an anchor, its positive, ...

    Attributes:
        loss: the loss whose inputs micro-batches get; set it before the first `batch`.
        reference: the reference model's log-probabilities of replies, `[rows, lines]`; None: none.
    """

    loss: Any
    reference: Tensor | None = None

    @property
    def lines(self) -> int:
        return self._layout.lines

    def pieces(self, row: int) -> Iterator[Tokens]:
        """The tokens of each line; a cut text to embed keeps its closing special tokens."""
        num_after = self.store.notes.get("after", 0) if self.kind == "anchors" else 0
        for (document, _, end), piece in zip(self._segments(row), super().pieces(row), strict=True):
            if num_after and end < (length := self.store.length(document)):
                closing = self.store.read(document, length - num_after, length)
                piece.ids[-num_after:] = closing.ids
            yield piece

    def plain(self, rows: Sequence[int]) -> MicroBatch:
        """The micro-batch of these rows, a line for each reply, without the loss's inputs."""
        batch = self._layout.batch([[line] for row in rows for line in self.pieces(row)])
        if self.has_images:
            batch[ROWS] = torch.tensor([(row, line) for row in rows for line in range(self.lines)])
        return batch

    def batch(self, rows: Sequence[int]) -> MicroBatch:
        """The micro-batch of these rows, a line for each reply, with the loss's inputs."""
        batch = self.plain(rows)
        ids, labels = batch["input_ids"], batch["labels"]
        pairs = torch.arange(len(rows)).repeat_interleave(self.lines)
        line_in_row = torch.arange(self.lines).repeat(len(rows))
        line_inputs = {"pair": pairs}  # a value for each line, then one for each token
        line_inputs |= {"text": line_in_row} if self.loss.embeds else {"chosen": line_in_row == 0}
        if "margin" in self.loss.inputs:
            chosen = [int(self._segments(row).document[0]) for row in rows]
            line_inputs["margin"] = torch.tensor([self.store.margin(i) for i in chosen])[pairs]
        for name, values in line_inputs.items():
            batch[name] = values[:, None].expand(labels.shape).float().contiguous()
        if self.reference is not None:
            # A reply's log-probability stands at its first learnt token.
            first = (labels != IGNORED).float().argmax(1, keepdim=True)
            logps = self.reference[list(rows)].view(-1, 1).float()
            batch["reference_logp"] = torch.zeros(labels.shape).scatter(1, first, logps)
        mask = batch.get("attention_mask")
        if self.loss.scores:
            batch["labels"] = scored(ids, mask, self.pad)
        elif self.loss.embeds and self.loss.pooling == "mean":  # 0; padding is IGNORED
            batch["labels"] = torch.zeros_like(ids) if mask is None else IGNORED * (1 - mask)
        elif self.loss.embeds:
            batch["labels"] = scored(ids, mask, -1)  # -1: the mask alone tells padding
        return batch


OF_KIND: dict[str, type[PackedDataset]] = dict.fromkeys(REPLIES, ReplyDataset)
OF_KIND |= dict.fromkeys(CLASSES, ClassDataset)


def scored(ids: Tensor, mask: Tensor | None, pad: int) -> Tensor:
    """Labels `[B, T]`: 0 at the last token that is neither `pad` nor masked, else -100."""
    present = (ids != pad) if mask is None else (ids != pad) & (mask == 1)
    last = (torch.arange(ids.shape[1]) * present).argmax(1, keepdim=True)
    return torch.full_like(ids, IGNORED).scatter(1, last, 0)


def numbered(step: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches of a step, their pairs numbered so that no number occurs twice."""
    first = 0.0
    for micro in step:
        if "pair" in micro:
            micro["pair"] += first
            first = float(micro["pair"].max()) + 1
    return step


def choose(store: TokenStore, layout: Layout, seed: int) -> Segments:
    """The documents to learn from, shuffled; conversations are no longer than a row.

    Raises InputError: there are none, or one is longer than a row and `overlong` is "error".
    """
    documents = store.documents()
    lengths = (documents["end"] - documents["begin"]).astype(np.int64)
    learnable = documents["first_target"] >= 0
    dropped = np.zeros_like(learnable)
    if layout.kind != "text":
        lengths = _shorten(store, lengths, learnable, layout)
        dropped = learnable & (lengths == 0)  # `_shorten` has logged these
        learnable &= documents["first_target"] < lengths
    elif layout.overlong != "truncate":
        _log.warning("data.overlong: %s is not for texts, which are cut", layout.overlong)
    _report_unlearnable(store, learnable | dropped, layout)
    per_row = layout.lines  # all documents of a row are usable, or none
    usable = np.logical_and.reduce(learnable.reshape(-1, per_row), 1)
    rows = shuffled(len(usable), 0, seed)
    rows = rows[usable[rows]]
    order = (per_row * rows[:, None] + np.arange(per_row)).reshape(-1)
    return Segments(order, np.zeros_like(order), lengths[order])


def _shorten(
    store: TokenStore, lengths: NDArray[np.int64], learnable: NDArray[np.bool_], layout: Layout
) -> NDArray[np.int64]:
    """The number of tokens to keep of each conversation, by `overlong`; 0: it is dropped."""
    limit = layout.sequence_length
    documents = documents_named(layout.kind)
    overlong = np.flatnonzero(learnable & (lengths > limit))
    if len(overlong) == 0:
        return lengths
    with_cut_images = [n for n in overlong.tolist() if store.images_of(n, whole=False).end > limit]
    example = f"{store.place(overlong[0])} has {lengths[overlong[0]]}"
    if layout.overlong == "error":
        raise InputError(
            f"{len(overlong)} {documents} are longer than sequence_length {limit} ({example}): "
            "raise it, or set overlong to truncate or drop"
        )
    action = "truncated" if layout.overlong == "truncate" else "dropped"
    _log.warning(
        "%s %d of %d %s, which are longer than sequence_length %d (%s)",
        action, len(overlong), len(lengths), documents, limit, example,
    )  # fmt: skip
    lengths = lengths.copy()
    lengths[overlong] = limit if layout.overlong == "truncate" else 0
    if with_cut_images and layout.overlong == "truncate":
        lengths[with_cut_images] = 0
        _log.warning(
            "left out %d of them, of which an image would be cut (first: %s): raise "
            "data.sequence_length, or make their images smaller",
            len(with_cut_images), store.place(with_cut_images[0]),
        )  # fmt: skip
    return lengths


def _report_unlearnable(store: TokenStore, learnable: NDArray[np.bool_], layout: Layout) -> None:
    """Log documents without a token to learn. Raises InputError: no document has one."""
    useless = np.flatnonzero(~learnable)
    if len(useless) == 0:
        return
    unit, reason = "conversations", "no reply of the assistant inside a row"
    if layout.kind in ("text", "anchors") or layout.num_classes:
        unit, reason = "documents", "no text"
    if len(useless) == len(learnable):
        raise InputError(
            f"all {len(learnable)} {unit} have {reason} (first: {store.place(useless[0])}): "
            "there is nothing to learn from"
        )
    _log.warning(
        "dropped %d of %d %s, which have %s (first: %s)",
        len(useless), len(learnable), unit, reason, store.place(useless[0]),
    )  # fmt: skip
