"""Finds the replies of a conversation in its text.

A template may write a turn differently when more turns follow: without its reasoning, with another
end, with the tools elsewhere. A reply is therefore found by signs: a unique character after each
message's content shows where the content ends in the whole text. A reply begins after the header
that the template's generation prompt writes, and ends with the tokens that end a turn. A *request*
is the text of all messages before a reply, with the generation prompt.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from megatrain.data.conversation import Conversation, Message
from megatrain.data.template import HEADERS, REASONING, SAID, Template
from megatrain.errors import InputError

_PRIVATE = range(0xE000, 0xF900)  # Unicode's private use area
TextRange = tuple[int, int]


class ReplySpans:
    """The text of one conversation, and its replies.

    Args: `tokens`: the tokenizer's added tokens, which include those that end turns.

    Raises InputError: the template refuses the conversation, or leaves out a message's text.
    """

    def __init__(
        self, template: Template, tokens: Sequence[str], talk: Conversation, where: str
    ) -> None:
        self._template, self._added_tokens = template, tokens
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        token = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._one_token, self._token_run = re.compile(token), re.compile(f"(?:{token})+")
        self._borders = re.compile(f"{token}|\\s")
        self._talk, self._where = talk, where
        marked = template.is_marked(talk)
        self.text, self.marks = template.render(
            talk, where, add_generation_prompt=False, return_assistant_tokens_mask=marked
        )
        used_chars = {*self.text, *template.source(talk)}
        signs = (chr(code) for code in _PRIVATE if chr(code) not in used_chars)
        # Each message with the sign of its content, and that of its calls; "" if none is left.
        self._signs = [(message, next(signs, ""), next(signs, "")) for message in talk.messages]
        all_signs = "".join(sign for _, *pair in self._signs for sign in pair)
        self._any_sign = re.compile(f"[{all_signs}]")
        self._rendered: dict[tuple[int, bool], str] = {}
        self._refuse_left_out()
        if tool_names(talk):
            self._refuse_tools_left_out()

    def span(self, turn: int) -> TextRange:
        """The place of the reply `messages[turn]` in the text, with its end-of-turn tokens."""
        if turn == 0:
            raise InputError(f"{self._where}: the conversation begins with a reply: drop it")
        request = self._render(turn, asking=True)
        if span := self._by_headers(turn, request):
            return span
        span = self._by_prefixes(turn, request) or self._by_signs(turn, request)
        if span is not None:
            span = self._after_header(turn, request, *span), span[1]
        if span is None or self._opens_another(turn, request, *span):
            if not any(self._talk.messages[turn].get(n) for n in SAID):
                raise InputError(
                    f"{self._where}: the chat template has no place for the empty reply in message "
                    f"{turn + 1}: drop it, or give it a weight of 0"
                )
            raise InputError(
                f"{self._where}: the chat template changes the text up to message {turn + 1} when "
                "more messages follow, so replies cannot be told apart: mark replies in the "
                "template with {% generation %}, or give each reply a separate row"
            )
        begin, end = span
        words = words_of_calls(self._talk.messages[turn])
        if any(word not in self.text[begin:end] for word in words):
            raise self._left_out_error(turn)
        return begin, self._with_end_tokens(turn, begin, self._first_tokens_end(turn, begin, end))

    def _first_tokens_end(self, turn: int, begin: int, end: int) -> int:
        """The end of the first added tokens after a reply's content in text[begin:end], if any."""
        content = self._content_range(turn, begin, end)
        if content is None or "tool_calls" in self._talk.messages[turn]:
            return end
        tokens = self._token_run.search(self.text, content[1], end)
        return end if tokens is None else tokens.end()

    def _with_end_tokens(self, turn: int, begin: int, end: int) -> int:
        """The end of the reply text[begin:end] together with the end tokens that follow.

        Some templates have no end tokens (GLM): the first token of the next message's header ends
        the reply. Others write end tokens only before a question: these are the tokens between the
        reply and the question's header.
        """
        later = self._talk.messages[turn + 1 :]
        next_role = later[0]["role"] if later else None
        num_header_tokens, headers_end = self._template.header(self._talk, self._one_token)
        if headers_end and next_role not in (None, "assistant"):
            header = self._one_token.match(self.text, self._past_space(end))
            return end if header is None else header.end()
        stop = begin + len(self.text[begin:end].rstrip())
        has_end = any(t.end() == stop for t in self._one_token.finditer(self.text, begin, stop))
        question = None if has_end or next_role != "user" else self._content_start(turn + 1)
        if question is None:
            return end
        tokens = self._one_token.findall(self.text, end, question)
        return self._past_tokens(tokens[: len(tokens) - num_header_tokens], end)

    def _content_start(self, turn: int) -> int | None:
        """The place where a message's content begins in the text, if it can be found."""
        content = self._talk.messages[turn].get("content", "").strip()
        start = self._message_ends.get(turn, -1) - len(content)
        return start if start >= 0 and self.text.startswith(content, start) else None

    def _content_range(self, turn: int, begin: int, end: int) -> TextRange | None:
        """The place of a message's content in text[begin:end], unless it is part of a token."""
        content = self._talk.messages[turn].get("content", "").strip()
        start = self._content_start(turn)
        if content and (start is None or not begin <= start <= end - len(content)):
            tokens = [token.span() for token in self._one_token.finditer(self.text, begin, end)]
            start = self.text.rfind(content, begin, end)
            # The content "user" is also in the token "<|user|>", for example.
            while any(first <= start and start + len(content) <= last for first, last in tokens):
                start = self.text.rfind(content, begin, start + len(content) - 1)
        if start is None or not begin <= start <= end - len(content):
            return None
        return start, start + len(content)

    def _render(self, num_messages: int, *, asking: bool = False) -> str:
        """The text of the first messages; `asking`: with the template's generation prompt."""
        key = (num_messages, asking)
        if key not in self._rendered:
            talk = self._talk.upto(num_messages)
            text = self._template.render(talk, self._where, add_generation_prompt=asking).text
            self._rendered[key] = text
        return self._rendered[key]

    def _by_headers(self, turn: int, request: str) -> TextRange | None:
        """The reply's place, found by a family's known header and end."""
        header = next((known for known in HEADERS if known in request), None)
        if header is None:
            return None
        pattern = f"{re.escape(header)}(.*?(?:{HEADERS[header]}))"
        spans = [match.span(1) for match in re.finditer(pattern, self.text, re.DOTALL)]
        roles = [message["role"] for message in self._talk.messages]
        if len(spans) != roles.count("assistant"):
            return None
        begin, end = spans[roles[:turn].count("assistant")]
        after_header = request.rpartition(header)[2]  # the request may be longer
        begin += self._num_equal_to_border(after_header, begin)
        follows = begin >= self._message_ends.get(turn - 1, 0)  # not a header quoted in a message
        return (begin, end) if follows and self._has_only(turn, begin, end) else None

    def _by_prefixes(self, turn: int, request: str) -> TextRange | None:
        """The reply's place, if the texts without and with it both begin the whole text."""
        is_last = turn + 1 == len(self._talk.messages)
        with_reply = self.text if is_last else self._render(turn + 1)
        if not (self.text.startswith(with_reply) and with_reply.startswith(request)):
            return None
        return len(request), len(with_reply)

    def _opens_another(self, turn: int, request: str, begin: int, end: int) -> bool:
        """True if text[begin:end], found for a reply, includes the header of another turn.

        Replies with calls or reasoning are not checked: they have tokens of headers themselves.
        """
        message = self._talk.messages[turn]
        if any(message.get(name) for name in ("tool_calls", *REASONING)):
            return False
        content = self._content_range(turn, begin, end) if message["content"].strip() else None
        start, stop = content or (begin, begin)
        earlier, later = self.text[begin:start], self.text[stop:end]
        tokens_after = self._one_token.findall(later)
        if len(tokens_after) < 2 and not self._one_token.search(earlier):
            return False
        header_tokens = self._one_token.findall(self._header(turn, request))
        if header_tokens:
            return header_tokens[0] in earlier + later
        return len(tokens_after) > 1 and tokens_after[-1:] == self._one_token.findall(request)[-1:]

    def _after_header(self, turn: int, request: str, begin: int, end: int) -> int:
        """`begin`, or a later place in text[begin:end]: after a header that the request lacks."""
        first = next(i for i, m in enumerate(self._talk.messages) if i and m["role"] == "assistant")
        header = self._header(first, self._render(first, asking=True))
        in_request = header.strip() in self._header(turn, request)
        if in_request and self.text.startswith(request):
            return begin
        content = self._content_start(turn)
        previous_end = self._message_ends.get(turn - 1, begin)
        start, stop = self._find_header(header, previous_end, end if content is None else content)
        return begin if in_request and self.text[begin:start].strip() else max(begin, stop)

    def _find_header(self, header: str, begin: int, end: int) -> TextRange:
        """The place of a header in text[begin:end], whatever its white space; (-1, -1): none."""
        words = r"\s*".join(map(re.escape, header.split())) or r"(?!)"
        match = re.compile(words).search(self.text, begin, end)
        if match is None:
            return -1, -1
        space_after = header[len(header.rstrip()) :]
        return match.start(), match.end() + self._num_equal(space_after, match.end())

    def _header(self, turn: int, request: str) -> str:
        """The header of a reply: the text that `request` adds, or puts in place of an end token."""
        before = self._render(turn)
        follows_a_reply = self._talk.messages[turn - 1]["role"] == "assistant"
        if not request.startswith(before) and not follows_a_reply:
            before = before.rstrip()
            ends = (token for token in self._added_tokens if token and before.endswith(token))
            before = before.removesuffix(max(ends, key=len, default=""))
        return request[len(before) :] if request.startswith(before) else ""

    def _by_signs(self, turn: int, request: str) -> TextRange | None:
        """The reply's place, found by the text around it when it is the last message."""
        places = self._message_ends
        start_sign = self._find_ends(turn, request, asking=True).get(turn - 1)
        with_reply = self._render(turn + 1)
        end_sign = self._find_ends(turn + 1, with_reply).get(turn)
        if start_sign is None or end_sign is None or not {turn - 1, turn} <= places.keys():
            return None
        header = self._header(turn, request)
        begin = self._begin(request[start_sign:], header, places[turn - 1], places[turn])
        end_tokens = self._one_token.findall(request[start_sign : len(request) - len(header)])
        end = self._end(with_reply[end_sign:], end_tokens, places[turn], turn)
        messages = self._talk.messages
        if begin is None and messages[turn - 1]["role"] == "tool":  # the reply continues its turn
            content = messages[turn].get("content", "").rstrip()
            start = places[turn] - len(content)
            if content and "tool_calls" not in messages[turn]:
                begin = start if self.text.startswith(content, start) else None
        if begin is None or not self._has_only(turn, begin, end):
            return None
        return begin, end

    def _begin(self, query: str, header: str, place: int, end: int) -> int | None:
        """The beginning of the reply in text[place:end], after `query` that ends with `header`."""
        common = self._num_equal_to_border(query, place)
        if header:
            has_header = common > len(query) - len(header)
        else:
            has_header = self._one_token.search(query, common) is None
        if has_header:
            return place + common
        opening = self._one_token.match(header.lstrip())
        start = -1 if opening is None else self.text.find(opening.group(), place, end)
        if start >= 0:
            return start + self._num_equal_to_border(header.lstrip(), start)
        start, stop = self._find_header(header, place, end)
        return None if start < 0 or self.text[place:start].strip() else stop

    def _end(self, closing: str, end_tokens: list[str], place: int, turn: int) -> int:
        """The end of the tokens from `place` on that end the turn, which begin as `closing` does.

        `closing` follows a last reply's content; `end_tokens` end the message before the reply.
        """
        length = self._num_equal(closing, place)
        first = self._token_run.search(closing)
        if "tool_calls" not in self._talk.messages[turn] and first and first.end() <= length:
            return place + first.end()
        for token in self._token_run.finditer(closing):
            if token.start() <= length < token.end():
                tokens = self._one_token.findall(token.group())
                place = self._past_tokens(tokens, place + token.start())
                end_token = next((t for t in end_tokens if self.text.startswith(t, place)), "")
                return place + len(end_token)
        return place + self._num_equal_to_border(closing, place)

    def _past_tokens(self, tokens: list[str], place: int) -> int:
        """The end of the tokens that follow `place` one by one, with white space between them."""
        for token in tokens:
            start = self._past_space(place)
            if not self.text.startswith(token, start):
                break
            place = start + len(token)
        return place

    def _past_space(self, place: int) -> int:
        return len(self.text) - len(self.text[place:].lstrip())

    def _num_equal(self, expected: str, place: int) -> int:
        """The number of characters from `place` on that equal the first ones of `expected`."""
        actual = self.text[place : place + len(expected)]
        pairs = enumerate(zip(expected, actual, strict=False))
        return next((i for i, (a, b) in pairs if a != b), len(actual))

    def _num_equal_to_border(self, expected: str, place: int) -> int:
        """As `_num_equal`; if not all are equal, only up to the last end of a token or a space."""
        length = self._num_equal(expected, place)
        if length == len(expected):
            return length
        return max((m.end() for m in self._borders.finditer(expected, 0, length)), default=0)

    def _has_only(self, turn: int, begin: int, end: int) -> bool:
        """True if text[begin:end] has all of this message, and the end of no other message."""
        message = self._talk.messages[turn]
        answer = message.get("content", "").split("</think>")[-1].strip()
        if any(n != turn and begin < place < end for n, place in self._message_ends.items()):
            return False
        return all(part in self.text[begin:end] for part in (*words_of_calls(message), answer))

    @cached_property
    def _message_ends(self) -> Mapping[int, int]:
        return self._find_ends(len(self._talk.messages), self.text)

    def _find_ends(
        self, num_messages: int, text: str, *, asking: bool = False
    ) -> Mapping[int, int]:
        """Message -> its end in `text`, without messages whose sign the template does not write."""
        for empty in (True, False):  # a sign may change how a template writes an empty content
            signed_text = self._signed_text(num_messages, asking=asking, empty=empty)
            if self._any_sign.sub("", signed_text) == text:
                break
        else:
            return {}
        ends: dict[int, int] = {}
        places: dict[str, list[int]] = {}
        for num_before, sign in enumerate(self._any_sign.finditer(signed_text)):
            places.setdefault(sign.group(), []).append(sign.start() - num_before)
        for turn, (message, content_sign, calls_sign) in enumerate(self._signs[:num_messages]):
            calls = "tool_calls" in message  # templates repeat the calls' names with their results
            ends_of_message = places.get(calls_sign if calls else content_sign, [])
            if len(ends_of_message) == 1 or (calls and ends_of_message):
                ends[turn] = ends_of_message[0]
        return ends

    def _signed_text(self, num_messages: int, *, asking: bool = False, empty: bool = False) -> str:
        """The template's text of the first messages with their signs (`with_signs`).

        `empty`: also in empty contents.
        """
        signed = [with_signs(*signs, empty=empty) for signs in self._signs[:num_messages]]
        talk = self._talk.upto(num_messages)._replace(messages=signed)
        return self._template.render(talk, self._where, add_generation_prompt=asking).text

    def _refuse_tools_left_out(self) -> None:
        """Raises InputError: the text does not describe a tool."""
        names = tool_names(self._talk)
        ending = "z"
        while any(name + ending in self.text for name in names):
            ending += "z"
        talk = with_names_ending(self._talk, ending)
        text = self._template.render(talk, self._where, add_generation_prompt=False).text
        if any(name + ending not in text for name in names):
            raise InputError(
                f"{self._where}: the chat template leaves out 'tools' in this conversation: add "
                "a system message, which some templates need, use another template, or drop 'tools'"
            )

    def _refuse_left_out(self) -> None:
        """Raises InputError: a message's content is not in the text, even in another notation."""
        messages = self._talk.messages
        contents = [message.get("content", "").strip() for message in messages]
        is_missing = [content not in self.text for content in contents]
        signed_text = self._signed_text(len(messages)) if any(is_missing) else ""
        inline_reasoning = contents[-1].rpartition("</think>")[0].removeprefix("<think>")
        reasoning = next(filter(None, map(messages[-1].get, REASONING)), inline_reasoning).strip()
        for turn, (message, content_sign, _) in enumerate(self._signs):
            words = [*words_of_calls(message), *([reasoning] if message is messages[-1] else [])]
            is_written = not is_missing[turn] or (content_sign and content_sign in signed_text)
            if not is_written or any(word not in self.text for word in words):
                raise self._left_out_error(turn)

    def _left_out_error(self, turn: int) -> InputError:
        return InputError(
            f"{self._where}: the chat template leaves out message {turn + 1}, or a part of it: use "
            "a template that writes the whole message, or drop the message"
        )


