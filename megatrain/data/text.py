"""Documents of plain text as tokens, each of which is to predict."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.data.readers import Piece, Row, listed, read_rows, read_text, split_text
from megatrain.data.sources import Source, SourceFile
from megatrain.data.tokenizer import token_ids, tokenising
from megatrain.data.unheeded import refuse_unheeded
from megatrain.errors import InputError

_BATCH_PIECES, _BATCH_CHARS = 1024, 1 << 22  # enough for all cores, little enough for memory


class Document(NamedTuple):
    """A tokenised document (or piece of one), where it came from, and which tokens to predict.

    ids: [n] int32. targets: [n] bool; a document without any true one has nothing to learn from.
    """

    source: int
    line: int
    ids: NDArray[np.int32]
    targets: NDArray[np.bool_]


class TextEncoder:
    """Tokenises text sources in batches, which the tokenizer spreads over all cores.

    The tokenizer's own special tokens go around each document, and its end-of-sequence token after
    it. A long document becomes several pieces, of which only the last has the end token.

    Raises:
        InputError: the tokenizer has no end-of-sequence token.
    """

    def __init__(self, tokenizer: Any, text_field: str, vocab_size: int | None) -> None:
        if tokenizer.eos_token_id is None:
            raise InputError(
                "the tokenizer has no end-of-sequence token, which parts documents: "
                "set eos_token in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._field = text_field
        self._vocab_size = vocab_size
        self._lead, tail = _surroundings(tokenizer)
        eos = tokenizer.eos_token_id
        self._tail = tail if tail[-1:] == [eos] else [*tail, eos]

    def documents(self, sources: Sequence[Source]) -> Iterator[Document]:
        """All documents in order.

        Raises:
            InputError: a source is unreadable, empty or malformed; an id is outside the vocabulary.
        """
        batch: list[tuple[int, Piece]] = []
        num_chars = 0
        for index, piece in self._pieces(sources):
            batch.append((index, piece))
            num_chars += len(piece.text)
            if len(batch) >= _BATCH_PIECES or num_chars >= _BATCH_CHARS:
                yield from self._encode(batch, sources)
                batch, num_chars = [], 0
        if batch:
            yield from self._encode(batch, sources)

    def _pieces(self, sources: Sequence[Source]) -> Iterator[tuple[int, Piece]]:
        for index, source in enumerate(sources):
            for piece in self._pieces_of(source):
                yield index, piece

    def _pieces_of(self, source: Source) -> Iterator[Piece]:
        if isinstance(source, SourceFile) and source.format == "text":
            yield from read_text(source)
            return
        for number, row in read_rows(source, self._field):
            refuse_unheeded(row, "text", f"{source.name}:{number}")
            text = _text_of(row, self._field, f"{source.name}:{number}")
            yield from split_text(text, number)

    def _encode(
        self, batch: Sequence[tuple[int, Piece]], sources: Sequence[Source]
    ) -> Iterator[Document]:
        texts = [piece.text for _, piece in batch]
        with tokenising(sources[batch[0][0]].name):
            encoded = self._tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, verbose=False
            )["input_ids"]
        for (index, piece), ids in zip(batch, encoded, strict=True):
            if ids:
                ids = [*(self._lead if piece.first else []), *ids]
                ids += self._tail if piece.last else []
            tokens = token_ids(ids, self._vocab_size, f"{sources[index].name}:{piece.line}")
            yield Document(index, piece.line, tokens, np.ones(len(tokens), dtype=bool))


def _text_of(row: Row, field: str, where: str) -> str:
    if field not in row:
        known = listed(row)
        raise InputError(f"{where}: no field {field!r}: its fields are {known} (set text_field)")
    text = row[field]
    if not isinstance(text, str):
        raise InputError(f"{where}: field {field!r} must be a string, not {type(text).__name__}")
    if not text.isascii():
        check_encodable(text, where)
    return text


def check_encodable(text: str, where: str) -> None:
    """JSON can write half of a surrogate pair, which is no character.

    Raises:
        InputError: the text has one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: a lone surrogate escape (\\ud8..): not text, fix it") from error


def _surroundings(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text."""
    with tokenising("a text"):
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        full = tokenizer("a")["input_ids"]
    starts = (i for i in range(len(full) + 1) if full[i : i + len(plain)] == plain)
    start = next(starts, None)
    if start is None:
        raise InputError(
            "the tokenizer changes a text when it adds special tokens: check its files"
        )
    return full[:start], full[start + len(plain) :]
