"""The formats that rows come in, found by their fields.

A format has names of fields and a function; each field may have several names. The formats
are those of TRL's dataset formats, OpenAI's chat, Alpaca and ShareGPT (as LLaMA-Factory reads it).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatrain.data.conversation import SPEAKERS, from_json, text_or_messages
from megatrain.data.refused_fields import empty, listed, objects, refuse_unheeded, says_training
from megatrain.data.rows import (
    BY_CHANCE,
    Example,
    check_text,
    is_said,
    of_completion,
    of_instruction,
    of_messages,
    of_pair,
    of_pair_with_margin,
    of_question,
    of_rated,
    of_text,
    opening,
)
from megatrain.data.sources import DataKind
from megatrain.data.tables import DataRow
from megatrain.errors import InputError

Fields = Mapping[str, str | None]
_SYSTEM = {"system": ("system", "system_prompt")}
_PROMPTED = {**_SYSTEM, **{name: (name,) for name in ("tools", "chat_template_kwargs")}}
_REASONING = {"reasoning": ("reasoning", "reasoning_content", "thinking")}


@dataclass(frozen=True)
class Format:
    """Fields by our name, each with the names that it goes by in data.

    Attributes:
        title: its name in messages.
        needs: fields without which a row has another format.
        may: fields that a row may have besides.
        read: an example of the fields found, by our names.
    """

    title: str
    kind: Literal["text", "chat", "pairs", "rated"]
    needs: Mapping[str, tuple[str, ...]]
    may: Mapping[str, tuple[str, ...]]
    read: Callable[[DataRow, str], Example]

    def names(self, row: DataRow, fields: Fields, where: str) -> dict[str, str] | None:
        """Our name -> the row's, for each field of the row; None: a needed field is missing.

        Raises InputError: two fields of the row could be the same field.
        """
        names: dict[str, str] = {}
        for name, aliases in {**self.needs, **self.may}.items():
            mapped = fields.get(name)
            known = (mapped,) if mapped else tuple(a for a in aliases if a not in fields)
            present = [a for a in known if a in row]
            filled = [a for a in present if not empty(row[a])] or present[:1]
            if len(filled) > 1:
                first, second = filled[:2]
                raise InputError(
                    f"{where}: {first!r} and {second!r} could both be the {name}: say which with "
                    f"data.fields: {{{name}: {first}}}"
                )
            if filled:
                names[name] = filled[0]
            elif name in self.needs:
                return None
        return names


# Names of the fields of questions and answers.
_QUESTIONS = ("question", "prompt", "query", "problem", "input", "user")
_ANSWERS = ("answer", "response", "solution", "output", "assistant")
_TALKS = {"messages": ("messages", "conversations", "conversation")}
TEXT = Format("text", "text", {"text": ("text",)}, {}, of_text)
FORMATS = (
    Format("conversations", "chat", _TALKS, _PROMPTED, of_messages),
    Format(
        "prompts and completions", "chat",
        {"prompt": ("prompt",), "completion": ("completion",)},
        _PROMPTED, of_completion,
    ),
    Format(
        "instructions", "chat",
        {"instruction": ("instruction",), "output": ("output", "response")},
        {"input": ("input", "context"), "history": ("history",), **_SYSTEM, **_REASONING},
        of_instruction,
    ),
    Format(
        "questions and answers", "chat",
        {"question": _QUESTIONS, "answer": _ANSWERS},
        {"history": ("history",), **_SYSTEM, **_REASONING}, of_question,
    ),
    TEXT,
    Format("text of the field content", "text", {"text": ("content",)}, {}, of_text),
)  # fmt: skip
PAIRS = Format(
    "preferences", "pairs", {"chosen": ("chosen",), "rejected": ("rejected",)},
    {"prompt": ("prompt",), **_PROMPTED}, of_pair,
)  # fmt: skip
MARGINS = replace(PAIRS, needs={**PAIRS.needs, "margin": ("margin",)}, read=of_pair_with_margin)
RATED = Format(
    "rated replies", "rated",
    {"prompt": ("prompt",), "completion": ("completion",), "label": ("label", "kto_tag")},
    _PROMPTED, of_rated,
)  # fmt: skip
_OF_REPLIES = {"pairs": (PAIRS,), "margins": (MARGINS,), "rated": (RATED, PAIRS)}
_EVERY = (*FORMATS, MARGINS, RATED)
KNOWN = sorted({name for form in _EVERY for name in (*form.needs, *form.may)})
_NAMES = {
    a for form in _EVERY for names in (form.needs, form.may) for n in names.values() for a in n
}
_OF_MESSAGES = ("role", "content")
_PROMPTER = "prompter"  # the user's role in OpenAssistant's messages
# Fields that a reply depends on: without them another conversation would be learnt.
_BESIDE = ("instruction", "input", "context", "history", "choices", "options")


@dataclass(frozen=True)
class Reading:
    """How to read rows: the formats to look for, and the names of fields.

    fields: our name -> the data's; null: a field of the data that is passed over on purpose.
    """

    kind: DataKind
    fields: Fields

    def __post_init__(self) -> None:
        """Raises InputError: an unknown name of ours."""
        for name, theirs in self.fields.items():
            if theirs is not None and name not in (*KNOWN, *_OF_MESSAGES):
                known = ", ".join((*KNOWN, *_OF_MESSAGES))
                raise InputError(f"data.fields: {name!r:.40} is not a field; fields are {known}")

    def wanted(self, column: str) -> bool:
        """True if a column of a table should be read."""
        mapped = column in self.fields.values()
        known = column in (*_NAMES, *_BESIDE, "role") or says_training(column)
        return mapped or (column not in self.fields and known)

    def find(self, row: DataRow, where: str) -> Format:
        """The format of a row. Raises InputError: none fits, or only one that cannot be trained."""
        mapped = {name for name, theirs in self.fields.items() if theirs is not None}
        mapped -= set(_OF_MESSAGES)
        forms = _OF_REPLIES.get(self.kind) or [f for f in FORMATS if self.kind in ("auto", f.kind)]
        for form in forms:
            if mapped <= {*form.needs, *form.may} and form.names(row, self.fields, where):
                self._refuse_message(form, row, where)
                return form
        if self.kind == "margins" and PAIRS.names(row, self.fields, where):
            raise InputError(f"{where}: no 'margin' beside the replies: add it, or no loss.margin")
        self._refuse_known(row, where)
        names = [n for n in row if self.fields.get(n, n) is not None]
        raise InputError(
            f"{where}: {self._missing(mapped)}: its fields are {listed(names)}"
            f"{self._perhaps(row, forms, where)}"
        )

    def example(self, form: Format, row: DataRow, where: str) -> tuple[Example, list[str]]:
        """The example in a row of this format, and the names of unread fields.

        Raises InputError: the row is malformed, of another format, or asks for what is ignored.
        """
        names = form.names(row, self.fields, where)
        rest = {n: v for n, v in row.items()
                if n not in (names or {}).values() and n not in self.fields}  # fmt: skip
        if names is None and self.kind in _OF_REPLIES:
            raise self._other_format(form, row, where)
        if names is not None and form in (PAIRS, MARGINS) and "prompt" not in names:
            _refuse_unread_prompt([row[names[n]] for n in form.needs], rest, where)
        refuse_unheeded(rest, where, text=form.kind == "text")
        if names is None:
            raise self._other_format(form, row, where)
        if form.kind != "text" and form.needs is not _TALKS:
            for name in _BESIDE:
                if not empty(rest.get(name)):
                    raise InputError(
                        f"{where}: field {name!r} is not read beside {form.title}: name the fields "
                        f"with data.fields (or {name}: null to pass it over)"
                    )
        values = {name: row[theirs] for name, theirs in names.items()}
        for name, theirs in names.items():
            needed = name in form.needs and name != "instruction"  # beside it, the input may ask
            check_text(values[name], name, theirs, where, needed=needed)
        unread = [n for n, v in rest.items() if not empty(v)]
        if any(self.fields.get(name) for name in _OF_MESSAGES):
            values = {n: self._renamed(from_json(v, n, where), where) for n, v in values.items()}
        return form.read(values, where), unread

    def _other_format(self, form: Format, row: DataRow, where: str) -> InputError:
        return InputError(
            f"{where}: not of the first row's format ({form.title}): its fields are "
            f"{listed(row)}: keep formats in files of their own"
        )

    def _renamed(self, value: Any, where: str) -> Any:
        """Messages whose `role` and `content` have other names in the data."""
        if not isinstance(value, list):
            return value
        theirs = {name: self.fields[name] for name in _OF_MESSAGES if self.fields.get(name)}
        renamed = []
        for number, message in enumerate(value, start=1):
            if not isinstance(message, dict):
                return value
            for name, other in theirs.items():
                if message.get(other) is None and not empty(message.get(name)):
                    raise InputError(
                        f"{where}: message {number} has {name!r}, but no {other!r}, which "
                        f"data.fields takes as the {name}: fill it in, or leave the row out"
                    )
            rest = {k: v for k, v in message.items() if k not in {*theirs, *theirs.values()}}
            named = {name: message[other] for name, other in theirs.items() if other in message}
            renamed.append({**rest, **named})
        return renamed

    def _missing(self, mapped: set[str]) -> str:
        if self.kind == "text":
            name = self.fields.get("text") or "text"
            return f"no field {name!r} (name it with data.fields: {{text: ...}} or text_field)"
        if mapped:
            return f"no format has {listed(sorted(mapped))} of data.fields and these fields"
        known = "messages; prompt, completion; instruction, output; question, answer"
        known += "" if self.kind == "chat" else "; text"
        if self.kind in _OF_REPLIES:
            rated = "; prompt, completion, label" if self.kind == "rated" else ""
            known = f"chosen, rejected, with a prompt or without{rated}"
        return f"no format is known by these fields ({known}; data.fields maps others)"

    def _refuse_message(self, form: Format, row: DataRow, where: str) -> None:
        """Raises InputError: the row is a single message of a conversation, not a text."""
        spoken = form is FORMATS[-1] or row.get("role") in (*SPEAKERS, _PROMPTER)
        if form.kind == "text" and spoken and "role" in row and "role" not in self.fields:
            raise InputError(
                f"{where}: one message is no row: put those of a conversation into 'messages' of "
                "one row (role: null in data.fields passes it over)"
            )

    def _perhaps(self, row: DataRow, forms: Sequence[Format], where: str) -> str:
        """A suggestion if a field differs from ours in capitals or spaces, or holds a list."""
        for name in (n for n, v in row.items() if isinstance(v, list) and objects(v)):
            if {"role", "from"} & set(row[name][0]):
                return f": perhaps data.fields: {{messages: {name}}}"
            return f": perhaps {name!r} has the rows: jq -c '.{name}[]' FILE > rows.jsonl"
        theirs = {name.strip().lower(): name for name in row}
        plain = {name: row[theirs[name]] for name in theirs}
        for form in () if self.fields or len(theirs) < len(row) else forms:
            if names := form.names(plain, {}, where):
                ours = {name: theirs[key] for name, key in names.items() if name != theirs[key]}
                written = ", ".join(f"{name}: {key!r}" for name, key in ours.items())
                return f": perhaps data.fields: {{{written}}}"
        return ""

    def _refuse_known(self, row: DataRow, where: str) -> None:
        """Raises InputError: the row has a known format for which there is no loss here."""
        if self.kind == "rated":
            self._refuse_rated(row, where)
        rest = {n: v for n, v in row.items() if n not in self.fields}
        refuse_unheeded(rest, where, text=self.kind == "text")
        if "prompt" in rest and self.kind in ("auto", "chat"):
            raise InputError(
                f"{where}: a prompt alone has no reply to learn: give a 'completion' (or train on "
                "the prompts as text with data.fields: {text: prompt})"
            )

    def _refuse_rated(self, row: DataRow, where: str) -> None:
        """Raises InputError: a row has a rating, but not a prompt and a completion."""
        filled = {n for n, v in row.items() if n not in self.fields and not empty(v)}
        if filled.isdisjoint(RATED.needs["label"]):
            return
        if talks := filled.intersection(_TALKS["messages"]):
            remedy = f"split {min(talks)!r} into these two lists of messages"
        else:
            names = {"prompt": ("prompt", "instruction", *_QUESTIONS),
                     "completion": ("completion", *_ANSWERS)}  # fmt: skip
            fields = {ours: next((n for n in known if n in filled), "...")
                     for ours, known in names.items()}  # fmt: skip
            written = ", ".join(f"{ours}: {n}" for ours, n in fields.items() if ours != n)
            remedy = f"name them with data.fields: {{{written}}}"
            if {*fields.values()} == {"..."}:
                remedy = f"the fields are {listed(row)}"
        needed = "loss.name: kto needs a 'prompt' and a 'completion' beside the label"
        raise InputError(f"{where}: {needed}: {remedy}")


def _refuse_unread_prompt(pair: Sequence[Any], rest: Mapping[str, Any], where: str) -> None:
    """Raises InputError: a pair has its prompt under a name that is not read."""
    names = ("chosen", "rejected")
    replies = [text_or_messages(*named, where) for named in zip(pair, names, strict=False)]
    prompt = opening(replies) if {*map(type, replies)} in ({str}, {list}) else ""
    if isinstance(prompt, str) and len(prompt) <= BY_CHANCE:
        prompt = ""
    for name in ("instruction", *_QUESTIONS, *_TALKS["messages"]):
        value = rest.get(name)
        if empty(value) or (prompt and isinstance(prompt, list) and not isinstance(value, str)):
            continue
        if not (prompt and isinstance(value, str) and is_said(value, prompt)):
            raise InputError(
                f"{where}: field {name!r} is not read, and the replies have no such prompt: write "
                f"data.fields: {{prompt: {name}}} ({name}: null passes it over)"
            )
