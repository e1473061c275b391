"""Prompts as tokens, the token that ends replies, and data sets of prompts for rollouts."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megatrain.data.conversation import Conversation, messages, text_or_messages
from megatrain.data.encoders import BadRows, SpecialTokens, refuse_unplaced, say_left_out
from megatrain.data.images import ImageProcessor, Medium, place_media
from megatrain.data.readers import DataRow, read_rows
from megatrain.data.refused_fields import BESIDE_PROMPTS, refuse_unheeded
from megatrain.data.reply_spans import ReplySpans
from megatrain.data.row_packing import shuffled
from megatrain.data.rows import Fields
from megatrain.data.sources import open_sources
from megatrain.data.template import Template
from megatrain.data.tokenizer import check_encodable, token_ids, tokenising
from megatrain.errors import InputError

Prompt = str | Sequence[Mapping[str, Any]]  # a text to continue, or messages to reply to

_ASKED, _ANSWERED = "some words", "an answer"
_QUESTION = {"role": "user", "content": _ASKED}
_REPLY = {"role": "assistant", "content": _ANSWERED}
_ENDS_WITH_REPLY = Conversation([_QUESTION, _REPLY], [False, True])
_ENDS_WITH_QUESTION = Conversation([_QUESTION, _REPLY, _QUESTION], [False, True, False])


def prompt_ids(
    tokenizer: Any,
    prompt: Prompt,
    vocab_size: int | None,
    where: str,
    images: ImageProcessor | None = None,
) -> tuple[list[int], list[Medium]]:
    """The tokens of a text that begins a document, or of messages and the header of their reply.

    Returns these tokens, and the images of the messages (none if `images` is None).

    Raises InputError: the prompt is empty, or the tokenizer or its template refuses it.
    """
    pictures: list[Medium] = []
    special = SpecialTokens([], [])  # a template writes its own
    if isinstance(prompt, str):
        text = prompt
        special = SpecialTokens.of(tokenizer)
    else:
        talk = Conversation(*messages(prompt, "messages", where, images=images is not None))
        sources = place_media(talk.messages, {}, where)
        pictures = images.read(sources, Path(), where) if images else []
        if talk.messages[-1]["role"] == "assistant":
            raise InputError(f"{where}: ends with a reply; end it with what is to be replied to")
        template = Template(tokenizer)
        refuse_unplaced(talk, template, where)
        text = template.render(talk, where, add_generation_prompt=True).text
        text = images.place(text, pictures, where).text if images else text
    check_encodable(text, where)
    with tokenising(where):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise InputError(f"{where}: holds no token; give some text")
    ids = [*special.lacking_before(ids), *ids]
    return token_ids(ids, vocab_size, where).tolist(), pictures


def end_of_turn(tokenizer: Any) -> int | None:
    """The token with which the chat template ends a reply; None: no single token does."""
    if not tokenizer.chat_template or not tokenizer.is_fast:
        return None
    ids = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    for talk in (_ENDS_WITH_REPLY, _ENDS_WITH_QUESTION):  # some end replies before questions alone
        with suppress(InputError):  # the template refuses this conversation
            replies = ReplySpans(Template(tokenizer), list(ids), talk, "the chat template")
            begin, end = replies.span(1)
            closing = replies.text[begin:end].rpartition(_ANSWERED)[2]
            by_place = {closing.rfind(token): token for token in ids if token and token in closing}
            if by_place:
                return ids[by_place[max(by_place)]]  # the last one
    return None


# Arguments of TRL's reward functions that no field of a row may replace.
_TRL = ("prompts", "completion", "completions", "completion_ids", "trainer_state", "log_metric")
log = logging.getLogger("megatrain.data")


class PromptRow(NamedTuple):
    """A prompt, its tokens, the other fields of its row (`beside`), and its `file:line`."""

    prompt: Prompt
    ids: list[int]
    beside: Mapping[str, Any]
    where: str


class Prompts:
    """A data set whose rows are prompts, in the order of the data; all are held in memory.

    Args: `seed` decides which rows `hold_out` takes.
    """

    kind: ClassVar[str] = "prompts"
    packing: ClassVar[bool] = False  # no row holds several prompts

    def __init__(self, rows: Sequence[PromptRow], seed: int = 0) -> None:
        self._rows, self._seed = rows, seed

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def fingerprint(self) -> str:
        """A hex digest of all rows' tokens and fields."""
        digest = hashlib.blake2b(digest_size=16)
        for row in self._rows:
            digest.update(json.dumps([row.ids, row.beside], default=str).encode())
        return digest.hexdigest()

    @cached_property
    def row_lengths(self) -> list[int]:
        return [len(row.ids) for row in self._rows]

    def batch(self, rows: Sequence[int]) -> list[PromptRow]:
        return [self._rows[row] for row in rows]

    def describe(self, row: int) -> str:
        """The origin of a row: `file:line`."""
        return self._rows[row].where

    def hold_out(self, fraction: float) -> tuple["Prompts", "Prompts"]:
        """Disjoint data sets to train and to evaluate on, which data and seed decide."""
        num_train = len(self) - max(1, round(len(self) * fraction))
        if not num_train:
            raise InputError(f"data.eval_fraction {fraction} leaves no prompt to train on")
        order = shuffled(len(self), 0, self._seed)
        parts = [np.sort(part).tolist() for part in (order[:num_train], order[num_train:])]
        train, held_out = (Prompts(self.batch(part), self._seed) for part in parts)
        return train, held_out


