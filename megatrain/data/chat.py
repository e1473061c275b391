"""Conversations as tokens through the tokenizer's chat template; only replies are to predict.

Where the template marks its replies with `{% generation %}`, these marks decide. Otherwise a reply
is what the template adds between the conversation before it (with the prompt that asks for a reply)
and the conversation with it: both must be the beginning of the whole text. Its end-of-turn token
belongs to the reply; white space which the template writes after that does not.
"""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.data.bounded import bounded
from megatrain.data.conversation import ROLES, Conversation
from megatrain.data.examples import Found
from megatrain.data.text import Document
from megatrain.data.tokenizer import check_encodable, token_ids, tokenising
from megatrain.errors import InputError, first_line
from megatrain.units import GIB

# What a template may take for a row. One of 200,000 short messages took 0.6 seconds.
_SECONDS, _NUM_BYTES = 20.0, GIB
_LONGEST = 64 << 20  # characters, twice what a row may have; tokenising takes 50 times as much
_SPOKEN = ("tool_calls", "reasoning_content", "reasoning", "thinking")
_NO_PLACE = "use a template that has, or leave it out"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatEncoder:
    """Tokenises conversations with the chat template.

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

    def conversation(self, found: Found) -> Document:
        """The conversation as a document; one without a reply to learn has no tokens.

        Raises:
            InputError: the template refuses it, or has no place for what it says.
        """
        assert isinstance(found.example, Conversation)
        ids, targets = self._encode(found.example, found.where)
        return Document(found.source, found.number, ids, targets)

    def _encode(
        self, talk: Conversation, where: str
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        template = self._tokenizer.get_chat_template(tools=talk.tools)
        _refuse_unplaced(talk, template, where)
        if not any(talk.learnt):
            return np.zeros(0, np.int32), np.zeros(0, bool)
        if not _MARKS.search(template):
            return self._by_prefixes(talk, where)
        ids, targets = self._by_marks(talk, where)
        if any(
            m["role"] == "assistant" and not learnt for m, learnt in zip(*talk[:2], strict=True)
        ):
            targets &= self._by_prefixes(talk, where)[1]
        return ids, targets

    def _by_marks(
        self, talk: Conversation, where: str
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        whole, marked = self._render(talk, where, return_assistant_tokens_mask=True)
        encoded, ids = self._tokens(whole, where)
        targets = np.zeros(len(ids), bool)
        for begin, end in marked:
            first, last = encoded.char_to_token(begin), encoded.char_to_token(end - 1)
            if first is not None:
                targets[first : None if last is None else last + 1] = True
        return ids, targets

    def _by_prefixes(
        self, talk: Conversation, where: str
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        whole, _ = self._render(talk, where)
        encoded, ids = self._tokens(whole, where)
        starts = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)[:, 0]
        targets = np.zeros(len(ids), bool)
        for turn, learnt in enumerate(talk.learnt):
            if learnt:
                begin, end = self._span(whole, talk, turn, where)
                first, last = np.searchsorted(starts, (begin, end))
                # What follows the closing special token is white space between two turns.
                closing = np.searchsorted(starts, len(whole[:end].rstrip()))
                if closing > first and int(ids[closing - 1]) in self._added:
                    last = closing
                targets[first:last] = True
        return ids, targets

    def _span(self, whole: str, talk: Conversation, turn: int, where: str) -> tuple[int, int]:
        """Where in the whole text the reply `messages[turn]` begins and ends."""
        if turn == 0:
            raise InputError(f"{where}: the conversation starts with the assistant: drop that turn")
        before, _ = self._render(talk.upto(turn), where, add_generation_prompt=True)
        is_last = turn + 1 == len(talk.messages)
        upto = whole if is_last else self._render(talk.upto(turn + 1), where)[0]
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
        self, talk: Conversation, where: str, **options: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where in it the template marks replies."""
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self._tokenizer
        template = tokenizer.get_chat_template(tools=talk.tools)
        options = {**tokenizer.special_tokens_map, **talk.options, **options}
        try:
            with bounded(_SECONDS, _NUM_BYTES):
                (text,), marked = render_jinja_template(
                    [talk.messages], tools=talk.tools, chat_template=template, **options
                )
        except Exception as error:  # templates raise their own, and trip over what they get
            reason = first_line(error)
            raise InputError(f"{where}: the chat template refuses the row: {reason}") from error
        if len(text) > _LONGEST:
            raise InputError(
                f"{where}: the chat template makes {len(text):,} characters of the row: check it"
            )
        return text, [span for spans in marked for span in spans]


def _refuse_unplaced(talk: Conversation, template: str, where: str) -> None:
    """Raises InputError: the template would leave out what the conversation has."""

    def has_place(name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", template) is not None

    if talk.tools and not has_place("tools"):
        raise InputError(f"{where}: the chat template has no place for 'tools': {_NO_PLACE}")
    for turn, message in enumerate(talk.messages, start=1):
        role = message["role"]
        if role not in ROLES and not (role and has_place(role)):
            known = ", ".join(ROLES)
            raise InputError(
                f"{where}: message {turn}: role {role!r:.40} is none of these: {known}"
            )
        for name in _SPOKEN:
            if message.get(name) and not has_place(name):
                raise InputError(
                    f"{where}: message {turn}: the chat template has no place for {name!r}: "
                    + _NO_PLACE
                )
