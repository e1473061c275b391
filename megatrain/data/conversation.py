"""What a row of `messages` says, checked: who speaks, what, and which replies are to be learnt."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatrain.data.readers import Row, listed
from megatrain.data.unheeded import empty, refuse_unheeded, refuse_unheeded_of_message
from megatrain.errors import InputError
from megatrain.json_yaml import parse_json

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")


class Conversation(NamedTuple):
    """Messages as a chat template takes them; `learnt`: of each, whether it is a reply to learn."""

    messages: list[Message]
    learnt: list[bool]
    tools: list[Any] | None


def conversation(row: Row, where: str) -> Conversation:
    """The conversation of a row of `messages` and `tools`.

    Raises:
        InputError: it is malformed, or says something that would not be heeded.
    """
    refuse_unheeded(row, "chat", where)
    if "messages" not in row:
        raise InputError(f"{where}: no field 'messages': its fields are {listed(row)}")
    messages = row["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError(f"{where}: 'messages' must be a non-empty list of objects")
    checked = [_message(m, f"{where}: message {i}") for i, m in enumerate(messages, start=1)]
    learnt = [_learnt(m, f"{where}: message {i}") for i, m in enumerate(checked, start=1)]
    return Conversation(checked, learnt, _tools(row, where))


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InputError(f"{where} must be an object, not {type(message).__name__}")
    # Tables fill absent keys with null.
    kept = {key: value for key, value in message.items() if value is not None}
    if not isinstance(kept.get("role"), str):
        raise InputError(f"{where} has no 'role' (system, user, assistant or tool)")
    refuse_unheeded_of_message(kept, where)
    if empty(kept.get("tool_calls")):
        kept.pop("tool_calls", None)
    else:
        kept["tool_calls"] = _calls(kept, where)
    if "content" not in kept and "tool_calls" not in kept:
        raise InputError(f"{where} has no 'content'")
    if "content" in kept:
        kept["content"] = _content(kept["content"], where)
    return kept


def _learnt(message: Message, where: str) -> bool:
    """Takes OpenAI's `weight` out of a message; whether the message is to be learnt."""
    reply = message["role"] == "assistant"
    weight = message.pop("weight", 1 if reply else 0)
    if not isinstance(weight, (int, float)) or weight not in (0, 1):
        raise InputError(f"{where}: 'weight' must be 0 or 1: round it, or leave it out")
    if weight and not reply:
        raise InputError(f"{where}: 'weight' is 1, but only replies are learnt: leave it out")
    return reply and weight == 1


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else []
    texts = [p.get("text") for p in parts if isinstance(p, Mapping)]
    if not parts or len(texts) != len(parts) or not all(isinstance(t, str) for t in texts):
        raise InputError(f"{where}: 'content' must be a string (or a list of text parts)")
    return "".join(map(str, texts))


def _calls(message: Message, where: str) -> list[Any]:
    calls = message["tool_calls"]
    if message["role"] != "assistant":
        raise InputError(f"{where}: 'tool_calls' of the role {message['role']!r}: make it a reply")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InputError(f"{where}: 'tool_calls' must be a list of objects")
    return [_call(call, where) for call in calls]


def _call(call: object, where: str) -> dict[str, Any]:
    """A call whose arguments are an object: as JSON, a template would write them escaped twice."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"{where}: 'tool_calls' must each have a function with a name")
    assert isinstance(call, Mapping)
    made = {**function, "arguments": _arguments(function.get("arguments"), where)}
    return made if function is call else {**call, "function": made}


def _arguments(arguments: object, where: str) -> dict[str, Any]:
    if isinstance(arguments, str) and arguments:
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            raise InputError(
                f"{where}: 'arguments' of a call are not JSON: correct them"
            ) from error
    if empty(arguments):
        return {}
    if not isinstance(arguments, dict):
        raise InputError(f"{where}: 'arguments' of a call must be an object: name each of them")
    return arguments


def _tools(row: Row, where: str) -> list[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str):  # tables keep them as JSON, as each tool has another shape
        try:
            tools = parse_json(tools) if tools else None
        except ValueError as error:
            raise InputError(f"{where}: 'tools' is not JSON: write it as a list") from error
    if tools is not None and not isinstance(tools, list):
        raise InputError(f"{where}: 'tools' must be a list of objects")
    return tools or None
