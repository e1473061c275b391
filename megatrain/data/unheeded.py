"""Fields which say how a row is to be trained, and which nothing here heeds: refused, not dropped.

A row that is trained as if such a field were not there is trained wrongly without a word.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from megatrain.errors import InputError

_KTO = "rows of good and bad replies need a loss of their own: keep the good ones, without it"
_PREFERENCE = "pairs of replies need a loss of their own: leave the worse one out"
_TOKENS = "rows of tokens are not read: give their text"
_WEIGHTS = "only a 'weight' of 0 or 1 on a message is heeded: leave it out, or the row"
_MEDIA = "only text is trained: leave it out, or the row"
_PLACE = "it is not read: leave it out, or make it part of 'messages' or 'tools'"

_ROW = {
    "label": _KTO,
    "kto_tag": _KTO,
    "chosen": _PREFERENCE,
    "rejected": _PREFERENCE,
    **dict.fromkeys(("input_ids", "token_ids", "labels"), _TOKENS),
    **dict.fromkeys(("train", "training", "trainable"), _WEIGHTS),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _MEDIA),
    "chat_template": "the tokenizer's template is used: leave it out",
}
_CHAT_ROW = {"system": _PLACE, "functions": _PLACE, "function_call": _PLACE, "documents": _PLACE}
_WEIGHT = re.compile(r"(.+_)?(weights?|masks?)")

_MESSAGE = {
    "label": _KTO,
    "refusal": "it is not read: write it as 'content'",
    "function_call": "it is not read: write it as 'tool_calls'",
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _MEDIA),
}
_MESSAGE_WEIGHT = re.compile(r"(.+_)?(weights?|masks?|masked|train|training|trainable|loss)(_.+)?")


def says_training(column: str) -> bool:
    """Whether a column of a table may say how its rows are to be trained."""
    return column in _ROW or column in _CHAT_ROW or _WEIGHT.fullmatch(column) is not None


def refuse_unheeded(row: Mapping[str, Any], kind: Literal["text", "chat"], where: str) -> None:
    """Raises InputError: a field of the row asks for another training than it would get."""
    known = _ROW if kind == "text" else _ROW | _CHAT_ROW
    for name, value in row.items():
        remedy = known.get(name) or (_WEIGHTS if _WEIGHT.fullmatch(name) else None)
        if remedy is None or empty(value) or (remedy is _WEIGHTS and _is_one(value)):
            continue
        if name == "label" and kind == "text" and not isinstance(value, bool):
            continue  # the class of a text
        raise InputError(f"{where}: field {name!r}: {remedy}")


def refuse_unheeded_of_message(message: Mapping[str, Any], where: str) -> None:
    """Raises InputError: a field of the message asks for what it would not get."""
    for name in message:
        remedy = _MESSAGE.get(name) or (_WEIGHTS if _MESSAGE_WEIGHT.fullmatch(name) else None)
        if remedy is not None and name != "weight" and not empty(message[name]):
            raise InputError(f"{where}: field {name!r}: {remedy}")


def empty(value: object) -> bool:
    """Whether a value says nothing: tables fill absent ones with null."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def _is_one(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 1
