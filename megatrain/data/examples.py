"""Sources as examples: each row in the format that its source's first row has."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from megatrain.data.conversation import Conversation
from megatrain.data.readers import TextPiece, read_rows, read_text, split_text
from megatrain.data.rows import TEXT, Completion, Example, Format, Labelled, Pair, Reading
from megatrain.data.sources import DataSource
from megatrain.data.template import SAID
from megatrain.data.tokenizer import check_encodable
from megatrain.errors import InputError

BadRows = Literal["stop", "skip"]
SHOWN = 20  # rows left out and unread fields that are listed


def _has_empty_reply(example: Example) -> bool:
    """True if a reply to learn is empty, for example where a table has no answer."""
    if isinstance(example, Pair):
        return any(map(_has_empty_reply, example.replies))
    if isinstance(example, Completion):
        return not example.completion.strip()
    return isinstance(example, Conversation) and any(
        learnt and not any(str(message.get(name) or "").strip() for name in SAID)
        for message, learnt in zip(example.messages, example.learnt, strict=True)
    )


def say_left_out(log: logging.Logger, what: str, number: int, reasons: Sequence[str]) -> None:
    """Warn of rows that were left out: how many, and why the first of them were."""
    log.warning("left out %d %s:", number, what)
    for reason in reasons[:SHOWN]:
        log.warning("  %s", reason)
    if (more := number - len(reasons[:SHOWN])) > 0:
        log.warning("  and %d more", more)


class PlacedExample(NamedTuple):
    """An example, or a piece of a text, and where it is."""

    source: int
    number: int
    where: str
    example: TextPiece | Conversation | Completion | Pair | Labelled


class Examples:
    """All examples of some sources in order; notes findings on the way.

    Attributes:
        notes: all findings, for JSON. kind: text or chat. formats: title -> [number of
            sources, name of the first]. unread: fields that were passed over. num_bad, bad: rows
            that were left out, and the first of them with the reason. empty: rows that teach an
            empty reply, and the first of them. after: special tokens after a text, if it was asked.
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
                self._note("text files", TEXT, source)
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
                    self._note(form.title, form, source)
                example, unread = self._reading.example(form, row, where)
                if isinstance(example, str):
                    check_encodable(example, where)
            except InputError as error:
                self.bad(error)
                continue
            if _has_empty_reply(example):
                number_so_far, first = self.notes["empty"]
                self.notes["empty"] = [number_so_far + 1, first or where]
            self.pass_over(unread)
            if isinstance(example, str):
                for piece in split_text(example, number):
                    yield PlacedExample(index, number, where, piece)
            else:
                yield PlacedExample(index, number, where, example)

    def pass_over(self, names: Iterable[str]) -> None:
        """Remember fields that are not read."""
        known = self.notes["unread"]
        known += [n for n in names if n not in known][: SHOWN - len(known)]

    def bad(self, error: InputError) -> None:
        """Count a row that cannot be trained on; raises its error unless such rows are skipped."""
        if self._bad_rows == "stop":
            raise error
        self.notes["num_bad"] += 1
        if len(self.notes["bad"]) < SHOWN:
            self.notes["bad"].append(str(error))

    def _note(self, title: str, form: Format, source: DataSource) -> None:
        formats = self.notes["formats"]
        if self.notes["kind"] not in (None, form.kind):
            (first, (_, where)), *_ = formats.items()
            raise InputError(
                f"{source.name}: {title}, but {where} is {first}: train on one kind at a time, or "
                "set data.kind"
            )
        self.notes["kind"] = form.kind
        number, where = formats.get(title, (0, source.name))
        formats[title] = [number + 1, where]
