"""Summaries of a data set: counts, lengths, repetitions, and rows as they are trained."""

import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatrain.data.dataset import PackedDataset
from megatrain.data.row_packing import Ints, Segments

_REPEATED = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])\1{3,}")  # an image's tokens


class SourceCount(NamedTuple):
    """Number of a source's documents with something to learn, and of their tokens."""

    name: str
    documents: int
    tokens: int


class TextRun(NamedTuple):
    """Text of neighbouring tokens that are all learnt, or all not."""

    text: str
    learnt: bool


class ShownDocument(NamedTuple):
    """A document in a row, or a part of it: its place and its learnt and unlearnt text.

    images: the file, size and number of tokens of each.
    """

    place: str
    num_tokens: int
    runs: list[TextRun]
    images: list[str]


class Summary:
    """A data set in numbers, from reading every token once or twice.

    Attributes:
        kind: text, chat, pairs or rated. formats: their titles.
        num_tokens: in all rows, padding not counted; num_learnt: those of them that are learnt.
        fill: the share of the rows' room that holds tokens, 0 to 1.
        folder: common to all sources, if any; their names and places are relative to it.
        lengths: [documents] tokens of each, after the rule for those longer than a row.
        num_cut, num_cut_tokens: conversations that are longer than a row, and what is cut off them.
        num_useless: documents without anything to learn. num_bad: rows that were left out.
        num_repeated: documents equal to earlier ones; repeated: one of them, and the earlier.
    """

    def __init__(self, data: PackedDataset) -> None:
        store, documents = data.store, data.documents
        self.kind, self.formats = store.notes["kind"], list(store.notes["formats"])
        self.sequence_length, self.num_rows = data.sequence_length, len(data)
        self.num_tokens, self.fill = data.num_tokens, data.fill
        self.lengths, self.num_bad = documents.lengths, store.notes["num_bad"]
        self.folder = folder_of(store.names)
        pieces = (labels for row in range(len(data)) for _, labels in data.pieces(row))
        self.num_learnt = sum(int((labels[1:] != -100).sum()) for labels in pieces)
        records, is_chat = store.documents(), self.kind != "text"
        full_lengths = (records["end"] - records["begin"])[documents.document]
        num_cut = (full_lengths - documents.lengths) * is_chat  # a text is continued in another row
        self.num_cut, self.num_cut_tokens = int((num_cut > 0).sum()), int(num_cut.sum())
        firsts = records["first_target"]
        useless = (firsts < 0) | (is_chat & (firsts >= data.sequence_length))
        self.num_useless = int(useless.sum())
        sources, count = records["source"][documents.document], len(store.names)
        tokens = np.bincount(sources, documents.lengths, minlength=count).astype(np.int64)
        numbers = np.bincount(sources, minlength=count).tolist(), tokens.tolist()
        self.sources = [
            SourceCount(name.removeprefix(self.folder), *counts)
            for name, *counts in zip(store.names, *numbers, strict=True)
        ]
        seen: dict[bytes, int] = {}
        pairs = [(n, seen.setdefault(digest, n)) for n, digest in _digests(data, documents)]
        repeated = [pair for pair in pairs if pair[0] != pair[1]]
        self.num_repeated = len(repeated)
        self.repeated = [store.place(n).removeprefix(self.folder) for n in next(iter(repeated), ())]

    @property
    def what(self) -> str:
        """The name of a document's kind."""
        names = {"text": "documents", "pairs": "replies", "rated": "replies"}
        return names.get(self.kind, "conversations")

    def facts(self) -> list[str]:
        """Numbers of documents, rows and tokens, in sentences."""
        share = self.num_learnt / self.num_tokens
        formats = [name for name in self.formats if name != self.what]
        of = f" ({', '.join(formats)})" if formats else ""
        return [
            f"{len(self.lengths):,} {self.what}{of} in {self.num_rows:,} "
            f"rows of {self.sequence_length:,} tokens, {self.fill:.0%} full",
            f"{self.num_tokens:,} tokens, of which {self.num_learnt:,} ({share:.0%}) are learnt",
        ]

    def notes(self) -> list[str]:
        """Warnings about the data, each a sentence."""
        notes = []
        if self.num_cut:
            notes.append(
                f"{self.num_cut:,} {self.what} are longer than a row: {self.num_cut_tokens:,} "
                "tokens are cut off them"
            )
        if self.num_useless:
            notes.append(f"{self.num_useless:,} {self.what} have nothing to learn in a row")
        if self.num_bad:
            notes.append(f"{self.num_bad:,} bad rows are left out")
        if self.repeated:
            first, earlier = self.repeated
            repeats = "repeats" if self.num_repeated == 1 else "repeat"
            notes.append(
                f"{self.num_repeated:,} of the {self.what} {repeats} another: {first} is {earlier}"
            )
        return notes

    def histogram(self) -> list[tuple[int, int, int]]:
        """(shortest, longest, documents) per range between powers of two, without empty ends."""
        powers = np.ceil(np.log2(np.maximum(self.lengths, 1))).astype(np.int64)
        counts = np.bincount(powers)
        first = int(np.flatnonzero(counts)[0])
        return [
            (2 ** (power - 1) + 1 if power else 1, 2**power, int(counts[power]))
            for power in range(first, len(counts))
        ]


def _digests(data: PackedDataset, documents: Segments) -> Iterator[tuple[int, bytes]]:
    """The number of each document, and a hash of its tokens."""
    columns = documents.document, documents.begin, documents.end
    for document, begin, end in zip(*(column.tolist() for column in columns), strict=True):
        first = data.store.begin(document)
        ids, _ = data.store.read(first + begin, first + end)
        yield document, hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def folder_of(names: Sequence[str]) -> str:
    """The folder common to all files, with its slash; empty if there is none."""
    if not all(map(os.path.isabs, names)):
        return ""
    return os.path.join(os.path.commonpath([os.path.dirname(name) for name in names]), "")


def shown(data: PackedDataset, row: int, tokenizer: Any) -> list[ShownDocument]:
    """The documents of a row as they are trained."""
    places, folder = data.places(row), folder_of(data.store.names)
    images = [
        f"{image.name.removeprefix(folder)}: {len(tokenizer.tokenize(tokens))} tokens"
        for image in data.images(row)
        for tokens in [data.image_processor.replacement(image.size)]
    ]
    return [
        ShownDocument(place.removeprefix(folder), len(ids), _runs(ids, labels, tokenizer), images)
        for place, (ids, labels) in zip(places, data.pieces(row), strict=True)
    ]


def _runs(ids: Ints, labels: Ints, tokenizer: Any) -> list[TextRun]:
    learnt = labels != -100
    learnt[:1] = False  # no token before it predicts it
    edges = [0, *(np.flatnonzero(np.diff(learnt)) + 1).tolist(), len(ids)]
    return [
        TextRun(
            _REPEATED.sub(
                lambda same: f"{same[1]} x {len(same[0]) // len(same[1])}",
                tokenizer.decode(ids[start:stop].tolist(), clean_up_tokenization_spaces=False),
            ),
            bool(learnt[start]),
        )
        for start, stop in itertools.pairwise(edges)
    ]
