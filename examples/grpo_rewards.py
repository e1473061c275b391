"""Rewards of answers to questions of arithmetic, for examples/grpo.yaml.

An answer of the data ends with `#### 42`; a reply should end with `#### 42`, too.
"""

import re
from typing import Any

_NUMBER = re.compile(r"####\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)")


def correct(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """1 for the right number, wherever a reply has it after its last ####."""
    pairs = zip(map(_text, completions), answer, strict=True)
    return [float(_last(text) is not None and _last(text) == _last(right)) for text, right in pairs]


def told(completions: list[Any], **kwargs: Any) -> list[float]:
    """1 for a reply that has a number after ####, be it right or wrong."""
    return [float(_last(_text(each)) is not None) for each in completions]


def _text(completion: Any) -> str:
    """A reply to messages is a list of one message."""
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def _last(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
