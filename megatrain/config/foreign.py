"""Keys of other trainers, and our keys for them, as docs/coming-from.md lists them."""

import re
from functools import cache

from megatrain.base.shipped import shipped

_ROW = re.compile(r"^\| (`[^|]+) \| ([^|]+) \|(?: ([^|]*?) ?\|)?$", re.MULTILINE)
_KEY = re.compile(r"`(\w+)[^`]*`")
_PLACE = re.compile(
    r"`((?:model|adapter|data|training|optimizer|loss|rollout|schedule|engine|checkpoint|output"
    r"|tracking)\.\w+(?:: [^`]*)?)`"
)


def foreign(name: str) -> str | None:
    """The remedy for a key that another trainer has; None: no trainer has it."""
    return _answers().get(name)


@cache
def _answers() -> dict[str, str]:
    answers: dict[str, str] = {}
    try:
        document = shipped("docs/coming-from.md").read_text(encoding="utf-8")
    except OSError:  # the package was copied without docs
        return answers
    for theirs, ours, note in _ROW.findall(document):
        groups = [_KEY.findall(part) for part in re.split("(?<=`), (?=`)", theirs)]
        for keys, answer in zip(groups, _of_row(ours, _plain(note), len(groups)), strict=True):
            answers = dict.fromkeys(keys, answer) | answers
    return answers


def _of_row(ours: str, note: str, count: int) -> list[str]:
    """For a row of the table, the remedy for each group of keys: its own, or the common one."""
    places = _PLACE.findall(ours) if _PLACE.match(ours) else []
    if len(places) in (1, count):
        places = places if len(places) == count else [_plain(ours)] * count
        return [f"its name here is {place}" + (f" ({note})" if note else "") for place in places]
    words = re.sub("^nothing", "leave it out", re.sub("^always", "it is always so", _plain(ours)))
    words = f"take {words}" if ours.startswith("`") else words
    return [f"{words}: {note}" if note else words] * count


def _plain(text: str) -> str:
    """Text without the marks of Markdown."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "").strip()
