"""Prompts without replies, which a run answers itself: rows with what reward functions read."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megatrain.data.examples import BadRows, say_left_out
from megatrain.data.formats import Fields
from megatrain.data.opening import open_sources
from megatrain.data.packing import shuffled
from megatrain.data.prompts import Prompt, prompt_ids
from megatrain.data.readers import read_rows
from megatrain.data.sources import Source
from megatrain.data.unheeded import BESIDE_PROMPTS, refuse_unheeded
from megatrain.data.written import text_or_messages
from megatrain.errors import InputError

_OWN = ("prompts", "completion", "completions", "completion_ids", "trainer_state", "log_metric")

log = logging.getLogger("megatrain.data")


class PromptRow(NamedTuple):
    """A prompt, its tokens, the other fields of its row, and where it is."""

    prompt: Prompt
    ids: list[int]
    beside: Mapping[str, Any]
    where: str


class Prompts:
    """Rows that are prompts, in the order of the data; the whole of it rests in memory.

    Args: `seed` decides which rows `hold_out` takes.

    Attributes:
        kind: what rows are.
        packing: no row holds several.
    """

    kind: ClassVar[str] = "prompts"
    packing: ClassVar[bool] = False

    def __init__(self, rows: Sequence[PromptRow], seed: int = 0) -> None:
        self._rows, self._seed = rows, seed

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of all that the rows hold."""
        digest = hashlib.blake2b(digest_size=16)
        for row in self._rows:
            digest.update(json.dumps([row.ids, row.beside], default=str).encode())
        return digest.hexdigest()

    def row_length(self, row: int) -> int:
        """Tokens of a prompt."""
        return len(self._rows[row].ids)

    def batch(self, rows: Sequence[int]) -> list[PromptRow]:
        """The prompts of some rows."""
        return [self._rows[row] for row in rows]

    def describe(self, row: int) -> str:
        """Where a row comes from: `file:line`."""
        return self._rows[row].where

    def hold_out(self, fraction: float) -> tuple["Prompts", "Prompts"]:
        """(train, evaluation): disjoint, and fixed by data and seed.

        Raises:
            InputError: a part would have none.
        """
        split = len(self) - max(1, round(len(self) * fraction))
        if not split:
            raise InputError(f"data.eval_fraction {fraction} leaves no prompt to train on")
        order = shuffled(len(self), 0, self._seed)
        parts = [np.sort(part).tolist() for part in (order[:split], order[split:])]
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
    """Reads rows with a `prompt`: a text, or messages that end with what is to be replied to.

    Args:
        source, bad_rows, hub_config, hub_split: as of `open_dataset`. seed: as of `Prompts`.
        longest: tokens of a prompt; longer ones are never cut.
        fields: any name -> the data's, under which reward functions read it; None: passed over.
        drop: leave longer prompts out; else they end the run.
        chat: texts are messages of a user.

    Raises:
        InputError: a row cannot be used; names the file and line, and the remedy.
    """
    sources, _ = open_sources(source, "prompts", hub_config, hub_split, None)
    found: list[PromptRow] = []
    left_out: list[str] = []
    for made in _read(sources, fields, tokenizer, vocab_size, chat=chat):
        if isinstance(made, PromptRow) and len(made.ids) <= longest:
            found.append(made)
            continue
        stop, error = (
            (not drop, _too_long(made, longest))
            if isinstance(made, PromptRow)
            else (bad_rows == "stop", made)
        )
        if stop:
            raise error
        left_out.append(str(error))
    if left_out:
        say_left_out(log, "prompts", len(left_out), left_out)
    if not found:
        raise InputError(f"{sources[0].name}: no prompt that can be used; give data that has some")
    there = {"prompt"}.union(*(row.beside for row in found))
    for ours, theirs in fields.items():
        if theirs is not None and ours not in there:
            raise InputError(f"data.fields: no row has {theirs!r}, which is to be {ours!r}")
    return Prompts(found, seed)


def _too_long(row: PromptRow, longest: int) -> InputError:
    return InputError(
        f"{row.where}: the prompt has {len(row.ids)} tokens, and data.sequence_length less "
        f"loss.max_completion_length leaves {longest}: raise sequence_length, or leave such "
        "prompts out with data.overlong: drop"
    )


def _read(
    sources: Sequence[Source], fields: Fields, tokenizer: Any, vocab_size: int, *, chat: bool
) -> Iterator[PromptRow | InputError]:
    """The rows, or what is wrong with one."""
    for each in sources:
        for number, row in read_rows(each, lambda column: fields.get(column, column) is not None):
            try:
                if isinstance(row, InputError):
                    raise row
                where = f"{each.name}:{number}"
                yield _prompt_row(row, where, fields, tokenizer, vocab_size, chat=chat)
            except InputError as error:
                yield error


def _prompt_row(
    row: Mapping[str, Any],
    where: str,
    fields: Fields,
    tokenizer: Any,
    vocab_size: int,
    *,
    chat: bool,
) -> PromptRow:
    theirs = {name for name in fields.values() if name is not None}
    given = {n: v for n, v in row.items() if n not in theirs and n not in fields}
    for ours, name in fields.items():
        if name is not None and name in row:
            given[ours] = row[name]
    if "prompt" not in given:
        names = ", ".join(map(repr, row))
        raise InputError(
            f"{where}: no field 'prompt': its fields are {names}: name it with "
            "data.fields: {prompt: ...}"
        )
    prompt = text_or_messages(given.pop("prompt"), "prompt", where)
    if not isinstance(prompt, str | list):
        raise InputError(f"{where}: 'prompt' must be a text or a list of messages")
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    refuse_unheeded({name: given.get(name) for name in BESIDE_PROMPTS}, where, text=False)
    ids = prompt_ids(tokenizer, prompt, vocab_size, where)
    return PromptRow(prompt, ids, {n: v for n, v in given.items() if n not in _OWN}, where)
