"""Conversations as tokens through the tokenizer's chat template; only replies are to predict.

Where the template marks its replies with `{% generation %}`, these marks decide, else `replies`
finds them. The end-of-turn token belongs to the reply; white space which the template writes after
that does not.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.data.conversation import ROLES, Conversation
from megatrain.data.examples import Found
from megatrain.data.refused_fields import OF_CALLS, empty
from megatrain.data.reply_spans import ReplySpans
from megatrain.data.template import REASONING, SAID, Template
from megatrain.data.text import Document
from megatrain.data.tokenizer import (
    added_ids,
    check_fast,
    first_token,
    placed_tokens,
    token_ids,
)
from megatrain.errors import InputError

_NO_PLACE = "use a template that has, or leave it out"


class ChatEncoder:
    """Tokenises conversations with the chat template.

    Raises:
        InputError: the tokenizer has no chat template, or cannot say where a token came from.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None) -> None:
        self._template = Template(tokenizer)
        check_fast(tokenizer)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._added = added_ids(tokenizer)
        self._names = [str(token) for token in tokenizer.added_tokens_decoder.values()]

    def conversation(self, found: Found) -> Document:
        """The conversation as a document; one without a reply to learn has no tokens.

        Raises:
            InputError: the template refuses it, or has no place for what it says.
        """
        assert isinstance(found.example, Conversation)
        ids, targets = self._encode(found.example, found.where)
        return Document(found.source, found.number, ids, targets)

    def unread(self, talk: Conversation) -> list[str]:
        """Fields of messages that the template does not name."""
        names = dict.fromkeys(n for m in talk.messages for n, v in m.items() if not empty(v))
        said = ("role", *SAID)
        return [n for n in names if n not in said and not self._template.has_place(talk, n)]

    def _encode(
        self, talk: Conversation, where: str
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        refuse_unplaced(talk, self._template, where)
        if not any(talk.learnt):
            return np.zeros(0, np.int32), np.zeros(0, bool)
        replies = ReplySpans(self._template, self._names, talk, where)
        whole = replies.text
        unchecked, offsets = placed_tokens(self._tokenizer, whole, where)
        ids = token_ids(unchecked, self._vocab_size, where)
        starts = offsets[:, 0]
        marked, targets = np.zeros((2, len(ids)), bool)
        for begin, end in replies.marks:
            first = first_token(whole, offsets, ids, self._added, begin)
            marked[first : np.searchsorted(starts, end)] = True
        if self._template.is_marked(talk) and _all_learnt(talk):
            return ids, marked
        for turn in np.flatnonzero(talk.learnt).tolist():
            for begin, end in replies.spans(turn):
                first = first_token(whole, offsets, ids, self._added, begin)
                # What follows the closing special token is white space between two turns.
                visible = begin + len(whole[begin:end].rstrip())
                last, closing = np.searchsorted(starts, (end, visible))
                closed = closing > first and int(ids[closing - 1]) in self._added
                targets[first : closing if closed else last] = True
        return ids, targets & marked if self._template.is_marked(talk) else targets


def _all_learnt(talk: Conversation) -> bool:
    replies = [m["role"] == "assistant" for m in talk.messages]
    return talk.learnt == replies


def refuse_unplaced(talk: Conversation, template: Template, where: str) -> None:
    """Raises InputError: the template would leave out what the conversation has."""
    if talk.tools and not template.has_place(talk, "tools"):
        raise InputError(f"{where}: the chat template has no place for 'tools': {_NO_PLACE}")
    for turn, message in enumerate(talk.messages, start=1):
        role = message["role"]
        if role not in ROLES and not (role and template.has_place(talk, role)):
            known = ", ".join(ROLES)
            raise InputError(
                f"{where}: message {turn}: role {role!r:.40} is none of these: {known}"
            )
        for name, remedy in OF_CALLS.items():
            if not (empty(message.get(name)) or template.heeds(talk, turn - 1, name, where)):
                raise InputError(
                    f"{where}: message {turn}: the chat template does not read {name!r}: {remedy}"
                )
        for name in ("tool_calls", *REASONING):
            if not message.get(name):
                continue
            if (name in REASONING and not template.reasoning(talk, message)) or (
                name not in REASONING and not template.has_place(talk, name)
            ):
                raise InputError(
                    f"{where}: message {turn}: the chat template has no place for {name!r}: "
                    + _NO_PLACE
                )
