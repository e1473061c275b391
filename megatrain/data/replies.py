"""Where in the text of a conversation its replies stand.

A template may write a turn otherwise when more turns follow: without its reasoning, with another
end, with the tools elsewhere. So replies are found by signs: a character that occurs nowhere else
is put at the end of what each message says, and shows where that has come to in the whole text. A
reply begins after what stands between the message before it and the place where the template asks
for a reply, and ends with what the template writes to end it.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from megatrain.data.conversation import Conversation, Message
from megatrain.data.template import REASONING, Template
from megatrain.errors import InputError

_PRIVATE = range(0xE000, 0xF900)  # characters that Unicode leaves to private use
Span = tuple[int, int]


class Replies:
    """The text of one conversation, and its replies.

    Args:
        tokens: the tokenizer's added tokens, among which are those that end turns.

    Raises:
        InputError: the template refuses the conversation, or leaves out what a message says.
    """

    def __init__(
        self, template: Template, tokens: Sequence[str], talk: Conversation, where: str
    ) -> None:
        self._template = template
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        token = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._token, self._tokens = re.compile(token), re.compile(f"(?:{token})+")
        self._borders = re.compile(f"{token}|\\s")
        self._talk = talk
        self._where = where
        marked = template.is_marked(talk)
        self.text, self.marks = template.render(
            talk, where, add_generation_prompt=False, return_assistant_tokens_mask=marked
        )
        used = {*self.text, *template.source(talk)}
        signs = (chr(code) for code in _PRIVATE if chr(code) not in used)
        self._signs = list(zip(talk.messages, signs, signs, strict=False))
        self._sign = re.compile(f"[{''.join(sign for _, *pair in self._signs for sign in pair)}]")
        self._texts: dict[tuple[int, bool], str] = {}
        if any(message.get("content", "").strip() not in self.text for message in talk.messages):
            self._refuse_left_out()

    def span(self, turn: int) -> Span:
        """Where the reply `messages[turn]` begins and ends, with its end of turn.

        Raises:
            InputError: it cannot be told.
        """
        if turn == 0:
            raise InputError(
                f"{self._where}: the conversation starts with the assistant: drop that turn"
            )
        asked = self._render(turn, asking=True)
        found = self._by_prefixes(turn, asked) or self._by_signs(turn, asked)
        if found is None or self._opens_another(turn, asked, *found):
            raise InputError(
                f"{self._where}: the chat template writes the text up to message {turn + 1} "
                "otherwise when more follows, so replies cannot be told apart: mark them in the "
                "template with {% generation %}, or give each reply a row of its own"
            )
        return found[0], self._closed(turn, *found)

    def _closed(self, turn: int, begin: int, end: int) -> int:
        """After the first tokens behind what a reply says: templates may end the text once more."""
        content = self._talk.messages[turn].get("content", "").strip()
        said = self.text.rfind(content, begin, end)
        if not content or said < 0 or "tool_calls" in self._talk.messages[turn]:
            return end
        tokens = self._tokens.search(self.text, said + len(content), end)
        return end if tokens is None else tokens.end()

    def _render(self, num_messages: int, *, asking: bool = False) -> str:
        """The text of the first messages, and of what asks for a reply to them."""
        key = (num_messages, asking)
        if key not in self._texts:
            talk = self._talk.upto(num_messages)
            text, _ = self._template.render(talk, self._where, add_generation_prompt=asking)
            self._texts[key] = text
        return self._texts[key]

    def _by_prefixes(self, turn: int, asked: str) -> Span | None:
        """What a reply adds to the text, where that is the beginning of the whole text."""
        is_last = turn + 1 == len(self._talk.messages)
        upto = self.text if is_last else self._render(turn + 1)
        if not (self.text.startswith(upto) and upto.startswith(asked)):
            return None
        return len(asked), len(upto)

    def _opens_another(self, turn: int, asked: str, begin: int, end: int) -> bool:
        """Whether what begins a turn is part of a reply that neither calls nor reasons."""
        message = self._talk.messages[turn]
        if any(message.get(name) for name in ("tool_calls", *REASONING)):
            return False
        introduction, _, conclusion = self.text[begin:end].rpartition(message["content"].strip())
        closing = self._token.findall(conclusion)
        if len(closing) < 2 and not self._token.search(introduction):
            return False
        header = self._token.findall(self._header(turn, asked))
        if header:
            return header[0] in introduction + conclusion
        return len(closing) > 1 and closing[-1:] == self._token.findall(asked)[-1:]

    def _header(self, turn: int, asked: str) -> str:
        """What the template writes to ask for a reply."""
        unasked = self._render(turn)
        return asked[len(unasked) :] if asked.startswith(unasked) else ""

    def _by_signs(self, turn: int, asked: str) -> Span | None:
        """By what stands around the reply where it is the last message."""
        places = self._places
        before = self._find(turn, asked, asking=True).get(turn - 1)
        upto = self._render(turn + 1)
        after = self._find(turn + 1, upto).get(turn)
        if before is None or after is None or not {turn - 1, turn} <= places.keys():
            return None
        header = self._header(turn, asked)
        begin = self._begin(asked[before:], header, places[turn - 1], places[turn])
        closings = self._token.findall(asked[before : len(asked) - len(header)])
        end = self._end(upto[after:], closings, places[turn], turn)
        if begin is None or not self._says(turn, begin, end):
            return None
        return begin, end

    def _begin(self, asked: str, header: str, place: int, end: int) -> int | None:
        """After as much as there is of `asked`, which ends with `header`, in text[place:end]."""
        common = self._common(asked, place)
        reached = common > len(asked) - len(header)  # into what asks for a reply
        if reached if header else self._token.search(asked, common) is None:
            return place + common
        opening = self._token.match(header.lstrip())
        start = -1 if opening is None else self.text.find(opening.group(), place, end)
        return None if start < 0 else start + self._common(header.lstrip(), start)

    def _end(self, closing: str, closings: list[str], place: int, turn: int) -> int:
        """After the tokens that end the turn, where `closing` follows the reply at its end.

        `closings`: tokens that end other turns, which may end this one where more follows.
        """
        same = self._same(closing, place)
        first = self._tokens.search(closing)
        if "tool_calls" not in self._talk.messages[turn] and first and first.end() <= same:
            return place + first.end()
        for token in self._tokens.finditer(closing):
            if token.start() <= same < token.end():
                place += token.start()
                other = next((t for t in closings if self.text.startswith(t, place)), "")
                return place + len(other)
        return place + self._common(closing, place)

    def _same(self, expected: str, place: int) -> int:
        found = self.text[place : place + len(expected)]
        pairs = enumerate(zip(expected, found, strict=False))
        return next((i for i, (a, b) in pairs if a != b), len(found))

    def _common(self, expected: str, place: int) -> int:
        """How much of `expected` is at `place`: all, or up to the end of a token or of a space."""
        same = self._same(expected, place)
        if same == len(expected):
            return same
        return max((m.end() for m in self._borders.finditer(expected, 0, same)), default=0)

    def _says(self, turn: int, begin: int, end: int) -> bool:
        message, text = self._talk.messages[turn], self.text[begin:end]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        said = [function["name"] for function in functions]
        values = [value for function in functions for value in function["arguments"].values()]
        said += [value for value in values if isinstance(value, str) and value.isalnum()]
        if message.get("content"):
            said.append(message["content"].split("</think>")[-1].strip())
        return all(each in text for each in said)

    @cached_property
    def _places(self) -> Mapping[int, int]:
        return self._find(len(self._talk.messages), self.text)

    def _find(self, num_messages: int, text: str, *, asking: bool = False) -> Mapping[int, int]:
        """Where the messages end in `text`; those for which signs do not show it are left out."""
        shown = self._shown(num_messages, asking=asking)
        if self._sign.sub("", shown) != text:
            return {}
        ends: dict[int, int] = {}
        places: dict[str, list[int]] = {}
        for before, sign in enumerate(self._sign.finditer(shown)):
            places.setdefault(sign.group(), []).append(sign.start() - before)
        for turn, (message, of_content, of_calls) in enumerate(self._signs[:num_messages]):
            calls = "tool_calls" in message  # whose names a template repeats with their results
            found = places.get(of_calls if calls else of_content, [])
            if len(found) == 1 or (calls and found):
                ends[turn] = found[0]
        return ends

    def _shown(self, num_messages: int, *, asking: bool = False) -> str:
        """The text of the first messages with their signs."""
        talk = self._talk.upto(num_messages)
        signed = [_signed(*each) for each in self._signs[:num_messages]]
        talk = talk._replace(messages=[*signed, *talk.messages[len(signed) :]])
        return self._template.render(talk, self._where, add_generation_prompt=asking)[0]

    def _refuse_left_out(self) -> None:
        """Raises InputError: a message is nowhere in the text, however it is written there."""
        shown = self._shown(len(self._talk.messages))
        for turn, (message, sign, _) in enumerate(self._signs, start=1):
            content = message.get("content", "").strip()
            if content not in self.text and sign not in shown:
                raise InputError(
                    f"{self._where}: the chat template leaves out message {turn}: use one that has "
                    "a place for it, or drop the message"
                )


def _signed(message: Message, of_content: str, of_calls: str) -> Message:
    """With one sign at the end of the content, and the other after the name of the last call."""
    made = dict(message)
    if text := message.get("content", "").rstrip():
        made["content"] = text + of_content + message["content"][len(text) :]
    if "tool_calls" in message:
        *others, last = message["tool_calls"]
        function = {**last["function"], "name": last["function"]["name"] + of_calls}
        made["tool_calls"] = [*others, {**last, "function": function}]
    return made
