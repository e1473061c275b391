"""What messages and tools must show in the text that a chat template makes of them."""

import re
from collections.abc import Mapping
from typing import Any

from megatrain.data.conversation import Conversation, Message

_WORD = re.compile(r"[A-Za-z0-9]+")  # which no way of writing a string changes


def tool_names(talk: Conversation) -> list[str]:
    """The names of the tools that are described to the model."""
    return [name for tool in talk.tools or () if (name := _function(tool).get("name"))]


def with_names_ending(talk: Conversation, ending: str) -> Conversation:
    """The same conversation with `ending` behind the names of all tools that are described."""
    tools: list[Any] = []
    for tool in talk.tools or ():
        function = _function(tool)
        renamed = {**function, "name": f"{function.get('name')}{ending}"}
        tools.append({**tool, "function": renamed} if "function" in tool else renamed)
    return talk._replace(tools=tools)


def _function(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return function if isinstance(function, Mapping) else {}


def called(message: Message) -> list[str]:
    """What the calls of a message must show in its text, however a template writes arguments."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    values = [value for function in functions for value in function["arguments"].values()]
    words = [word for value in values if isinstance(value, str) for word in _WORD.findall(value)]
    return [*(function["name"] for function in functions), *words]


def with_signs(message: Message, of_content: str, of_calls: str, *, empty: bool) -> Message:
    """A message with one sign after its content, the other after its last call's name."""
    made = dict(message)
    text = message.get("content", "").rstrip()
    if text or (empty and "content" in message and "tool_calls" not in message):
        made["content"] = text + of_content + message["content"][len(text) :]
    if "tool_calls" in message:
        *others, last = message["tool_calls"]
        function = {**last["function"], "name": last["function"]["name"] + of_calls}
        made["tool_calls"] = [*others, {**last, "function": function}]
    return made
