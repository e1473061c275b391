"""The formats that rows come in, found by their fields, and what a row of each says.

A format is the names of its fields and a function; each field may go by several names. Their shapes
are those of TRL's dataset formats, OpenAI's chat, Alpaca and ShareGPT (as LLaMA-Factory reads it).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from megatrain.data.conversation import SPEAKERS, Conversation, Message, from_json, messages, tools
from megatrain.data.sources import Kind
from megatrain.data.tables import Row
from megatrain.data.unheeded import empty, listed, number, objects, refuse_unheeded, says_training
from megatrain.data.written import text_or_messages
from megatrain.errors import InputError

Fields = Mapping[str, str | None]


class Completion(NamedTuple):
    """A text to continue, and how: without a chat template, and only the completion is learnt."""

    prompt: str
    completion: str


class Rated(NamedTuple):
    """Replies to one prompt, each with the prompt, and which of them are good, by how much."""

    replies: Sequence[Conversation | Completion]
    good: Sequence[bool]
    margin: float = 0.0


Example = str | Conversation | Completion | Rated
_SYSTEM = {"system": ("system", "system_prompt")}
_REASONING = {"reasoning": ("reasoning", "reasoning_content", "thinking")}
_KWARGS = {"chat_template_kwargs": ("chat_template_kwargs",)}


@dataclass(frozen=True)
class Format:
    """Fields by our name, each with the names that it goes by in data.

    Attributes:
        title: what the user is told.
        needs: fields without which a row has another format.
        may: fields that a row may have besides.
        read: an example of the fields found, by our names.
    """

    title: str
    kind: Literal["text", "chat", "pairs", "rated"]
    needs: Mapping[str, tuple[str, ...]]
    may: Mapping[str, tuple[str, ...]]
    read: Callable[[Row, str], Example]

    def names(self, row: Row, fields: Fields, where: str) -> dict[str, str] | None:
        """Our name -> the row's, of each field it has; None where one is missing.

        Raises:
            InputError: two fields could be the same one of ours.
        """
        found: dict[str, str] = {}
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
                found[name] = filled[0]
            elif name in self.needs:
                return None
        return found


def _messages(row: Row, where: str) -> Conversation:
    said, learnt = messages(row["messages"], "messages", where)
    first = from_json(row["messages"], "messages", where)
    shared = isinstance(first, Sequence) and "from" in first[0]
    return _conversation(said, learnt, row, where, wrap=shared)


def _prompt_completion(row: Row, where: str) -> Conversation | Completion:
    parts = [text_or_messages(row[name], name, where) for name in ("prompt", "completion")]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == 2:
        refuse_unheeded({n: row.get(n) for n in ("system", "tools")}, where, text=False)
        return Completion(*texts)
    if texts:
        raise InputError(
            f"{where}: 'prompt' and 'completion' must both be strings, or both lists of messages"
        )
    prompt, _ = messages(parts[0], "prompt", where)
    completion, learnt = messages(parts[1], "completion", where)
    nothing = [False] * len(prompt)
    return _conversation(prompt + completion, nothing + learnt, row, where)


def _pair(row: Row, where: str) -> Rated:
    names = ("chosen", "rejected")
    replies: list[Any] = [text_or_messages(row[name], name, where) for name in names]
    prompt = text_or_messages(row.get("prompt"), "prompt", where)
    kind = type(replies[0])
    if kind not in (str, list) or type(replies[1]) is not kind:
        raise InputError(f"{where}: 'chosen' and 'rejected' must both be strings, or both messages")
    if replies[0] == replies[1]:
        raise InputError(f"{where}: 'chosen' and 'rejected' say the same: leave the row out")
    if type(prompt) is not kind:
        # The replies hold the prompt: what they begin with alike, as TRL takes it.
        differ = (at for at, (one, other) in enumerate(zip(*replies, strict=False)) if one != other)
        common = next(differ, min(map(len, replies)))
        if kind is str and prompt is None:
            common -= replies[0][:common].endswith(" ")
        said, replies = replies[0][:common], [reply[common:] for reply in replies]
        if kind is list and not (all(replies) and (said or prompt)):
            raise InputError(
                f"{where}: 'chosen' and 'rejected' must begin with the same messages, and then "
                "each have a reply of its own"
            )
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else said
        prompt = said or asked
    rows = [{**row, "prompt": prompt, "completion": reply} for reply in replies]
    return Rated([_prompt_completion(each, where) for each in rows], [True, False])


def _pair_with_margin(row: Row, where: str) -> Rated:
    return _pair(row, where)._replace(margin=number(row["margin"], "margin", where))


def _rated(row: Row, where: str) -> Rated:
    if not isinstance(row["label"], bool):
        raise InputError(f"{where}: 'label' must be true of a good reply, false of a bad one")
    return Rated([_prompt_completion(row, where)], [row["label"]])


def _instruction(row: Row, where: str) -> Conversation:
    texts = [_string(row, name, where) for name in ("instruction", "input")]
    answer = _string(row, "output", where, needed=True)
    return _turns(row, "\n".join(filter(None, texts)), answer, where)


def _question(row: Row, where: str) -> Conversation:
    question = _string(row, "question", where, needed=True)
    return _turns(row, question, _string(row, "answer", where, needed=True), where)


def _turns(row: Row, question: str, answer: str, where: str) -> Conversation:
    turns = [*_history(row, where), question, answer]
    if not question:
        raise InputError(f"{where}: it asks nothing: fill its question in, or leave the row out")
    roles = ("user", "assistant")
    said: list[Message] = [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]
    if reasoning := _string(row, "reasoning", where):
        said[-1]["reasoning_content"] = reasoning
    return _conversation(said, [m["role"] == "assistant" for m in said], row, where)


def _history(row: Row, where: str) -> list[str]:
    history = from_json(row.get("history"), "history", where)
    if empty(history):
        return []
    texts: list[str] = []
    for pair in history if isinstance(history, list) else [None]:
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            raise InputError(f"{where}: 'history' must be a list of pairs of question and answer")
        texts += pair
    return texts


def _conversation(
    said: list[Message], learnt: list[bool], row: Row, where: str, *, wrap: bool = False
) -> Conversation:
    """A conversation with the row's system prompt, tools and settings of the template."""
    system = _string(row, "system", where)
    if system and said[0]["role"] in ("system", "developer"):
        if said[0].get("content") != system:
            raise InputError(f"{where}: 'system' and a system message say two things: keep one")
    elif system:
        said, learnt = [{"role": "system", "content": system}, *said], [False, *learnt]
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, dict) or _RESERVED & set(options):
        kept = ", ".join(sorted(_RESERVED))
        raise InputError(f"{where}: 'chat_template_kwargs' must be an object without {kept}")
    return Conversation(said, learnt, tools(row.get("tools"), where, wrap=wrap), options)


