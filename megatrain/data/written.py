"""What a field that may be a text holds: a text, or messages that a table keeps as JSON."""

import re

from megatrain.data.conversation import from_json

_BEGINS = re.compile(r"\s*\[\s*\{")
_KEYS = {name: re.compile(rf"""["']{name}["']\s*:""") for name in ("role", "from", "value")}


def text_or_messages(value: object, name: str, where: str) -> object:
    """A list of messages that a table keeps as JSON; any other string is text, as it stands.

    A text may begin as JSON does ("[INST]", a list of numbers), or be JSON (a reply in a format).

    Raises:
        InputError: a string is meant as messages, and is no JSON.
    """
    if not isinstance(value, str) or not _means_messages(value):
        return value
    found = from_json(value, name, where)
    each = found if isinstance(found, list) else []
    return found if each and all(map(_is_message, each)) else value


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and ("role" in value or {"from", "value"} <= value.keys())


def _means_messages(text: str) -> bool:
    if not _BEGINS.match(text):
        return False
    has = {name for name, key in _KEYS.items() if key.search(text)}
    return "role" in has or {"from", "value"} <= has
