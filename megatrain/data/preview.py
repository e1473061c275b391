"""What a data set holds, for people: counts, lengths, repetitions, and rows as they are trained."""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatrain.data.dataset import PackedDataset
from megatrain.data.packing import Ints


class SourceCount(NamedTuple):
    """What one source has: documents with something to learn, and their tokens."""

    name: str
    documents: int
    tokens: int


class Run(NamedTuple):
    """Text of neighbouring tokens which are all learnt, or all only read."""

    text: str
    learnt: bool


class Piece(NamedTuple):
    """A document in a row, or a part of it: where it comes from and what is learnt of it."""

    place: str
    num_tokens: int
    runs: list[Run]


@dataclass(frozen=True)
class Summary:
    """A data set in numbers.

    Attributes:
        kind: text or chat. formats: their titles.
        num_tokens: in all rows, padding not counted; num_learnt: those of them that are learnt.
        fill: the share of the rows' room that holds tokens, 0 to 1.
        lengths: [documents] tokens of each, after the rule for those longer than a row.
        num_repeated: documents whose tokens an earlier one has; repeated: one, and the earlier.
    """

    kind: str
    formats: list[str]
    sequence_length: int
    num_rows: int
    num_tokens: int
    num_learnt: int
    fill: float
    sources: list[SourceCount]
    lengths: Ints
    num_repeated: int
    repeated: tuple[str, str] | None

    def histogram(self) -> list[tuple[int, int, int]]:
        """(shortest, longest, documents) of lengths between powers of two, without empty ends."""
        powers = np.ceil(np.log2(np.maximum(self.lengths, 1))).astype(np.int64)
        counts = np.bincount(powers)
        first = int(np.flatnonzero(counts)[0])
        return [
            (2 ** (power - 1) + 1 if power else 1, 2**power, int(counts[power]))
            for power in range(first, len(counts))
        ]


def summarise(data: PackedDataset) -> Summary:
    """Reads every token once or twice; as long as reading the tokens' file takes."""
    store, documents = data.store, data.documents
    num_learnt = 0
    for row in range(len(data)):
        for _, labels in data.pieces(row):
            num_learnt += int((labels[1:] != -100).sum())
    seen: dict[bytes, int] = {}
    num_repeated, repeated = 0, None
    for document, begin, end in zip(
        documents.document.tolist(), documents.begin.tolist(), documents.end.tolist(), strict=True
    ):
        first = store.begin(document)
        ids, _ = store.read(first + begin, first + end)
        earlier = seen.setdefault(hashlib.blake2b(ids.tobytes(), digest_size=16).digest(), document)
        if earlier != document:
            num_repeated += 1
            repeated = repeated or (store.place(document), store.place(earlier))
    sources = store.documents()["source"][documents.document]
    counts = np.bincount(sources, minlength=len(store.names))
    tokens = np.bincount(sources, documents.lengths, minlength=len(store.names)).astype(np.int64)
    return Summary(
        kind=store.notes["kind"],
        formats=list(store.notes["formats"]),
        sequence_length=data.sequence_length,
        num_rows=len(data),
        num_tokens=data.num_tokens,
        num_learnt=num_learnt,
        fill=data.fill,
        sources=[
            SourceCount(*each)
            for each in zip(store.names, counts.tolist(), tokens.tolist(), strict=True)
        ],
        lengths=documents.lengths,
        num_repeated=num_repeated,
        repeated=repeated,
    )


def shown(data: PackedDataset, row: int, tokenizer: Any) -> list[Piece]:
    """A row as it is trained."""
    places = data.places(row)
    return [
        Piece(place, len(ids), _runs(ids, labels, tokenizer))
        for place, (ids, labels) in zip(places, data.pieces(row), strict=True)
    ]


def _runs(ids: Ints, labels: Ints, tokenizer: Any) -> list[Run]:
    learnt = labels != -100
    learnt[:1] = False  # nothing comes before it to predict it from
    edges = [0, *(np.flatnonzero(np.diff(learnt)) + 1).tolist(), len(ids)]
    return [
        Run(_decoded(ids[start:stop], tokenizer), bool(learnt[start]))
        for start, stop in itertools.pairwise(edges)
    ]


def _decoded(ids: Sequence[int] | Ints, tokenizer: Any) -> str:
    text: str = tokenizer.decode(
        [int(i) for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text