_RESERVED = {"add_generation_prompt", "chat_template", "continue_final_message", "conversations",
             "documents", "messages", "return_assistant_tokens_mask", "tools"}  # fmt: skip


def _text(row: Row, where: str) -> str:
    return _string(row, "text", where, needed=True)


def _string(row: Row, name: str, where: str, *, needed: bool = False) -> str:
    value = row.get(name)
    if value is None and not needed:
        return ""
    if isinstance(value, str):
        return value
    kind, remedy = type(value).__name__, "write it as one"
    if value is None:
        kind, remedy = "null", "fill it in, or leave the row out"
    elif isinstance(value, (list, dict)):
        remedy = "write it as one (a table by columns is to be saved row by row)"
    raise InputError(f"{where}: field {name!r} must be a string, not {kind}: {remedy}")


_TALKS = {"messages": ("messages", "conversations", "conversation")}
TEXT = Format("text", "text", {"text": ("text",)}, {}, _text)
FORMATS = (
    Format("conversations", "chat", _TALKS, {**_SYSTEM, "tools": ("tools",), **_KWARGS}, _messages),
    Format(
        "prompts and completions", "chat",
        {"prompt": ("prompt",), "completion": ("completion",)},
        {**_SYSTEM, "tools": ("tools",), **_KWARGS}, _prompt_completion,
    ),
    Format(
        "instructions", "chat",
        {"instruction": ("instruction",), "output": ("output", "response")},
        {"input": ("input", "context"), "history": ("history",), **_SYSTEM, **_REASONING},
        _instruction,
    ),
    Format(
        "questions and answers", "chat",
        {"question": ("question", "prompt", "query", "problem", "input", "user"),
         "answer": ("answer", "response", "solution", "output", "assistant")},
        {"history": ("history",), **_SYSTEM, **_REASONING}, _question,
    ),
    TEXT,
    Format("text of the field content", "text", {"text": ("content",)}, {}, _text),
)  # fmt: skip
_PROMPTED = {**_SYSTEM, "tools": ("tools",), **_KWARGS}
PAIRS = Format(
    "preferences", "pairs", {"chosen": ("chosen",), "rejected": ("rejected",)},
    {"prompt": ("prompt",), **_PROMPTED}, _pair,
)  # fmt: skip
MARGINS = replace(PAIRS, needs={**PAIRS.needs, "margin": ("margin",)}, read=_pair_with_margin)
RATED = Format(
    "rated replies", "rated",
    {"prompt": ("prompt",), "completion": ("completion",), "label": ("label", "kto_tag")},
    _PROMPTED, _rated,
)  # fmt: skip
_OF_REPLIES = {"pairs": (PAIRS,), "margins": (MARGINS,), "rated": (RATED, PAIRS)}
_EVERY = (*FORMATS, MARGINS, RATED)
KNOWN = sorted({name for form in _EVERY for name in (*form.needs, *form.may)})
_NAMES = {
    a for form in _EVERY for names in (form.needs, form.may) for n in names.values() for a in n
}
_OF_MESSAGES = ("role", "content")
_PROMPTER = "prompter"  # who asks, in OpenAssistant's messages
# What a reply rests on: were it passed over, another conversation would be learnt.
_BESIDE = ("instruction", "input", "context", "history", "choices", "options")


