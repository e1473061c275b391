"""A tokenizer's chat template as a function from conversation to text.

Templates expect the same conversation in different forms: arguments of calls as objects or as
JSON, content as a string or as parts, reasoning under several names. The right form is found by
trying the template on an invented conversation.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any, NamedTuple

from megatrain.compat.transformers import render_jinja_template
from megatrain.data.conversation import Conversation, Message
from megatrain.data.images import KINDS
from megatrain.errors import InputError, explained

_LONGEST = 64 << 20  # characters, twice a row's limit; tokenising takes 50 times as many bytes
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING = ("reasoning_content", "reasoning", "thinking")
SAID = ("content", "tool_calls", *REASONING)
# Known beginnings of replies, each with a pattern of their ends, for templates that always ask for
# another reply (Command R7B, the first of Llama 3), end calls with the next header (Command R+),
# write the last reply otherwise (Apriel), or repeat a turn's own tokens within it (Kimi K3).
HEADERS = {
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>": (
        r"<\|END_OF_TURN_TOKEN\|>|(?=<\|START_OF_TURN_TOKEN\|>)"
    ),
    "<|start_header_id|>assistant<|end_header_id|>\n\n": r"<\|eo[tm]_id\|>",
    "<|assistant|>\n": r"\n<\|end\|>",
    "<|begin_assistant|>\n": r"\n<\|end\|>|\Z",
    '<|open|>message role="assistant"<|sep|>': r"<\|end_of_msg\|>",
}
_KEY, _VALUE, _ID = "somekey", "some value", "abcdefghi"
_ASKED: Message = {"role": "user", "content": "some words"}
_SAID: Message = {"role": "assistant", "content": "some words"}
_CALL = {"name": "somename", "arguments": {_KEY: _VALUE}}
_CALLS: Message = {
    "role": "assistant", "tool_calls": [{"type": "function", "id": _ID, "function": _CALL}],
}  # fmt: skip


@dataclass(frozen=True)
class MessageForm:
    """The form of messages that a template takes."""

    parts_content: bool = False  # content as a list of parts
    json_arguments: bool = False  # arguments as a string
    empty_content: bool = False  # an empty content beside calls that have no content

    def apply(self, message: Message) -> Message:
        formed = dict(message)
        content = formed.get("content")
        if content is not None and (self.parts_content or not KINDS.keys().isdisjoint(content)):
            formed["content"] = _as_parts(content)
        if "tool_calls" in formed:
            if self.empty_content:
                formed.setdefault("content", "")
            if self.json_arguments:
                formed["tool_calls"] = [_as_json(call) for call in formed["tool_calls"]]
        return formed


class Rendered(NamedTuple):
    """The text of a conversation, and the places of replies that the template marks."""

    text: str
    marks: list[tuple[int, int]]


class Template:
    """The chat template of a tokenizer. Raises InputError: it has none."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise InputError(
                "the tokenizer has no chat template, which chat data needs: use the tokenizer of "
                "an instruct model, or name a template's file as model.chat_template"
            )
        self._tokenizer = tokenizer
        self._forms: dict[tuple[str, bool], MessageForm] = {}
        self._reasoning: dict[tuple[str, str, bool], str | None] = {}
        self._headers: dict[tuple[str, str], tuple[int, bool]] = {}

    def source(self, talk: Conversation) -> str:
        """The source of the template for this conversation: tools may have a separate template."""
        try:
            return str(self._tokenizer.get_chat_template(tools=talk.tools))
        except ValueError as error:
            names = ", ".join(sorted(self._tokenizer.chat_template))
            raise InputError(
                f"the tokenizer has chat templates by name ({names}), and none is the default: "
                "save the one to use as a file, and name it as model.chat_template"
            ) from error

    def is_marked(self, talk: Conversation) -> bool:
        """True if the template marks replies with `{% generation %}`."""
        return _MARKS.search(self.source(talk)) is not None

    def has_place(self, talk: Conversation, name: str) -> bool:
        """True if the template mentions `name`."""
        return re.search(rf"\b{re.escape(name)}\b", self.source(talk)) is not None

    def heeds(self, talk: Conversation, turn: int, name: str, where: str) -> bool:
        """True if a message's field `name` changes the text. Raises InputError, as `render`."""
        messages = list(talk.messages)
        messages[turn] = {key: v for key, v in messages[turn].items() if key != name}
        return self.render(talk, where).text != self._text_of(talk, self._formed(talk, messages))

    def render(self, talk: Conversation, where: str, **options: bool) -> Rendered:
        """A conversation's text. Raises InputError: the template refuses it, or makes too much."""
        remedy = (
            "what it asks for may be the row's tools or chat_template_kwargs; model.chat_template "
            "takes another"
        )
        with explained(f"{where}: the chat template refuses the row", remedy):
            messages = self._formed(talk, talk.messages)
            rendered = self._rendered(talk._replace(messages=messages), **options)
        if (length := len(rendered.text)) > _LONGEST:
            raise InputError(
                f"{where}: the chat template makes {length:,} characters of the row: check it"
            )
        return rendered

    def _formed(self, talk: Conversation, messages: list[Message]) -> list[Message]:
        """The messages in the template's form, with the template's name for reasoning."""
        form = self._form(talk)
        return [form.apply(self._with_reasoning(talk, message)) for message in messages]

    def _rendered(self, talk: Conversation, **options: bool) -> Rendered:
        variables = {**self._tokenizer.special_tokens_map, **talk.options, **options}
        (text,), marked = render_jinja_template(
            [talk.messages], tools=talk.tools, chat_template=self.source(talk), **variables
        )
        return Rendered(text, [span for spans in marked for span in spans])

    def reasoning(self, talk: Conversation, message: Message) -> str | None:
        """The field that the template writes as the reasoning of such a message, if any."""
        calls = "tool_calls" in message  # some templates write reasoning only beside calls
        key = (self.source(talk), repr(sorted(talk.options.items())), calls)
        if key not in self._reasoning:
            names = (n for n in REASONING if self.has_place(talk, n))
            writing = (n for n in names if self._writes(n, talk, calls=calls))
            self._reasoning[key] = next(writing, None)
        return self._reasoning[key]

    def _writes(self, name: str, talk: Conversation, *, calls: bool) -> bool:
        """True if the template writes field `name` of a reply with calls, or else with content."""
        reply = {**(_CALLS if calls else _SAID), name: "some thought"}
        # Some templates drop the reasoning of a conversation's only reply.
        trial = [_ASKED, reply] if calls else [_ASKED, _SAID, _ASKED, reply]
        form = self._form(talk._replace(messages=trial))
        return "some thought" in self._text_of(talk, map(form.apply, trial))

    def header(self, talk: Conversation, token: re.Pattern[str]) -> tuple[int, bool]:
        """The number of tokens that begin a question; True if only these end replies (GLM's)."""
        key = (self.source(talk), repr(sorted(talk.options.items())))
        if key not in self._headers:
            trial = [_ASKED, {"role": "assistant", "content": _VALUE}, _ASKED]
            form = self._form(talk._replace(messages=trial))
            text = self._text_of(talk, map(form.apply, trial))
            text_to_reply = self._text_of(talk, map(form.apply, trial[:2]))
            opening = token.findall(text.partition(_ASKED["content"])[0])
            between = token.findall(text.rpartition(_VALUE)[2].partition(_ASKED["content"])[0])
            pairs = zip(reversed(opening), reversed(between), strict=False)
            length = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            has_end = token.search(text_to_reply.rpartition(_VALUE)[2]) is not None
            self._headers[key] = length, 0 < length == len(between) and not has_end
        return self._headers[key]

    def _with_reasoning(self, talk: Conversation, message: Message) -> Message:
        """The message, its reasoning in the field that the template writes."""
        present = next((n for n in REASONING if message.get(n)), None)
        written = None if present is None else self.reasoning(talk, message)
        if present is None or written is None or present == written:
            return message
        return {**{n: v for n, v in message.items() if n != present}, written: message[present]}

    def _text_of(self, talk: Conversation, messages: Iterable[Message]) -> str:
        """The text of invented messages; empty if the template refuses them."""
        try:
            return self._rendered(talk._replace(messages=[*messages])).text
        except Exception:  # templates raise errors of any type, too
            return ""

    def _form(self, talk: Conversation) -> MessageForm:
        """The form of messages that the template takes, for conversations with calls or without."""
        calls = any("tool_calls" in message for message in talk.messages)
        key = (self.source(talk), calls)
        if key not in self._forms:
            # Without calls only the first of the three choices of a form matters.
            choices = product((False, True), repeat=3 if calls else 1)
            attempts = product(_trials(calls), [MessageForm(*choice) for choice in choices])
            fitting = (form for trial, form in attempts if self._fits(form, trial, talk))
            self._forms[key] = next(fitting, MessageForm())
        return self._forms[key]

    def _fits(self, form: MessageForm, trial: list[Message], talk: Conversation) -> bool:
        """True if the text of messages in this form has all their content, rightly written."""
        text = self._text_of(talk, map(form.apply, trial))
        garbled = f'\\"{_KEY}' in text or f"'{_KEY}'" in text
        return "some words" in text and _VALUE in text and not garbled


def _trials(calls: bool) -> Iterator[list[Message]]:
    """Conversations to try a template with, the most informative first."""
    reply: Message = {"role": "assistant", "content": _VALUE}
    if calls:
        reply = _CALLS
        result = {"role": "tool", "content": "some words", "name": "somename", "tool_call_id": _ID}
        yield [_ASKED, reply, result, _SAID, _ASKED]
    yield [_ASKED, reply]


def _as_parts(content: str) -> list[Message]:
    """A content as parts of text and of images, which characters of `PLACES` mark."""
    pieces = re.split(f"([{''.join(KINDS)}])", content)
    parts = [{"type": KINDS[p]} if p in KINDS else {"type": "text", "text": p} for p in pieces]
    return [part for part in parts if part.get("text") != ""] or [{"type": "text", "text": ""}]


def _as_json(call: Any) -> Any:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
