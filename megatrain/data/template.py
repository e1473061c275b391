"""A tokenizer's chat template as a function from conversation to text.

Templates differ in their input for the same conversation: arguments of calls as objects or as
JSON, content as a string or as parts, reasoning under several names. The right form is found
by trying the template on a conversation of two turns.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any

from megatrain.compat.transformers import render_jinja_template
from megatrain.data.conversation import Conversation, Message
from megatrain.data.images import KINDS
from megatrain.errors import InputError, explained

_LONGEST = 64 << 20  # characters, twice a row's limit; tokenising takes 50 times as many bytes
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING = ("reasoning_content", "reasoning", "thinking")
SAID = ("content", "tool_calls", *REASONING)
# What replies begin with and end with where a template always asks for another reply (Command R7B,
# the first of Llama 3), ends calls with the next header (Command R+), writes them otherwise at the
# end (Apriel), or has the tokens that begin and end a turn within it, too (Kimi K3).
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

    parts: bool = False  # content as a list of parts
    json: bool = False  # arguments as a string
    empty: bool = False  # calls without content have an empty one

    def put(self, message: Message) -> Message:
        """The message in this form."""
        message_put = dict(message)
        content = message_put.get("content")
        if content is not None and (self.parts or not KINDS.keys().isdisjoint(content)):
            message_put["content"] = _as_parts(content)
        if "tool_calls" in message_put:
            if self.empty:
                message_put.setdefault("content", "")
            if self.json:
                message_put["tool_calls"] = [_as_json(call) for call in message_put["tool_calls"]]
        return message_put


class Template:
    """The chat template of a tokenizer. Raises InputError: it has none."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise InputError(
                "the tokenizer has no chat template, which chat data needs: use the tokenizer of "
                "an instruct model, or name a template's file as model.chat_template"
            )
        self._tokenizer = tokenizer
        self._shapes: dict[tuple[str, bool], MessageForm] = {}
        self._reasoning: dict[tuple[str, str, bool], str | None] = {}
        self._headers: dict[tuple[str, str], tuple[int, bool]] = {}

    def source(self, talk: Conversation) -> str:
        """The source of the conversation's template: there may be a separate one for tools."""
        try:
            source: str = self._tokenizer.get_chat_template(tools=talk.tools)
        except ValueError as error:
            names = ", ".join(sorted(self._tokenizer.chat_template))
            raise InputError(
                f"the tokenizer has chat templates by name ({names}), and none is the default: "
                "save the one to use as a file, and name it as model.chat_template"
            ) from error
        return source

    def is_marked(self, talk: Conversation) -> bool:
        """True if the template marks replies itself."""
        return _MARKS.search(self.source(talk)) is not None

    def has_place(self, talk: Conversation, name: str) -> bool:
        """True if the template mentions a name."""
        return re.search(rf"\b{re.escape(name)}\b", self.source(talk)) is not None

    def heeds(self, talk: Conversation, turn: int, name: str, where: str) -> bool:
        """True if a message's field changes the text.

        Raises InputError: the template refuses the conversation, or takes too long.
        """
        messages = list(talk.messages)
        messages[turn] = {key: v for key, v in messages[turn].items() if key != name}
        text, _ = self.render(talk, where)
        return text != self._tried(talk, self._put(talk, messages))

    def render(
        self, talk: Conversation, where: str, **options: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the places of replies that the template marks."""
        remedy = (
            "what it asks for may be the row's tools or chat_template_kwargs; model.chat_template "
            "takes another"
        )
        with explained(f"{where}: the chat template refuses the row", remedy):
            messages = self._put(talk, talk.messages)
            text, marks = self._rendered(talk._replace(messages=messages), **options)
        if len(text) > _LONGEST:
            raise InputError(
                f"{where}: the chat template makes {len(text):,} characters of the row: check it"
            )
        return text, marks

    def _put(self, talk: Conversation, messages: list[Message]) -> list[Message]:
        shape = self._shape(talk)
        return [shape.put(self._named(talk, message)) for message in messages]

    def _rendered(self, talk: Conversation, **options: bool) -> tuple[str, list[tuple[int, int]]]:
        variables = {**self._tokenizer.special_tokens_map, **talk.options, **options}
        (text,), marked = render_jinja_template(
            [talk.messages], tools=talk.tools, chat_template=self.source(talk), **variables
        )
        return text, [span for spans in marked for span in spans]

    def reasoning(self, talk: Conversation, message: Message) -> str | None:
        """The name of the field that the template writes as such a reply's reasoning, if any."""
        calls = "tool_calls" in message  # some write reasoning only beside calls
        key = (self.source(talk), repr(sorted(talk.options.items())), calls)
        if key not in self._reasoning:
            names = (n for n in REASONING if self.has_place(talk, n))
            writing = (n for n in names if self._writes(n, talk, calls=calls))
            self._reasoning[key] = next(writing, None)
        return self._reasoning[key]

    def _writes(self, name: str, talk: Conversation, *, calls: bool) -> bool:
        reply = {**(_CALLS if calls else _SAID), name: "some thought"}
        # Some drop the reasoning of the only reply.
        trial = [_ASKED, reply] if calls else [_ASKED, _SAID, _ASKED, reply]
        shape = self._shape(talk._replace(messages=trial))
        return "some thought" in self._tried(talk, map(shape.put, trial))

    def header(self, talk: Conversation, token: re.Pattern[str]) -> tuple[int, bool]:
        """Number of tokens that begin a question, and True if nothing else ends replies (GLM's)."""
        key = (self.source(talk), repr(sorted(talk.options.items())))
        if key not in self._headers:
            trial = [_ASKED, {"role": "assistant", "content": _VALUE}, _ASKED]
            shape = self._shape(talk._replace(messages=trial))
            text, alone = (self._tried(talk, map(shape.put, part)) for part in (trial, trial[:2]))
            opening = token.findall(text.partition(_ASKED["content"])[0])
            tokens = token.findall(text.rpartition(_VALUE)[2].partition(_ASKED["content"])[0])
            pairs = zip(reversed(opening), reversed(tokens), strict=False)
            common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            ended = token.search(alone.rpartition(_VALUE)[2]) is not None
            self._headers[key] = common, 0 < common == len(tokens) and not ended
        return self._headers[key]

    def _named(self, talk: Conversation, message: Message) -> Message:
        """A message whose reasoning has the template's name for it."""
        theirs = next((n for n in REASONING if message.get(n)), None)
        ours = None if theirs is None else self.reasoning(talk, message)
        if theirs is None or ours is None or theirs == ours:
            return message
        return {**{n: v for n, v in message.items() if n != theirs}, ours: message[theirs]}

    def _tried(self, talk: Conversation, messages: Iterable[Message]) -> str:
        """The text of invented messages; empty if the template refuses them."""
        try:
            return self._rendered(talk._replace(messages=[*messages]))[0]
        except Exception:  # templates raise errors of any type, too
            return ""

    def _shape(self, talk: Conversation) -> MessageForm:
        calls = any("tool_calls" in message for message in talk.messages)
        key = (self.source(talk), calls)
        if key not in self._shapes:
            # Of a conversation without calls only the content's form matters.
            shapes = [MessageForm(*form) for form in product((False, True), repeat=1 + 2 * calls)]
            tried = ((shape, trial) for trial in _trials(calls) for shape in shapes)
            fitting = (shape for shape, trial in tried if self._fits(shape, trial, talk))
            self._shapes[key] = next(fitting, MessageForm())
        return self._shapes[key]

    def _fits(self, shape: MessageForm, trial: list[Message], talk: Conversation) -> bool:
        """True if the text of messages in this form has all their content, rightly written."""
        text = self._tried(talk, map(shape.put, trial))
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
    pieces = re.split(f"([{''.join(KINDS)}])", content)
    parts = [{"type": KINDS[p]} if p in KINDS else {"type": "text", "text": p} for p in pieces]
    return [part for part in parts if part.get("text") != ""] or [{"type": "text", "text": ""}]


def _as_json(call: Any) -> Any:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