@dataclass(frozen=True)
class Reading:
    """How rows are read: which formats may be found, and which names fields have.

    fields: our name -> the data's; null: a field of the data that is passed over on purpose.
    """

    kind: Kind
    fields: Fields

    def __post_init__(self) -> None:
        """Raises InputError: a name of ours is none."""
        for name, theirs in self.fields.items():
            if theirs is not None and name not in (*KNOWN, *_OF_MESSAGES):
                known = ", ".join((*KNOWN, *_OF_MESSAGES))
                raise InputError(f"data.fields: {name!r:.40} is not a field; fields are {known}")

    def wanted(self, column: str) -> bool:
        """Whether a column of a table is to be read at all."""
        mapped = column in self.fields.values()
        known = column in (*_NAMES, *_BESIDE, "role") or says_training(column)
        return mapped or (column not in self.fields and known)

    def find(self, row: Row, where: str) -> Format:
        """The format of a row.

        Raises:
            InputError: none fits, or none that can be trained.
        """
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

    def example(self, form: Format, row: Row, where: str) -> tuple[Example, list[str]]:
        """What a row of this format says, and the names of its fields that are not read.

        Raises:
            InputError: it is malformed, of another format, or says what would not be heeded.
        """
        names = form.names(row, self.fields, where)
        rest = {n: v for n, v in row.items()
                if n not in (names or {}).values() and n not in self.fields}  # fmt: skip
        if names is None and self.kind in _OF_REPLIES:
            raise self._other_format(form, row, where)
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
        given = {name: row[theirs] for name, theirs in names.items()}
        unread = [n for n, v in rest.items() if not empty(v)]
        if any(self.fields.get(name) for name in _OF_MESSAGES):
            given = {name: self._renamed(from_json(v, name, where)) for name, v in given.items()}
        return form.read(given, where), unread

    def _other_format(self, form: Format, row: Row, where: str) -> InputError:
        return InputError(
            f"{where}: not of the first row's format ({form.title}): its fields are "
            f"{listed(row)}: keep formats in files of their own"
        )

    def _renamed(self, value: Any) -> Any:
        """Messages whose `role` and `content` have other names in the data."""
        if not isinstance(value, list):
            return value
        ours = {theirs: name for name, theirs in self.fields.items() if name in _OF_MESSAGES}
        return [
            {ours.get(key, key): v for key, v in m.items()} if isinstance(m, dict) else m
            for m in value
        ]

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

    def _refuse_message(self, form: Format, row: Row, where: str) -> None:
        """Raises InputError: the row is one message, whose content is no text of its own."""
        spoken = form is FORMATS[-1] or row.get("role") in (*SPEAKERS, _PROMPTER)
        if form.kind == "text" and spoken and "role" in row and "role" not in self.fields:
            raise InputError(
                f"{where}: one message is no row: put those of a conversation into 'messages' of "
                "one row (role: null in data.fields passes it over)"
            )

    def _perhaps(self, row: Row, forms: Sequence[Format], where: str) -> str:
        """What to write where a field has other capitals or spaces than ours, or holds a list."""
        for name in (n for n, v in row.items() if isinstance(v, list) and objects(v)):
            if {"role", "from"} & set(row[name][0]):
                return f": perhaps data.fields: {{messages: {name}}}"
            return f": perhaps {name!r} has the rows: jq -c '.{name}[]' FILE > rows.jsonl"
        theirs = {name.strip().lower(): name for name in row}
        plain = {name: row[theirs[name]] for name in theirs}
        for form in () if self.fields or len(theirs) < len(row) else forms:
            if names := form.names(plain, {}, where):
                ours = {name: theirs[each] for name, each in names.items() if name != theirs[each]}
                written = ", ".join(f"{name}: {each!r}" for name, each in ours.items())
                return f": perhaps data.fields: {{{written}}}"
        return ""

    def _refuse_known(self, row: Row, where: str) -> None:
        """Raises InputError: the row is of a format that no loss here is for."""
        rest = {n: v for n, v in row.items() if n not in self.fields}
        refuse_unheeded(rest, where, text=self.kind == "text")
        if "prompt" in rest and self.kind in ("auto", "chat"):
            raise InputError(
                f"{where}: a prompt alone has no reply to learn: give a 'completion' (or train on "
                "the prompts as text with data.fields: {text: prompt})"
            )
