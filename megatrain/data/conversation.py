"""Reads messages in all usual formats, and checks roles, contents, and the replies to learn."""

import re
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

from megatrain.base.json_yaml import parse_json
from megatrain.data.images import PARTS, PLACES, MediumSource, source_of
from megatrain.data.refused_fields import empty, refuse_unheeded_of_message
from megatrain.errors import InputError, explained

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
# ShareGPT's and LLaMA-Factory's names of roles; some data have them in `role`, too.
SPEAKERS = {
    **{role: role for role in ROLES}, "human": "user", "gpt": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "function_call": "assistant", "observation": "tool",
    "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
# Types of content parts, and the message fields with the same meaning.
_TEXT_FIELDS = {
    "text": "content", "reasoning": "reasoning_content", "thinking": "reasoning_content",
    "tool_call": "tool_calls",
}  # fmt: skip

# The keys that are read of a content part with an image, a film or a sound.
_MEDIA_KEYS = ("type", "url", "path", "base64", "bytes", "data", "format", *PARTS)


class Conversation(NamedTuple):
    """Messages for a chat template, and its other inputs."""

    messages: list[Message]
    learnt: list[bool]  # for each message, True if it is a reply to learn
    tools: list[Any] | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    images: Sequence[Any] = ()  # for each mark of `PLACES` a MediumSource; once read, a Medium

    def upto(self, count: int) -> "Conversation":
        return self._replace(messages=self.messages[:count], learnt=self.learnt[:count])


def messages(
    value: object, name: str, where: str, *, images: bool = False
) -> tuple[list[Message], list[bool]]:
    """The messages in the field `name`, and for each one, True if it is a reply to learn.

    Args: `images`: contents may have images; a message then has their sources as `media`.
    """
    objects = _objects(value, name, where)
    checked = [_message(m, f"{where}: message {n}", images) for n, m in enumerate(objects, 1)]
    return [m for m, _ in checked], [learnt for _, learnt in checked]


def from_json(value: object, name: str, where: str) -> object:
    """A list or object, decoded if a table stores it as JSON; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    with explained(f"{where}: {name!r} is not JSON", "write it as a list", of=ValueError):
        return parse_json(value)


def _objects(value: object, name: str, where: str) -> Sequence[Any]:
    """A field's list. Raises InputError: the value is no list, or is empty."""
    value = from_json(value, name, where)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InputError(f"{where}: {name!r} must be a non-empty list of objects")
    return value


def tools(value: object, where: str, *, wrap: bool = False) -> list[Any] | None:
    """The tools of a row; `wrap` puts bare functions into OpenAI's form, as templates expect."""
    value = from_json(value, "tools", where)
    if empty(value):
        return None
    listed = [*_objects(value, "tools", where)]
    for index, tool in enumerate(listed):
        if wrap and isinstance(tool, dict) and "name" in tool and "function" not in tool:
            listed[index] = {"type": "function", "function": tool}
    return listed


def _message(message: object, where: str, images: bool) -> tuple[Message, bool]:
    """A checked message with `role` and `content`, and True if it is a reply to learn."""
    if not isinstance(message, Mapping):
        raise InputError(f"{where} must be an object, not {type(message).__name__}")
    # Tables fill absent keys with null.
    fields = {key: value for key, value in message.items() if value is not None}
    if "role" not in fields and isinstance(fields.get("from"), str):
        fields["role"] = fields.pop("from")
        if fields["role"] not in SPEAKERS:
            roles = ", ".join(SPEAKERS)
            raise InputError(f"{where}: 'from' is {fields['role']!r:.40}, none of these: {roles}")
        if "value" in fields and "content" in fields:
            raise InputError(f"{where} has both 'value' and 'content': keep one")
        if "value" in fields:
            fields["content"] = fields.pop("value")
    if not isinstance(fields.get("role"), str):
        raise InputError(f"{where} has no 'role' (system, user, assistant or tool)")
    if fields["role"] == "function_call" and "content" in fields:
        calls = from_json(fields.pop("content"), "value", where)
        fields["tool_calls"] = calls if isinstance(calls, list) else [calls]
    fields["role"] = SPEAKERS.get(fields["role"], fields["role"])
    learnt = _pop_learnt(fields, where)
    refuse_unheeded_of_message(fields, where)
    if isinstance(fields.get("content"), Sequence) and not isinstance(fields["content"], str):
        fields |= _from_parts(fields.pop("content"), fields, where, images)
    calls = from_json(fields.get("tool_calls"), "tool_calls", where)
    if empty(calls):
        fields.pop("tool_calls", None)
    elif fields["role"] != "assistant":
        raise InputError(f"{where}: 'tool_calls' of the role {fields['role']!r}: make it a reply")
    else:
        fields["tool_calls"] = [_call(call, where) for call in _objects(calls, "tool_calls", where)]
    may_lack_content = "tool_calls" in fields and "content" not in fields
    if not (may_lack_content or isinstance(fields.get("content"), str)):
        raise InputError(f"{where}: 'content' must be a string (or a list of text parts)")
    return fields, learnt


def _pop_learnt(message: Message, where: str) -> bool:
    """True if a message is a reply to learn; takes `weight` (OpenAI's) and `loss_weight` out."""
    is_learnt = message["role"] == "assistant"
    for name in ("weight", "loss_weight"):
        weight = message.pop(name, None)
        if weight is None:
            continue
        if not isinstance(weight, (int, float)) or weight not in (0, 1):
            raise InputError(f"{where}: {name!r} must be 0 or 1: round it, or leave it out")
        if weight and not is_learnt:
            raise InputError(f"{where}: {name!r} is 1, but this is no reply: leave it out")
        is_learnt = is_learnt and weight == 1
    return is_learnt


def _from_parts(parts: Sequence[object], message: Message, where: str, images: bool) -> Message:
    """The fields of a message with these content parts: text, media, reasoning, tool calls."""
    is_reply = message["role"] == "assistant"
    media: list[MediumSource] = []
    unread: Message = {}
    texts_of: dict[str, list[str]] = {"content": [], "reasoning_content": [], "tool_calls": []}
    for part in parts:
        entries = part if isinstance(part, Mapping) else {"type": type(part).__name__}
        kind = str(entries.get("type", "text"))
        name = _TEXT_FIELDS.get(kind) if is_reply or kind == "text" else None
        text = entries.get(kind, entries.get("value"))
        if images and not is_reply and kind in PARTS:
            medium = PARTS[kind]
            media.append(MediumSource(medium, source_of(entries, medium, where)))
            name = "content"
            text = PLACES[medium]  # this character marks the place of the medium
        if name is None or not isinstance(text, str):
            raise InputError(
                f"{where}: 'content' must be a string or a list of parts of text (and of images, "
                f"films and sounds, not in replies): it has a part that is not read: {kind!r:.40}"
            )
        if name in message:
            raise InputError(f"{where}: {name!r} is also in a part of 'content': keep one")
        texts_of[name].append(text)
        read_keys = _MEDIA_KEYS if kind in PARTS else ("type", kind, "value")
        inner = entries.get(kind)  # OpenAI's parts have their keys one level deeper
        for key, value in {**entries, **(inner if isinstance(inner, Mapping) else {})}.items():
            if key not in read_keys and not empty(value):
                refuse_unheeded_of_message({key: value}, where)
                unread[f"{kind}.{key}"] = value  # logged as unread: no template has such a name
    fields: Message = unread | {name: "".join(texts) for name, texts in texts_of.items() if texts}
    if calls := texts_of["tool_calls"]:
        fields["tool_calls"] = [from_json(call, "tool_call", where) for call in calls]
    return fields | ({"media": media} if media else {})


def _call(call: object, where: str) -> dict[str, Any]:
    """A call in OpenAI's form, with arguments as an object: templates would escape JSON text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"{where}: 'tool_calls' must each have a function with a name")
    assert isinstance(call, Mapping)
    arguments = from_json(function.get("arguments"), "arguments", where)
    if arguments == "null" or empty(arguments):
        arguments = {}
    if not isinstance(arguments, dict):
        raise InputError(f"{where}: 'arguments' of a call must be an object: name each of them")
    beside = {} if function is call else {k: v for k, v in call.items() if v is not None}
    return {"type": "function", **beside, "function": {**function, "arguments": arguments}}


_BEGINS = re.compile(r"\s*\[\s*\{")
_KEYS = {name: re.compile(rf"""["']{name}["']\s*:""") for name in ("role", "from", "value")}


def text_or_messages(value: object, name: str, where: str) -> object:
    """The messages that a table stores as JSON, decoded; any other value as it is.

    Only a list of objects with a message's keys is decoded: a text may begin as JSON does
    ("[INST]", a list of numbers), or be JSON (a reply in a format).

    Raises InputError: a string looks like messages, but is no valid JSON.
    """
    if not isinstance(value, str) or not _BEGINS.match(value):
        return value
    if not _has_message_keys({key for key, pattern in _KEYS.items() if pattern.search(value)}):
        return value
    decoded = from_json(value, name, where)
    are_messages = isinstance(decoded, list) and all(
        isinstance(entry, dict) and _has_message_keys(entry.keys()) for entry in decoded
    )
    return decoded if are_messages else value


def _has_message_keys(keys: Set[str]) -> bool:
    return "role" in keys or {"from", "value"} <= keys
