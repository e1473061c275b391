"""Refuses rows with fields that ask for training that is not supported.

If such a field were ignored, its row would silently be trained wrongly.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.errors import InputError

_RATED = "rows of good and bad replies are not read: make pairs of them, or keep the good ones"
_PREFERENCE = "pairs of replies need loss.name: dpo, or another; or keep the better one"
_TOKENS = "rows of tokens are not read: give their text"
_WEIGHTS = "only a 'weight' of 0 or 1 on a message is heeded: leave it out, or the row"
_MEDIA = "only text, and images of conversations, are trained: leave it out, or the row"
_PLACE = "it is not read: make it part of the messages or of 'tools'"

_OF_MEDIA = dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _MEDIA)
_ROW = {
    "label": _RATED,
    "kto_tag": _RATED,
    **dict.fromkeys(("chosen", "rejected", "chosen_messages", "rejected_messages"), _PREFERENCE),
    **dict.fromkeys(("input_ids", "token_ids", "labels"), _TOKENS),
    **dict.fromkeys(("train", "training", "trainable"), _WEIGHTS),
    **_OF_MEDIA,
    "chat_template": "the tokenizer's template is used: leave it out",
}
_ROW_OF_TURNS = dict.fromkeys(
    ("system", "system_prompt", "functions", "function_call", "documents", "history", "tools",
     "chat_template_kwargs"),
    _PLACE,
)  # fmt: skip
BESIDE_PROMPTS = (*_OF_MEDIA, *_ROW_OF_TURNS)  # the reply to a prompt would depend on these
_WEIGHT = re.compile(r"(.+_)?(weights?|masks?)")

_MESSAGE = {
    "label": _RATED,
    "refusal": "it is not read: write it as 'content'",
    "function_call": "it is not read: write it as 'tool_calls'",
    **_OF_MEDIA,
}
# Fields that only some templates read, in place of calls and tools.
OF_CALLS = {
    "function_calls": "write it as 'tool_calls'",
    "functions": "write it as 'tools' of the row",
    "tools": "write it as 'tools' of the row",
}
_MESSAGE_WEIGHT = re.compile(r"(.+_)?(weights?|masks?|masked|train|training|trainable|loss)(_.+)?")


def says_training(column: str) -> bool:
    """True if a table's column may ask for some training of its rows."""
    return column in _ROW or column in _ROW_OF_TURNS or _WEIGHT.fullmatch(column) is not None


def refuse_unheeded(rest: Mapping[str, Any], where: str, *, text: bool) -> None:
    """Raises InputError: a field of a row (a `text`) is not read, and asks for other training."""
    refusals = _ROW if text else _ROW | _ROW_OF_TURNS
    for name, value in rest.items():
        remedy = refusals.get(name) or (_WEIGHTS if _WEIGHT.fullmatch(name) else None)
        if remedy is None or empty(value):
            continue
        are_objects = isinstance(value, list) and isinstance(value[0], dict)  # rows, not weights
        if remedy is _WEIGHTS and (are_objects or (type(value) in (int, float) and value == 1)):
            continue
        if name == "label" and text and not isinstance(value, bool):
            continue  # the class of a text
        way_out = f"data.fields: {{{name}: null}} passes it over"
        raise InputError(f"{where}: field {name!r}: {remedy} ({way_out})")


def refuse_unheeded_of_message(message: Mapping[str, Any], where: str) -> None:
    """Raises InputError: a message's field asks for training that is not supported."""
    for name in message:
        remedy = _MESSAGE.get(name) or (_WEIGHTS if _MESSAGE_WEIGHT.fullmatch(name) else None)
        if remedy is not None and not empty(message[name]):
            raise InputError(f"{where}: field {name!r}: {remedy}")


def empty(value: object) -> bool:
    """True if a value is null or empty: tables fill absent values with null."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    """The first names, escaped and cut to fit on one line."""
    return ", ".join(f"{name!r:.40}" for name in [*names][:12]) or "none (or null)"
