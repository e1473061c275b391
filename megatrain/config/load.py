"""Reads a run file and overrides. Precedence: defaults < file < `--set path=value`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatrain.base.json_yaml import parse_yaml, read_yaml
from megatrain.base.shipped import shipped
from megatrain.config.schema import Config
from megatrain.config.section import Section, nearest, shown
from megatrain.errors import InputError, explained

# Endings of data files (`megatrain.data.sources`) but .json, as a run file may be JSON.
_DATA = re.compile(r"\.(jsonl|ndjson|jsonlines|csv|tsv|parquet|arrow|txt)(\.(gz|bz2|xz|zst))?$")


def load(path: str | Path, overrides: Sequence[str] = (), *, endless: bool = False) -> Config:
    """Read a run file, or that of a run's folder, and apply `overrides` (`path.to.key=value`).

    Args: `endless`: the file may lack `steps` and `epochs`, for commands that only show data.

    Raises InputError: the file cannot be read or is not a valid run file.
    """
    file = Path(path)
    if (file / "config.yaml").is_file():
        file /= "config.yaml"
    if not file.exists():
        raise InputError(
            f"{file}: cannot be read: No such file or folder: give a run file, which `megatrain "
            "init` writes, or the folder of a run"
        )
    if _DATA.search(file.name.lower()) and file.is_file():
        raise InputError(f"{file}: a file of data: name it in a run file (YAML), as data.path")
    tree = read_yaml(file)
    names = [_apply_override(tree, text) for text in overrides]
    training = tree.setdefault("training", {}) if endless else None
    if isinstance(training, dict) and not training.keys() & {"steps", "epochs"}:
        training["steps"] = 1
    return validate(tree, str(file), names)


def validate(tree: Mapping[str, Any], source: str, overridden: Iterable[str] = ()) -> Config:
    """The Config of a tree of keys; messages name `source`, and mark `overridden` keys.

    Raises InputError: keys are missing, unknown or contradict each other.
    """
    keys = {name: value for name, value in tree.items() if value is not None}
    required: dict[str, Any] = {
        name: {} for name, field in Config.model_fields.items() if field.is_required()
    }
    try:
        return Config.model_validate({**tree, **required, **keys})
    except ValidationError as error:
        details = error.errors(include_url=False)
        # An unknown key likely causes the other errors (a misspelt key is also missing).
        details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
        names = set(overridden)
        # Of the errors of one key, such as those of a union's arms, the first one is shown.
        by_key = {tuple(map(str, d["loc"][:2])): d for d in reversed(details)}
        problems = [_describe(detail, names) for detail in reversed(by_key.values())]
        unknown = [_name(detail) for detail in details if detail["type"] == "extra_forbidden"]
        unlisted = problems[_MOST_PROBLEMS:]
        remedies = [f" (and {len(unlisted)} more)"] if unlisted else []
        if sum(name in foreign() for name in unknown) > 2:
            remedies.append(f"; the keys of other trainers: {shipped('docs/coming-from.md')}")
        if any(detail["type"] == "missing" for detail in details):
            remedies.append(f"; a run file needs at least {_SMALLEST_FILE}")
        text = "; ".join(problems[:_MOST_PROBLEMS]) + "".join(remedies)
        raise InputError(text if text.startswith("--set") else f"{source}: {text}") from error


_MOST_PROBLEMS = 8  # problems in a message
_SMALLEST_FILE = (
    "{model: {path: FOLDER}, data: {path: FILE, sequence_length: 1024}, training: {steps: 100}}; "
    "`megatrain init` writes one with every key explained"
)


def _apply_override(tree: dict[str, Any], text: str) -> str:
    """Set one `path.to.key=value` in `tree`; returns the path."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"--set {text}: write it as path.to.key=value")
    node = tree
    for key in keys[:-1]:
        if not isinstance(node.get(key), dict):
            node[key] = {}
        node = node[key]
    with explained(f"--set {text}", of=ValueError):
        node[keys[-1]] = parsed = parse_yaml(value)
    if value.count("#") != str(parsed).count("#"):
        quoted = f"{path}='{value}'"
        raise InputError(f'--set {text}: YAML ends at " #"; put the value in quotes: "{quoted}"')
    return path.strip()


