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
from megatrain.data.token_store import Tokens

_REPEATED = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])\1{3,}")  # a special token 4 times or more
_SOURCES = 20  # that a summary lists
_SAMPLES = 3  # documents that a report shows
_IMAGES, _CHARACTERS = 4, 1000  # of each of these documents, at most


class ShownDocument(NamedTuple):
    """A document in a row, or a part of one, for people to read."""

    place: str
    num_tokens: int
    # texts of neighbouring tokens, each with True if all are learnt, or False if none is
    runs: list[tuple[str, bool]]
    images: list[str]  # the file, size and number of tokens of each


def summary(data: PackedDataset) -> list[str]:
    """Lines with a data set's numbers; every token is read twice for them."""
    unit = documents_named(data.kind)
    lengths = data.documents.lengths
    formats = ", ".join(name for name in data.store.notes["formats"] if name != unit)
    pieces = (piece for row in range(len(data)) for piece in data.pieces(row))
    num_learnt = sum(int((piece.labels[1:] != -100).sum()) for piece in pieces)
    return [
        f"training: {len(lengths):,} {unit}{formats and f' ({formats})'} in {len(data):,} rows "
        f"of {data.sequence_length:,} tokens, {data.fill:.0%} full",
        f"{data.num_tokens:,} tokens, of which {num_learnt:,} ({num_learnt / data.num_tokens:.0%}) "
        "are learnt",
        f"tokens of {unit}: {lengths.min():,} to {lengths.max():,}, half of them at most "
        f"{int(np.median(lengths)):,}",
        *_of_media(data),
        *_repeated(data, unit),
        *_by_source(data, unit),
    ]


def _of_media(data: PackedDataset) -> Iterator[str]:
    """A line about images, films and sounds, if there are any."""
    counts = [len(data.images(row, slice(None), whole=False)) for row in range(len(data))]
    rows = np.flatnonzero(counts)
    if len(rows):
        lengths = data.row_lengths
        fill = data.fill * lengths[rows].mean() / lengths.mean()  # all rows are of one size
        yield (
            f"{sum(counts):,} images, films and sounds are in {len(rows):,} of the rows, which are "
            f"{fill:.0%} full"
        )


def _repeated(data: PackedDataset, unit: str) -> Iterator[str]:
    """A line about documents with the tokens of another one, if there are any."""
    store = data.store
    first_of: dict[bytes, int] = {}
    earlier_of: dict[int, int] = {}  # repeated document -> the first one with the same tokens
    for document, begin, end in data.documents:
        ids = store.read(document, begin, end).ids
        digest = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
        first_seen = first_of.setdefault(digest, document)
        if first_seen != document:
            earlier_of[document] = first_seen
    if earlier_of:
        folder = folder_of(store.names)
        example = next(iter(earlier_of.items()))
        repeated, earlier = (store.place(document).removeprefix(folder) for document in example)
        repeats = "repeats" if len(earlier_of) == 1 else "repeat"
        yield f"{len(earlier_of):,} of the {unit} {repeats} another: {repeated} is {earlier}"


def _by_source(data: PackedDataset, unit: str) -> Iterator[str]:
    """Lines with the tokens and documents of each source, the largest first."""
    names = data.store.names
    folder = folder_of(names)
    documents = data.documents
    sources = data.store.documents()["source"][documents.document]
    tokens = np.bincount(sources, documents.lengths, minlength=len(names)).astype(np.int64)
    counts = np.bincount(sources, minlength=len(names))
    yield f"\ntokens by source{f' in {folder}' if folder else ''}"
    largest = np.argsort(-tokens, kind="stable")
    for source in largest[:_SOURCES]:
        name = names[source].removeprefix(folder)
        yield f"  {tokens[source]:>14,}  {counts[source]:>10,} {unit}  {name}"
    if (num_hidden := len(names) - _SOURCES) > 0:
        yield f"  {tokens[largest[_SOURCES:]].sum():>14,}  in {num_hidden:,} more"


def folder_of(names: Sequence[str]) -> str:
    """The folder common to all files, with its slash; empty if there is none."""
    if not all(map(os.path.isabs, names)):
        return ""
    return os.path.join(os.path.commonpath([os.path.dirname(name) for name in names]), "")


def shown(data: PackedDataset, row: int, tokenizer: Any) -> list[ShownDocument]:
    """The documents of a row as they are trained, for people to read."""
    folder = folder_of(data.store.names)

    def described(image: Medium) -> str:
        tokens = tokenizer.tokenize(data.image_processor.replacement(*image.shape))
        return f"{image.name.replace(folder, '', 1)}: {len(tokens)} tokens"

    documents: list[ShownDocument] = []
    for place, tokens in zip(data.places(row), data.pieces(row), strict=True):
        number = len(documents)
        images = data.images(row, slice(number, number + 1), whole=False)
        runs = _runs(tokens, tokenizer)
        name = place.removeprefix(folder)
        documents.append(ShownDocument(name, len(tokens.ids), runs, [*map(described, images)]))
    return documents


def samples(data: PackedDataset, tokenizer: Any) -> list[dict[str, Any]]:
    """The first documents with images, for a run's report: cut texts, thumbnails as data URLs."""
    documents: list[dict[str, Any]] = []
    for row in range(len(data)):
        if not data.images(row, slice(None), whole=False):
            continue  # without decoding the row's texts
        for line, piece in enumerate(shown(data, row, tokenizer)):
            if media := data.images(row, slice(line, line + 1)):
                images = [medium for medium in media[:_IMAGES] if medium.kind == "image"]
                thumbnails = [_thumbnail(image, data.image_processor) for image in images]
                runs = [[text[:_CHARACTERS], learnt] for text, learnt in piece.runs[:_CHARACTERS]]
                documents.append({"place": piece.place, "images": thumbnails, "runs": runs})
            if len(documents) == _SAMPLES:
                return documents
    return documents


def _thumbnail(medium: Medium, processor: ImageProcessor) -> str:
    image = medium.decoded(processor)
    file = io.BytesIO()
    image.thumbnail((160, 160))
    image.save(file, "jpeg")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _runs(tokens: Tokens, tokenizer: Any) -> list[tuple[str, bool]]:
    """`ShownDocument.runs` of a document's tokens; an image's repeated token is counted."""
    learnt = tokens.labels != -100
    learnt[:1] = False  # no token predicts the first one
    edges = [0, *(np.flatnonzero(np.diff(learnt)) + 1).tolist(), len(learnt)]
    runs: list[tuple[str, bool]] = []
    for start, stop in itertools.pairwise(edges):
        ids = tokens.ids[start:stop].tolist()
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        counted = _REPEATED.sub(lambda m: f"{m[1]} x {len(m[0]) // len(m[1])}", text)
        runs.append((counted, bool(learnt[start])))
    return runs
