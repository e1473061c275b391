"""Texts as tokens: documents, each token of which is learnt, and completions of prompts."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.data.examples import Found
from megatrain.data.readers import TextPiece
from megatrain.data.rows import Completion
from megatrain.data.tokenizer import (
    added_ids,
    first_token,
    placed_tokens,
    token_ids,
    tokenising,
)
from megatrain.errors import InputError


class Document(NamedTuple):
    """A tokenised document (or piece of one), where it came from, and which tokens to predict.

    ids: [n] int32. targets: [n] bool; a document without any true one has nothing to learn from.
    good: of replies that are compared or rated, whether it is the better one, or a good one.
    margin: by how much the better of its pair is so.
    """

    source: int
    line: int
    ids: NDArray[np.int32]
    targets: NDArray[np.bool_]
    good: bool = True
    margin: float = 0.0


class TextEncoder:
    """Tokenises pieces of text in batches, which the tokenizer spreads over all cores.

    The tokenizer's own special tokens go around each document, and its end-of-sequence token after
    it, but where the text has them already. A long document becomes several pieces, of which only
    the last has the end token.

    Raises:
        InputError: the tokenizer has no end-of-sequence token.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None) -> None:
        if tokenizer.eos_token_id is None:
            raise InputError(
                "the tokenizer has no end-of-sequence token, which parts documents: "
                "set eos_token in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lead, tail = surroundings(tokenizer)
        eos = tokenizer.eos_token_id
        self._tail = tail if tail[-1:] == [eos] else [*tail, eos]

    def pieces(self, found: Sequence[tuple[Found, TextPiece]]) -> Iterator[Document]:
        """Each piece as a document.

        Raises:
            InputError: an id is outside the vocabulary.
        """
        texts = [piece.text for _, piece in found]
        with tokenising(found[0][0].where):
            encoded = self._tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, verbose=False
            )["input_ids"]
        for (place, piece), ids in zip(found, encoded, strict=True):
            if ids:
                lead = absent(self._lead, ids[: len(self._lead)]) if piece.first else []
                ids = [*lead, *ids, *(self._absent_tail(ids) if piece.last else [])]
            tokens = token_ids(ids, self._vocab_size, place.where)
            yield Document(place.source, place.number, tokens, np.ones(len(tokens), dtype=bool))

    @cached_property
    def _added(self) -> set[int]:
        """Ids of added tokens, which only completions need: some tokenizers have none to tell."""
        return added_ids(self._tokenizer)

    def completion(self, found: Found) -> Document:
        """A prompt, which is only read, and its completion with the end token, which is learnt.

        A token that holds the end of the one and the beginning of the other is learnt, but not a
        special one of the prompt that takes white space of the completion in.

        Raises:
            InputError: the tokenizer cannot say where a token came from; an id is outside the
                vocabulary.
        """
        assert isinstance(found.example, Completion)
        prompt, completion = found.example
        ids, offsets = placed_tokens(self._tokenizer, prompt + completion, found.where)
        first = first_token(prompt + completion, offsets, ids, self._added, len(prompt))
        lead = absent(self._lead, ids[: len(self._lead)])
        ids = [*lead, *ids, *self._absent_tail(ids)]
        targets = np.ones(len(ids), bool)
        targets[: len(lead) + first] = False
        if not completion:
            targets[:] = False
        tokens = token_ids(ids, self._vocab_size, found.where)
        return Document(found.source, found.number, tokens, targets)

    def _absent_tail(self, ids: list[int]) -> list[int]:
        return absent(self._tail, ids[-len(self._tail) :])


def absent(special: list[int], there: list[int]) -> list[int]:
    """The special tokens to put where a text has `there`: none where these are the same."""
    return [] if there == special else special


def surroundings(tokenizer: Any) -> tuple[list[int], list[int]]:
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