def _describe(detail: ErrorDetails, overridden: set[str]) -> str:
    """The message for one of pydantic's errors."""
    sections = _sections(detail)
    path = ".".join(str(item) for item in detail["loc"][: max(2, len(sections))])
    kind, value, message = detail["type"], detail["input"], detail["msg"].removeprefix("Input ")
    if kind == "value_error":
        message = str(detail["ctx"]["error"])
        if not path:
            return message
    elif kind == "extra_forbidden":
        message = f"unknown key{_remedy(_name(detail), sections)}"
    elif kind == "missing":
        message = "missing"
    elif kind == "model_type":
        keys = sections[1].model_fields if len(detail["loc"]) == 1 else ()
        key = next((name for name in ("path", "name", "method", "folder") if name in keys), None)
        example = f", such as {path}: {{{key}: {value}}}" if key and isinstance(value, str) else ""
        message = f"should be a mapping{example}, got {shown(value)}"
    elif kind == "list_type" and isinstance(value, str | int | float):
        message = f"should be a list, such as [{value}], got {shown(value)}"
    else:
        message = f"{message.replace('valid dictionary', 'mapping')}, got {shown(value)}"
    return f"{'--set ' if path in overridden else ''}{path}: {message}"


def _name(detail: ErrorDetails) -> str:
    """The key with an error, without list indices and arms of unions, which pydantic adds."""
    return str(detail["loc"][min(len(_sections(detail)), len(detail["loc"])) - 1])


def _sections(detail: ErrorDetails) -> list[type[Section]]:
    """The sections that contain the place of an error, outermost first."""
    sections: list[type[Section]] = [Config]
    for name in detail["loc"]:
        field = sections[-1].model_fields.get(str(name))
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        if not inner:
            break
        sections.append(inner[0])
    return sections


def _remedy(name: str, sections: Sequence[type[Section]]) -> str:
    """The remedy for an unknown key: its name here, or the nearest key of the section."""
    annotations = {section: field.annotation for section, field in Config.model_fields.items()}
    places = [
        f"{section}.{name}"
        for section, kind in annotations.items()
        if isinstance(kind, type) and issubclass(kind, Section) and name in kind.model_fields
    ]
    if places and len(sections) < 3:
        return f"; its name here is {' or '.join(places)}"
    answer = foreign().get(name) if len(sections) < 3 else None
    return f"; {answer}" if answer else nearest(name, list(sections[-1].model_fields))


_ROW = re.compile(r"^\| (`[^|]+) \| ([^|]+) \|(?: ([^|]*?) ?\|)?$", re.MULTILINE)
_KEY = re.compile(r"`(\w+)[^`]*`")
_PLACE = re.compile(rf"`((?:{'|'.join(Config.model_fields)})\.\w+(?:: [^`]*)?)`")


@cache
def foreign() -> dict[str, str]:
    """The remedies for keys of other trainers, by key, as docs/coming-from.md has them."""
    answers: dict[str, str] = {}
    try:
        document = shipped("docs/coming-from.md").read_text(encoding="utf-8")
    except OSError:  # the package was copied without docs
        return answers
    for theirs, ours, note in _ROW.findall(document):
        keys, places = theirs.split(", "), ours.split(", ")
        if len(keys) != len(places) or not all(map(_PLACE.match, places)):
            keys, places = [theirs], [ours]  # all keys of the row have the same remedy
        for key, place in zip(keys, places, strict=True):
            answers = dict.fromkeys(_KEY.findall(key), _answer(place, _plain(note))) | answers
    return answers


def _answer(ours: str, note: str) -> str:
    """The remedy for another trainer's key, by the table's column `ours` and its note."""
    words = _plain(ours)
    if _PLACE.match(ours):
        return f"its name here is {words}" + (f" ({note})" if note else "")
    words = re.sub("^nothing", "leave it out", re.sub("^always", "it is always so", words))
    words = f"take {words}" if ours.startswith("`") else words
    return f"{words}: {note}" if note else words


def _plain(text: str) -> str:
    """Markdown without links and code marks."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "").strip()
