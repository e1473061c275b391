"""Previews of a data set: counts, lengths, repetitions, and rows as they are trained."""

import base64
import hashlib
import io
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatrain.data.dataset import PackedDataset, documents_named
from megatrain.data.images import ImageProcessor, Medium
from megatrain.data.row_packing import Ints

_REPEATED = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])\1{3,}")  # an image's tokens
_SOURCES = 20  # that a summary lists
_SAMPLES, _IMAGES, _CHARACTERS = 3, 4, 1000  # documents of a report, and of each at most


class ShownDocument(NamedTuple):
    """A document in a row, or a part of one, for people to read.

    runs: texts of neighbouring tokens, each with True if all are learnt, or False if none is.
    images: the file, size and number of tokens of each.
    """

    place: str
    num_tokens: int
    runs: list[tuple[str, bool]]
    images: list[str]


def summary(data: PackedDataset) -> list[str]:
    """Lines with a data set's numbers; every token is read twice for them."""
    store, documents = data.store, data.documents
    unit, lengths = documents_named(data.kind), documents.lengths
    formats = ", ".join(name for name in store.notes["formats"] if name != unit)
    pieces = (labels for row in range(len(data)) for _, labels in data.pieces(row))
    learnt = sum(int((labels[1:] != -100).sum()) for labels in pieces)
    return [
        f"training: {len(lengths):,} {unit}{formats and f' ({formats})'} in {len(data):,} rows "
        f"of {data.sequence_length:,} tokens, {data.fill:.0%} full",
        f"{data.num_tokens:,} tokens, of which {learnt:,} ({learnt / data.num_tokens:.0%}) are "
        "learnt",
        f"tokens of {unit}: {lengths.min():,} to {lengths.max():,}, half of them at most "
        f"{int(np.median(lengths)):,}",
        *_of_media(data),
        *_repeated(data, unit),
        *_by_source(data, unit),
    ]


def _of_media(data: PackedDataset) -> Iterator[str]:
    """A line about images, if there are any."""
    counts = [len(data.images(row, slice(None), whole=False)) for row in range(len(data))]
    rows, lengths = np.flatnonzero(counts), data.row_lengths
    if len(rows):
        fill = data.fill * lengths[rows].mean() / lengths.mean()
        yield (
            f"{sum(counts):,} images, films and sounds are in {len(rows):,} of the rows, which are "
            f"{fill:.0%} full"
        )


def _repeated(data: PackedDataset, unit: str) -> Iterator[str]:
    """A line about documents with the tokens of another one, if there are any."""
    store, folder = data.store, folder_of(data.store.names)
    first_of: dict[bytes, int] = {}
    repeated: list[tuple[int, int]] = []
    for segment in data.documents:
        ids, _ = store.read(*segment)
        digest = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
        if (first_seen := first_of.setdefault(digest, segment[0])) != segment[0]:
            repeated.append((segment[0], first_seen))
    if repeated:
        first, earlier = (store.place(n).removeprefix(folder) for n in repeated[0])
        repeats = "repeats" if len(repeated) == 1 else "repeat"
        yield f"{len(repeated):,} of the {unit} {repeats} another: {first} is {earlier}"


def _by_source(data: PackedDataset, unit: str) -> Iterator[str]:
    """Lines with the tokens and documents of each source, the largest first."""
    names, documents = data.store.names, data.documents
    folder, sources = folder_of(names), data.store.documents()["source"][documents.document]
    tokens = np.bincount(sources, documents.lengths, minlength=len(names)).astype(np.int64)
    counts = np.bincount(sources, minlength=len(names))
    yield f"\ntokens by source{f' in {folder}' if folder else ''}"
    widest = np.argsort(-tokens, kind="stable")
    for source in widest[:_SOURCES]:
        name = names[source].removeprefix(folder)
        yield f"  {tokens[source]:>14,}  {counts[source]:>10,} {unit}  {name}"
    if (num_hidden := len(names) - _SOURCES) > 0:
        yield f"  {tokens[widest[_SOURCES:]].sum():>14,}  in {num_hidden:,} more"


def folder_of(names: Sequence[str]) -> str:
    """The folder common to all files, with its slash; empty if there is none."""
    if not all(map(os.path.isabs, names)):
        return ""
    return os.path.join(os.path.commonpath([os.path.dirname(name) for name in names]), "")


def shown(data: PackedDataset, row: int, tokenizer: Any) -> list[ShownDocument]:
    """The documents of a row as they are trained, for people to read."""
    places, folder = data.places(row), folder_of(data.store.names)

    def described(image: Medium) -> str:
        tokens = tokenizer.tokenize(data.image_processor.replacement(*image.shape))
        return f"{image.name.replace(folder, '', 1)}: {len(tokens)} tokens"

    return [
        ShownDocument(
            place.removeprefix(folder),
            len(ids),
            _runs(ids, labels, tokenizer),
            [*map(described, data.images(row, slice(line, line + 1), whole=False))],
        )
        for line, (place, (ids, labels)) in enumerate(zip(places, data.pieces(row), strict=True))
    ]


def samples(data: PackedDataset, tokenizer: Any) -> list[dict[str, Any]]:
    """The first documents with images, for a run's report: cut texts, thumbnails as data URLs."""
    documents = (
        {
            "place": piece.place,
            "images": [
                _thumbnail(medium, data.image_processor)
                for medium in media[:_IMAGES]
                if medium.kind == "image"
            ],
            "runs": [[text[:_CHARACTERS], learnt] for text, learnt in piece.runs[:_CHARACTERS]],
        }
        for row in range(len(data))
        if data.images(row, slice(None), whole=False)  # texts of other rows are not decoded
        for line, piece in enumerate(shown(data, row, tokenizer))
        if (media := data.images(row, slice(line, line + 1)))
    )
    return list(itertools.islice(documents, _SAMPLES))


def _thumbnail(medium: Medium, processor: ImageProcessor) -> str:
    image, file = medium.decoded(processor), io.BytesIO()
    image.thumbnail((160, 160))
    image.save(file, "jpeg")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _runs(ids: Ints, labels: Ints, tokenizer: Any) -> list[tuple[str, bool]]:
    """`ShownDocument.runs` of a document's tokens; an image's repeated token is counted."""
    learnt = labels != -100
    learnt[:1] = False  # no token before it predicts it
    edges = [0, *(np.flatnonzero(np.diff(learnt)) + 1).tolist(), len(ids)]
    return [
        (
            _REPEATED.sub(
                lambda same: f"{same[1]} x {len(same[0]) // len(same[1])}",
                tokenizer.decode(ids[start:stop].tolist(), clean_up_tokenization_spaces=False),
            ),
            bool(learnt[start]),
        )
        for start, stop in itertools.pairwise(edges)
    ]