def open_prompts(
    source: str | Path | Sequence[str | Path],
    *,
    tokenizer: Any,
    longest: int,
    fields: Fields,
    bad_rows: BadRows,
    drop: bool,
    vocab_size: int,
    chat: bool = False,
    hub_config: str | None = None,
    hub_split: str = "train",
    seed: int = 0,
) -> Prompts:
    """The data set of rows with a `prompt`: a text, or messages that ask for a reply.

    Args:
        source, bad_rows, hub_config, hub_split: as of `open_dataset`.
        longest: tokens of a prompt, at most; longer prompts are never cut.
        fields: name for reward functions -> the data's name; None: the field is ignored.
        drop: leave longer prompts out; else they are an error.
        chat: a text is the message of a user.
        seed: as of `Prompts`.

    Raises InputError: a row cannot be used; names the file and line, and the remedy.
    """
    sources, _ = open_sources(source, "prompts", hub_config, hub_split)
    prompts: list[PromptRow] = []
    left_out: list[str] = []
    rows = (
        (f"{file.name}:{number}", row)
        for file in sources
        for number, row in read_rows(file, lambda column: fields.get(column, column) is not None)
    )
    for where, row in rows:
        try:
            if isinstance(row, InputError):
                raise row
            prompt = _prompt_row(row, where, fields, tokenizer, vocab_size, chat=chat)
        except InputError as error:
            if bad_rows == "stop":
                raise
            left_out.append(str(error))
            continue
        if len(prompt.ids) <= longest:
            prompts.append(prompt)
            continue
        left_out.append(
            f"{where}: the prompt has {len(prompt.ids)} tokens, and replies leave room for "
            f"{longest}: raise data.sequence_length, or drop such prompts (data.overlong: drop)"
        )
        if not drop:
            raise InputError(left_out[-1])
    if left_out:
        say_left_out(log, "prompts", len(left_out), left_out)
    if not prompts:
        raise InputError(f"{sources[0].name}: no prompt that can be used; give data that has some")
    names = {"prompt"}.union(*(row.beside for row in prompts))
    for ours, theirs in fields.items():
        if theirs is not None and ours not in names:
            raise InputError(f"data.fields: no row has {theirs!r}, which is to be {ours!r}")
    return Prompts(prompts, seed)


def _prompt_row(
    row: DataRow, where: str, fields: Fields, tokenizer: Any, vocab_size: int, *, chat: bool
) -> PromptRow:
    """The prompt of a row. Raises InputError: the row has none, or cannot be used."""
    renamed = {ours: theirs for ours, theirs in fields.items() if theirs is not None}
    values = {n: v for n, v in row.items() if n not in renamed.values() and n not in fields}
    values |= {ours: row[theirs] for ours, theirs in renamed.items() if theirs in row}
    if "prompt" not in values:
        names = ", ".join(map(repr, row))
        raise InputError(
            f"{where}: no field 'prompt' among {names}: name the field of prompts with "
            "data.fields: {prompt: ...}"
        )
    prompt = text_or_messages(values.pop("prompt"), "prompt", where)
    if not isinstance(prompt, str | list):
        raise InputError(f"{where}: 'prompt' must be a text or a list of messages")
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    refuse_unheeded({name: values.get(name) for name in BESIDE_PROMPTS}, where, text=False)
    ids, _ = prompt_ids(tokenizer, prompt, vocab_size, where)
    return PromptRow(prompt, ids, {n: v for n, v in values.items() if n not in _TRL}, where)
