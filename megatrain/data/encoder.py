"""Examples of every kind as documents of tokens."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from megatrain.data.chat_encoder import ChatEncoder
from megatrain.data.conversation import Conversation
from megatrain.data.examples import Examples, Found
from megatrain.data.readers import TextPiece
from megatrain.data.rows import Rated
from megatrain.data.text import Document, TextEncoder
from megatrain.errors import InputError

_BATCH_PIECES, _BATCH_CHARS = 1024, 1 << 22  # enough for all cores, little enough for memory


class Encoder:
    """Tokenises examples as each asks for it."""

    def __init__(self, tokenizer: Any, vocab_size: int | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    @cached_property
    def _text(self) -> TextEncoder:
        return TextEncoder(self._tokenizer, self._vocab_size)

    @cached_property
    def _chat(self) -> ChatEncoder:
        return ChatEncoder(self._tokenizer, self._vocab_size)

    def documents(self, examples: Examples) -> Iterator[Document]:
        """All documents in order.

        Raises:
            InputError: the data or the tokenizer cannot be used.
        """
        batch: list[tuple[Found, TextPiece]] = []
        num_chars = 0
        for found in examples:
            if not isinstance(found.example, TextPiece):
                yield from self._row(found, examples)
                continue
            batch.append((found, found.example))
            num_chars += len(found.example.text)
            if len(batch) >= _BATCH_PIECES or num_chars >= _BATCH_CHARS:
                yield from self._text.pieces(batch)
                batch, num_chars = [], 0
        if batch:
            yield from self._text.pieces(batch)

    def _row(self, found: Found, examples: Examples) -> Sequence[Document]:
        said = found.example
        try:
            for talk in said.replies if isinstance(said, Rated) else [said]:
                if isinstance(talk, Conversation):
                    examples.pass_over(f"{name} (of messages)" for name in self._chat.unread(talk))
            if not isinstance(said, Rated):
                return [self._encoded(found)]
            return [
                self._encoded(found._replace(example=reply))._replace(good=good, margin=said.margin)
                for reply, good in zip(said.replies, said.good, strict=True)
            ]
        except InputError as error:
            examples.bad(error)
            return []

    def _encoded(self, found: Found) -> Document:
        is_chat = isinstance(found.example, Conversation)
        return self._chat.conversation(found) if is_chat else self._text.completion(found)
