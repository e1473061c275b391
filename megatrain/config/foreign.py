"""Keys of other trainers, and what does the same here: as docs/coming-from.md has it."""

import re
from collections.abc import Iterator
from functools import cache

from megatrain.base.shipped import shipped

_ROW = re.compile(r"^\| (`[^|]+) \| ([^|]+) \|(?: ([^|]*?) ?\|)?$", re.MULTILINE)
_KEY = re.compile(r"`(\w+)[^`]*`")
_PLACE = re.compile(
    r"`((?:model|adapter|data|training|optimizer|loss|rollout|schedule|engine|checkpoint|output"
    r"|tracking)\.\w+(?:: [^`]*)?)`"
)


def foreign(name: str) -> str | None:
    """What to write here instead of a key that another trainer has; None: nobody has it."""
    return _answers().get(name)


@cache
def _answers() -> dict[str, str]:
    answers: dict[str, str] = {}
    try:
        document = shipped("docs/coming-from.md").read_text(encoding="utf-8")
    except OSError:  # a copy of the package alone
        return answers
    for there, here, note in _ROW.findall(document):
        for name, answer in _of_row(there, here, _plain(note)):
            answers.setdefault(name, answer)
    return answers


def _of_row(there: str, here: str, note: str) -> Iterator[tuple[str, str]]:
    """Each key of the first column with its answer: its own place, or what stands for all."""
    groups = [_KEY.findall(part) for part in re.split("(?<=`), (?=`)", there)]
    places, single = _PLACE.findall(here), _PLACE.match(here)
    beside = f" ({note})" if note else ""
    if len(places) == len(groups) and single:
        told = [f"its name here is {place}{beside}" for place in places]
    elif len(places) == 1 and single:
        told = [f"its name here is {_plain(here)}{beside}"] * len(groups)
    else:
        words = re.sub(
            "^nothing", "leave it out", re.sub("^always", "it is always so", _plain(here))
        )
        words = f"take {words}" if here.startswith("`") else words
        told = [f"{words}: {note}" if note else words] * len(groups)
    for names, answer in zip(groups, told, strict=True):
        yield from ((name, answer) for name in names)


def _plain(text: str) -> str:
    """Text without the marks of Markdown."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "").strip()
