"""Conversations as tokens through the tokenizer's chat template; only replies are to predict.

Where the template marks its replies with `{% generation %}`, these marks decide. Otherwise a reply
is what the template adds between the conversation before it (with the prompt that asks for a reply)
and the conversation with it: both must be the beginning of the whole text. Its end-of-turn token
belongs to the reply; white space which the template writes after that does not.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.data.bounded import bounded
from megatrain.data.readers import Row, listed, read_rows
from megatrain.data.sources import Source
from megatrain.data.text import Document, check_encodable
from megatrain.data.tokenizer import token_ids, tokenising
from megatrain.errors import InputError, first_line
from megatrain.units import GIB

Message = dict[str, Any]
# What a template may take for a row. One of 200,000 short messages took 0.6 seconds.
_SECONDS, _NUM_BYTES = 20.0, GIB
_LONGEST = 64 << 20  # characters, twice what a row may have; tokenising takes 50 times as much
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatEncoder:
    """Tokenises rows of `messages` (and optional `tools`) with the chat template.

    Raises:
        InputError: the tokenizer has no chat template, or cannot say where a token came from.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None) -> None:
        if not tokenizer.chat_template:
            raise InputError(
                "the tokenizer has no chat template, which chat data needs: use the tokenizer of "
                "an instruct model, or add chat_template.jinja to its folder"
            )
        if not tokenizer.is_fast:
            raise InputError(
                "chat data needs a tokenizer with a tokenizer.json (a fast one): convert it"
            )
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._added = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)

    def documents(self, sources: Sequence[Source]) -> Iterator[Document]:
        """All conversations in order; those without a reply as documents of no tokens.

        Raises:
            InputError: a source is unreadable, empty or malformed; the template refuses a row.
        """
        for index, source in enumerate(sources):
            for number, row in read_rows(source, ["messages", "tools"]):
                where = f"{source.name}:{number}"
                ids, targets = self._encode(_messages(row, where), _tools(row, where), where)
                yield Document(index, number, ids, targets)

    def _encode(
        self, messages: list[Message], tools: list[Any] | None, where: str
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        if not any(m["role"] == "assistant" for m in messages):
            return np.zeros(0, np.int32), np.zeros(0, bool)
        if _MARKS.search(self._tokenizer.get_chat_template(tools=tools)):
            return self._by_marks(messages, tools, where)
        return self._by_prefixes(messages, tools, where)

    def _by_marks(
        self, messages: list[Message], tools: list[Any] | None, where: str
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        whole, marked = self._render(messages, tools, where, return_assistant_tokens_mask=True)
        encoded, ids = self._tokens(whole, where)
        targets = np.zeros(len(ids), bool)
        for begin, end in marked:
            first, last = encoded.char_to_token(begin), encoded.char_to_token(end - 1)
            if first is not None:
                targets[first : None if last is None else last + 1] = True
        return ids, targets

    def _by_prefixes(
        self, messages: list[Message], tools: list[Any] | None, where: str
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        whole, _ = self._render(messages, tools, where)
        encoded, ids = self._tokens(whole, where)
        starts = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)[:, 0]
        targets = np.zeros(len(ids), bool)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                begin, end = self._span(whole, messages, turn, tools, where)
                first, last = np.searchsorted(starts, (begin, end))
                # What follows the closing special token is white space between two turns.
                closing = np.searchsorted(starts, len(whole[:end].rstrip()))
                if closing > first and int(ids[closing - 1]) in self._added:
                    last = closing
                targets[first:last] = True
        return ids, targets

    def _span(
        self, whole: str, messages: list[Message], turn: int, tools: list[Any] | None, where: str
    ) -> tuple[int, int]:
        """Where in the whole text the reply `messages[turn]` begins and ends."""
        if turn == 0:
            raise InputError(f"{where}: the conversation starts with the assistant: drop that turn")
        before, _ = self._render(messages[:turn], tools, where, add_generation_prompt=True)
        is_last = turn + 1 == len(messages)
        upto = whole if is_last else self._render(messages[: turn + 1], tools, where)[0]
        if not (whole.startswith(upto) and upto.startswith(before)):
            raise InputError(
                f"{where}: the chat template does not leave the text up to message {turn + 1} as "
                "it is when more follows, so replies cannot be told apart: mark them in the "
                "template with {% generation %}, or give each reply a row of its own"
            )
        return len(before), len(upto)

    def _tokens(self, whole: str, where: str) -> tuple[Any, NDArray[np.int32]]:
        check_encodable(whole, where)
        with tokenising(where):
            encoded = self._tokenizer(
                whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        return encoded, token_ids(encoded["input_ids"], self._vocab_size, where)

    def _render(
        self, messages: list[Message], tools: list[Any] | None, where: str, **options: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where in it the template marks replies."""
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self._tokenizer
        template = tokenizer.get_chat_template(tools=tools)
        options = {**tokenizer.special_tokens_map, **options}
        try:
            with bounded(_SECONDS, _NUM_BYTES):
                (text,), marked = render_jinja_template(
                    [messages], tools=tools, chat_template=template, **options
                )
        except Exception as error:  # templates raise their own, and trip over what they get
            reason = first_line(error)
            raise InputError(f"{where}: the chat template refuses the row: {reason}") from error
        if len(text) > _LONGEST:
            raise InputError(
                f"{where}: the chat template makes {len(text):,} characters of the row: check it"
            )
        return text, [span for spans in marked for span in spans]


def _messages(row: Row, where: str) -> list[Message]:
    if "messages" not in row:
        raise InputError(f"{where}: no field 'messages': its fields are {listed(row)}")
    messages = row["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError(f"{where}: 'messages' must be a non-empty list of objects")
    return [_message(m, f"{where}: message {i}") for i, m in enumerate(messages, start=1)]


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InputError(f"{where} must be an object, not {type(message).__name__}")
    # Tables fill absent keys with null.
    kept = {key: value for key, value in message.items() if value is not None}
    if not isinstance(kept.get("role"), str):
        raise InputError(f"{where} has no 'role' (system, user, assistant or tool)")
    if "content" not in kept and not kept.get("tool_calls"):
        raise InputError(f"{where} has no 'content'")
    if "content" in kept:
        kept["content"] = _content(kept["content"], where)
    return kept


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else []
    texts = [p.get("text") for p in parts if isinstance(p, Mapping)]
    if not parts or len(texts) != len(parts) or not all(isinstance(t, str) for t in texts):
        raise InputError(f"{where}: 'content' must be a string (or a list of text parts)")
    return "".join(map(str, texts))


def _tools(row: Row, where: str) -> list[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str):  # tables keep them as JSON, as each tool has another shape
        try:
            tools = json.loads(tools) if tools else None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: 'tools' is not JSON: write it as a list") from error
    if tools is not None and not isinstance(tools, list):
        raise InputError(f"{where}: 'tools' must be a list of objects")
    return tools or None
