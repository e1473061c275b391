"""Turns rows into examples (texts, completions, conversations), and these into tokens.

Of a text all tokens are learnt, of a prompt with its completion the completion, of a conversation
the replies. If the chat template marks replies with `{% generation %}`, the marks decide, else
`reply_spans` finds them. The end-of-turn token belongs to the reply; white space that the template
writes after it does not.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from megatrain.data.conversation import ROLES, Conversation
from megatrain.data.images import ImageProcessor, Medium
from megatrain.data.readers import TextPiece, read_rows, read_text, split_text
from megatrain.data.refused_fields import OF_CALLS, empty
from megatrain.data.reply_spans import ReplySpans
from megatrain.data.rows import TEXT, Completion, Example, Format, Labelled, Pair, Reading
from megatrain.data.sources import DataSource
from megatrain.data.template import REASONING, SAID, Template
from megatrain.data.tokenizer import (
    check_encodable,
    first_token,
    placed_tokens,
    token_ids,
    tokenising,
)
from megatrain.errors import InputError

BadRows = Literal["stop", "skip"]
SHOWN = 20  # rows left out and unread fields that are listed
_NO_PLACE = "use a template that has, or leave it out"
_BATCH_PIECES, _BATCH_CHARS = 1024, 1 << 22  # tokenised together: enough for all cores


def _has_empty_reply(example: Example) -> bool:
    """True if a reply to learn is empty, for example because a table has no answer."""
    if isinstance(example, Pair):
        return any(map(_has_empty_reply, example.replies))
    if isinstance(example, Completion):
        return not example.completion.strip()
    return isinstance(example, Conversation) and any(
        learnt and not any(str(message.get(name) or "").strip() for name in SAID)
        for message, learnt in zip(example.messages, example.learnt, strict=True)
    )


def say_left_out(log: logging.Logger, unit: str, number: int, reasons: Sequence[str]) -> None:
    """Log a warning of rows that were left out, with the reasons of the first of them."""
    log.warning("left out %d %s:", number, unit)
    for reason in reasons[:SHOWN]:
        log.warning("  %s", reason)
    if (unlisted := number - len(reasons[:SHOWN])) > 0:
        log.warning("  and %d more", unlisted)


class PlacedExample(NamedTuple):
    """An example, or a piece of a text, with the number of its source and of its row there."""

    source: int
    number: int
    where: str
    example: TextPiece | Conversation | Completion | Pair | Labelled


class Examples:
    """All examples of the sources, in order.

    Attributes:
        notes: findings while the sources are read, for JSON. Keys: kind: text or chat; formats:
            title -> [number of sources, name of the first]; unread: fields that were not read;
            num_bad, bad: number of rows left out, and the reasons of the first; empty: number of
            rows that teach an empty reply, and the first of them; after: number of special tokens
            after a text with labels.
    """

    def __init__(self, sources: Sequence[DataSource], reading: Reading, bad_rows: BadRows) -> None:
        self.sources = sources
        self._reading = reading
        self._bad_rows = bad_rows
        self.notes: dict[str, Any] = {
            "kind": None, "formats": {}, "unread": [], "num_bad": 0, "bad": [],
            "empty": [0, ""],
        }  # fmt: skip

    def __iter__(self) -> Iterator[PlacedExample]:
        for index, source in enumerate(self.sources):
            if source.format == "text":
                self._note_format("text files", TEXT, source)
                for piece in read_text(source):
                    yield PlacedExample(index, piece.line, f"{source.name}:{piece.line}", piece)
            else:
                yield from self._rows(index, source)

    def _rows(self, index: int, source: DataSource) -> Iterator[PlacedExample]:
        form: Format | None = None
        for number, row in read_rows(source, self._reading.wanted):
            where = f"{source.name}:{number}"
            try:
                if isinstance(row, InputError):
                    raise row
                if form is None:
                    form = self._reading.find(row, where)
                    self._note_format(form.title, form, source)
                example, unread = self._reading.example(form, row, where)
                if isinstance(example, str):
                    check_encodable(example, where)
            except InputError as error:
                self.note_bad(error)
                continue
            if _has_empty_reply(example):
                number_so_far, first = self.notes["empty"]
                self.notes["empty"] = [number_so_far + 1, first or where]
            self.note_unread(unread)
            if isinstance(example, str):
                for piece in split_text(example, number):
                    yield PlacedExample(index, number, where, piece)
            else:
                yield PlacedExample(index, number, where, example)

    def note_unread(self, names: Iterable[str]) -> None:
        """Note fields that were not read; of many only the first."""
        unread = self.notes["unread"]
        unread += [n for n in names if n not in unread][: SHOWN - len(unread)]

    def note_bad(self, error: InputError) -> None:
        """Note a row that cannot be trained on; raises `error` unless such rows are skipped."""
        if self._bad_rows == "stop":
            raise error
        self.notes["num_bad"] += 1
        if len(self.notes["bad"]) < SHOWN:
            self.notes["bad"].append(str(error))

    def _note_format(self, title: str, form: Format, source: DataSource) -> None:
        """Note a source's format. Raises InputError: earlier sources have rows of another kind."""
        formats = self.notes["formats"]
        if self.notes["kind"] not in (None, form.kind):
            first, (_, where) = next(iter(formats.items()))
            raise InputError(
                f"{source.name}: {title}, but {where} is {first}: train on one kind at a time, or "
                "set data.kind"
            )
        self.notes["kind"] = form.kind
        number, where = formats.get(title, (0, source.name))
        formats[title] = [number + 1, where]