_WORD = re.compile(r"[A-Za-z0-9]+")  # characters that no notation of strings escapes


def tool_names(talk: Conversation) -> list[str]:
    """The names of a conversation's tools."""
    return [name for tool in talk.tools or () if (name := _function(tool).get("name"))]


def with_names_ending(talk: Conversation, ending: str) -> Conversation:
    """The same conversation with `ending` after the names of all its tools."""
    tools: list[Any] = []
    for tool in talk.tools or ():
        function = _function(tool)
        renamed = {**function, "name": f"{function.get('name')}{ending}"}
        tools.append({**tool, "function": renamed} if "function" in tool else renamed)
    return talk._replace(tools=tools)


def _function(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return function if isinstance(function, Mapping) else {}


def words_of_calls(message: Message) -> list[str]:
    """The functions' names, and the words of their arguments, in a message's tool calls."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    values = [value for function in functions for value in function["arguments"].values()]
    words = [word for value in values if isinstance(value, str) for word in _WORD.findall(value)]
    return [*(function["name"] for function in functions), *words]


def with_signs(message: Message, content_sign: str, calls_sign: str, *, empty: bool) -> Message:
    """A message with one sign after its content, and the other after its last call's name."""
    signed = dict(message)
    text = message.get("content", "").rstrip()
    if text or (empty and "content" in message and "tool_calls" not in message):
        signed["content"] = text + content_sign + message["content"][len(text) :]
    if "tool_calls" in message:
        *earlier, last = message["tool_calls"]
        function = {**last["function"], "name": last["function"]["name"] + calls_sign}
        signed["tool_calls"] = [*earlier, {**last, "function": function}]
    return signed