class Document(NamedTuple):
    """A tokenised document (or a piece of one), its source and line, and the tokens to predict."""

    ids: NDArray[np.int32]  # `[n]` int32
    # `[n]` bool; if none is True, there is nothing to learn from the document
    targets: NDArray[np.bool_]
    # False for the worse reply of a pair; only the digest of a store depends on it
    good: bool = True
    margin: float = 0.0  # by how much the pair's better reply is preferred
    images: Sequence[Medium] = ()  # in the order of their tokens
    images_end: int = 0  # the number of tokens up to the last one of the last image
    # `[m]` int32: the document's classes, or the class of each token (-100: none)
    labels: NDArray[np.int32] = np.zeros(0, np.int32)
    source: int = 0
    line: int = 0


class Encoder:
    """Tokenises examples of all types: texts, texts with labels, completions, conversations, pairs.

    A text gets the tokenizer's special tokens around it, and the end-of-sequence token after it,
    unless it has them already. Of the pieces of a long text only the last one gets the end token.
    Pieces are tokenised in batches, which the tokenizer spreads over all cores.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None, images: ImageProcessor) -> None:
        self._tokenizer, self._vocab_size, self._images = tokenizer, vocab_size, images

    @cached_property
    def _added_ids(self) -> set[int]:
        """The ids of added tokens; listed only when needed, as some tokenizers cannot list them."""
        return {*self._tokenizer.added_tokens_decoder, *self._tokenizer.all_special_ids}

    @cached_property
    def _added_tokens(self) -> list[str]:
        return [str(token) for token in self._tokenizer.added_tokens_decoder.values()]

    @cached_property
    def _template(self) -> Template:
        return Template(self._tokenizer)

    @cached_property
    def _around_texts(self) -> "SpecialTokens":
        return SpecialTokens.of(self._tokenizer)

    @cached_property
    def _around_documents(self) -> "SpecialTokens":
        """The special tokens around a document. Raises InputError: there is no end token."""
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise InputError(
                "the tokenizer has no end-of-sequence token, which parts documents: "
                "set eos_token in its tokenizer_config.json"
            )
        opening, closing = self._around_texts
        return SpecialTokens(opening, closing if closing[-1:] == [eos] else [*closing, eos])

    def documents(self, examples: Examples) -> Iterator[Document]:
        """All documents in order. Raises InputError: the data or the tokenizer cannot be used."""
        batch: list[tuple[PlacedExample, TextPiece]] = []
        num_chars = 0
        for placed in examples:
            if not isinstance(placed.example, TextPiece):
                yield from self._row(placed, examples)
                continue
            batch.append((placed, placed.example))
            num_chars += len(placed.example.text)
            if len(batch) >= _BATCH_PIECES or num_chars >= _BATCH_CHARS:
                yield from self._pieces(batch)
                batch = []
                num_chars = 0
        if batch:
            yield from self._pieces(batch)

    def _row(self, placed: PlacedExample, examples: Examples) -> Sequence[Document]:
        """The documents of an example; none, with a note in `examples`, if it cannot be used."""
        example = placed.example
        parts = example.replies if isinstance(example, Pair) else [example]
        conversations = [part for part in parts if isinstance(part, Conversation)]
        if any(talk.images for talk in conversations):
            self._images.load()  # an unusable processor makes no row bad
        try:
            for talk in conversations:
                examples.note_unread(f"{name} (of messages)" for name in self._unread(talk))
            documents = [self._encoded(part, placed, examples) for part in parts]
        except InputError as error:
            examples.note_bad(error)
            return []
        source, line = placed.source, placed.number
        margin = example.margin if isinstance(example, Pair) else 0.0
        return [
            document._replace(source=source, line=line, good=number == 0, margin=margin)
            for number, document in enumerate(documents)
        ]

    def _encoded(self, part: Any, placed: PlacedExample, examples: Examples) -> Document:
        """A labelled text, a completion, or a conversation with its images, as a document."""
        if isinstance(part, Labelled):
            examples.notes["after"] = len(self._around_texts.closing)
            return self._labelled(part, placed.where)
        if not isinstance(part, Conversation):
            return self._completion(part, placed.where)
        if not part.images:
            return self.conversation(part, placed.where)
        if not self._images.identity:
            kind = part.images[0].kind
            raise InputError(
                f"{placed.where}: {kind}s ({kind!r}, '{kind}s', parts of a content): the model has "
                "no processor for them: use the folder of one that has, or leave them out"
            )
        folder = Path(examples.sources[placed.source].name).parent
        images = self._images.read(part.images, folder, placed.where)
        return self.conversation(part._replace(images=images), placed.where)

    def _pieces(self, pieces: Sequence[tuple[PlacedExample, TextPiece]]) -> Iterator[Document]:
        """Each piece as a document. Raises InputError: an id is outside the vocabulary."""
        special = self._around_documents
        texts = [piece.text for _, piece in pieces]
        with tokenising(pieces[0][0].where):
            encoded = self._tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, verbose=False
            )["input_ids"]
        for (place, piece), ids in zip(pieces, encoded, strict=True):
            if ids:
                lead = special.lacking_before(ids) if piece.first else []
                end = special.lacking_after(ids) if piece.last else []
                ids = [*lead, *ids, *end]
            tokens = token_ids(ids, self._vocab_size, place.where)
            learnt = np.ones(len(tokens), dtype=bool)
            yield Document(tokens, learnt, source=place.source, line=place.number)

    def _completion(self, example: Completion, where: str) -> Document:
        """A prompt and its completion as a document; the completion and its end token are learnt.

        A token with characters of both is learnt, too, unless it is a special token of the prompt
        that includes white space of the completion.
        """
        prompt, completion = example
        special = self._around_documents
        ids, offsets = placed_tokens(self._tokenizer, prompt + completion, where)
        first = first_token(prompt + completion, offsets, ids, self._added_ids, len(prompt))
        lead = special.lacking_before(ids)
        ids = [*lead, *ids, *special.lacking_after(ids)]
        targets = np.ones(len(ids), bool)
        targets[: len(lead) + first] = False
        if not completion:
            targets[:] = False
        return Document(token_ids(ids, self._vocab_size, where), targets)

    def _labelled(self, example: Labelled, where: str) -> Document:
        """A text with special tokens around it as a document, with the text's or words' classes."""
        text, labels, words = example
        opening, closing = self._around_texts
        text_ids, offsets = placed_tokens(self._tokenizer, text, where)
        ids = token_ids([*opening, *text_ids, *closing], self._vocab_size, where)
        classes = np.array(labels, np.int32)
        if words is not None:  # the first token of a word has the word's class
            added = self._added_ids
            places = np.array([first_token(text, offsets, text_ids, added, w) for w in words])
            token_classes = np.full(len(ids), -100, np.int32)
            has_token = places < len(text_ids)
            token_classes[len(opening) + places[has_token]] = classes[has_token]
            classes = token_classes
        return Document(ids, np.ones(len(ids), bool), labels=classes)

    def conversation(self, talk: Conversation, where: str) -> Document:
        """A conversation as a document; without a reply to learn it has no tokens.

        Raises InputError: the template refuses the conversation, or leaves out a part of it.
        """
        refuse_unplaced(talk, self._template, where)
        if not any(talk.learnt):
            return Document(np.zeros(0, np.int32), np.zeros(0, bool))
        replies = ReplySpans(self._template, self._added_tokens, talk, where)
        if not talk.images:
            self._refuse_tokens(replies.text, where)
        # `moved` tells where a place of `replies.text` is in `text`.
        text, media_end, moved = self._images.place(replies.text, talk.images, where)
        unchecked, offsets = placed_tokens(self._tokenizer, text, where)
        ids = token_ids(unchecked, self._vocab_size, where)
        starts = offsets[:, 0]
        marked, targets = np.zeros((2, len(ids)), bool)
        for begin, end in replies.marks:
            first = first_token(text, offsets, ids, self._added_ids, moved(begin))
            marked[first : np.searchsorted(starts, moved(end))] = True
        images_end = int(np.searchsorted(starts, media_end))
        document = Document(ids, marked, images=talk.images, images_end=images_end)
        is_marked = self._template.is_marked(talk)
        if is_marked and talk.learnt == [m["role"] == "assistant" for m in talk.messages]:
            return document  # the template's own marks say all that is learnt
        for turn in np.flatnonzero(talk.learnt).tolist():
            begin, end = map(moved, replies.span(turn))
            first = first_token(text, offsets, ids, self._added_ids, begin)
            # White space after a reply's last special token is between two turns: it is not learnt.
            stripped_end = begin + len(text[begin:end].rstrip())
            stop, stripped_stop = np.searchsorted(starts, (end, stripped_end))
            is_closed = stripped_stop > first and int(ids[stripped_stop - 1]) in self._added_ids
            targets[first : stripped_stop if is_closed else stop] = True
        return document._replace(targets=targets & marked if is_marked else targets)

    def _refuse_tokens(self, text: str, where: str) -> None:
        """Raises InputError: a text without images has a token that stands for one."""
        if not self._images.identity:  # the model takes text alone
            return
        for name in self._added_tokens:
            if re.search("image|img|video|audio", name, re.IGNORECASE) and name in text:
                raise InputError(
                    f"{where}: the text has the token {name!r}, but the row has no images: name "
                    "images in 'images', or write the token in another way"
                )

    def _unread(self, talk: Conversation) -> list[str]:
        """The fields of messages that the template does not mention."""
        names = dict.fromkeys(n for m in talk.messages for n, v in m.items() if not empty(v))
        names_read = ("role", *SAID)
        return [n for n in names if n not in names_read and not self._template.has_place(talk, n)]


class SpecialTokens(NamedTuple):
    """The special tokens before and after a text."""

    opening: list[int]
    closing: list[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """The tokens that the tokenizer adds to a text. Raises InputError: it changes the text."""
        with tokenising("a text"):
            plain = tokenizer("a", add_special_tokens=False)["input_ids"]
            full = tokenizer("a")["input_ids"]
        for start in range(len(full) + 1):
            if full[start : start + len(plain)] == plain:
                return cls(full[:start], full[start + len(plain) :])
        raise InputError("the tokenizer changes texts when it adds special tokens: check its files")

    def lacking_before(self, ids: list[int]) -> list[int]:
        """The opening tokens; none if `ids` begin with them."""
        return [] if ids[: len(self.opening)] == self.opening else self.opening

    def lacking_after(self, ids: list[int]) -> list[int]:
        """The closing tokens; none if `ids` end with them."""
        return [] if ids[-len(self.closing) :] == self.closing else self.closing


def refuse_unplaced(talk: Conversation, template: Template, where: str) -> None:
    """Raises InputError: the template would leave out a part of the conversation."""
    if talk.tools and not template.has_place(talk, "tools"):
        raise InputError(f"{where}: the chat template has no place for 'tools': {_NO_PLACE}")
    for turn, message in enumerate(talk.messages, start=1):
        role = message["role"]
        if role not in ROLES and not (role and template.has_place(talk, role)):
            roles = ", ".join(ROLES)
            raise InputError(
                f"{where}: message {turn}: role {role!r:.40} is none of these: {roles}"
            )
        for name, remedy in OF_CALLS.items():
            if not (empty(message.get(name)) or template.heeds(talk, turn - 1, name, where)):
                raise InputError(
                    f"{where}: message {turn}: the chat template does not read {name!r}: {remedy}"
                )
        for name in filter(message.get, ("tool_calls", *REASONING)):
            has_place = template.has_place(talk, name)
            if name in REASONING:
                has_place = template.reasoning(talk, message) is not None
            if not has_place:
                raise InputError(
                    f"{where}: message {turn}: the chat template has no place for {name!r}: "
                    + _NO_PLACE
                )
