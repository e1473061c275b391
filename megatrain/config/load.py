"""Run file and overrides together. Precedence: defaults < file < `--set path=value`.

Every mistake is an InputError of one line that names the file, the key and, for a misspelt key,
the nearest valid one.
"""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatrain.base.json_yaml import parse_yaml, read_yaml
from megatrain.base.shipped import shipped
from megatrain.config.foreign import foreign
from megatrain.config.schema import Config
from megatrain.config.section import Section, nearest, shown
from megatrain.errors import InputError


def load(path: str | Path, overrides: Sequence[str] = (), *, endless: bool = False) -> Config:
    """Read a run file and apply `overrides` (`path.to.key=value`, the value in YAML).

    The file of a run's folder is its `config.yaml`. An `endless` one need not say how long to
    train, for those who only look at its data.

    Raises:
        InputError: the file cannot be read or is not a valid run file.
    """
    file = Path(path)
    if (file / "config.yaml").is_file():
        file /= "config.yaml"
    _refuse_data(file)
    return overridden(read_yaml(file), str(file), overrides, endless=endless)


# The names of rows in `megatrain.data.sources`, but for .json, which a run file may be, too.
_DATA = re.compile(
    r".*\.(jsonl|ndjson|jsonlines|csv|tsv|parquet|arrow|txt)(\.(gz|bz2|xz|zst))?", re.IGNORECASE
)


def _refuse_data(file: Path) -> None:
    """Raises InputError: by its name a file has data, not a run."""
    if _DATA.fullmatch(file.name) and file.is_file():
        raise InputError(
            f"{file}: a file of data, not a run file: give a run file (YAML), and name the data in "
            f"it as data.path, or with --set data.path={file}"
        )


def overridden(
    tree: Mapping[str, Any], source: str, overrides: Sequence[str], *, endless: bool = False
) -> Config:
    """`tree` with `overrides` as a Config; `source` serves the message only.

    Raises:
        InputError: it is not a valid run file.
    """
    changed = copy.deepcopy(dict(tree))
    names = [_apply_override(changed, text) for text in overrides]
    training = changed.setdefault("training", {}) if endless else None
    if isinstance(training, dict) and not training.keys() & {"steps", "epochs"}:
        training["steps"] = 1
    return validate(changed, source, names)


def validate(tree: Mapping[str, Any], source: str, overridden: Iterable[str] = ()) -> Config:
    """`tree` as a Config; `source` and the `overridden` keys serve the message only.

    Raises:
        InputError: an unknown key, a wrong type or an impossible value.
    """
    wanted: dict[str, Any] = {name: {} for name in _REQUIRED}
    given = {name: value for name, value in tree.items() if value is not None or name not in wanted}
    try:
        return Config.model_validate(wanted | given)
    except ValidationError as error:
        details = error.errors(include_url=False)
        # An unknown key is the likeliest cause of the others (a misspelt one is also missing).
        details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
        names = set(overridden)
        first = {tuple(_keys(detail)): detail for detail in reversed(details)}  # of a union's arms
        problems = [_describe(each, names) for each in reversed(first.values())]
        theirs = [d for d in details if d["type"] == "extra_forbidden" and foreign(_keys(d)[-1])]
        remedies = [f" (and {len(problems) - _MOST} more)"] if len(problems) > _MOST else []
        if len(theirs) > 2:
            remedies.append(f"; the keys of other trainers: {shipped('docs/coming-from.md')}")
        if any(detail["type"] == "missing" for detail in details):
            remedies.append(f"; a run file needs at least {_SMALLEST}")
        text = "; ".join(problems[:_MOST]) + "".join(remedies)
        raise InputError(text if text.startswith("--set") else f"{source}: {text}") from error


_REQUIRED = [name for name, field in Config.model_fields.items() if field.is_required()]
_MOST = 8  # problems in a message
_SMALLEST = (
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
    try:
        node[keys[-1]] = parsed = parse_yaml(value)
    except ValueError as error:
        raise InputError(f"--set {text}: {error}") from error
    if value.count("#") != str(parsed).count("#"):
        quoted = f"{path}='{value}'"
        raise InputError(f'--set {text}: YAML ends at " #"; put the value in quotes: "{quoted}"')
    return path.strip()


def _describe(detail: ErrorDetails, overridden: set[str]) -> str:
    nested = _nested(detail)
    path = ".".join(str(item) for item in detail["loc"][: 3 if nested else 2])
    if detail["type"] == "value_error" and not path:
        return str(detail["ctx"]["error"])
    place = f"--set {path}" if path in overridden else path
    if detail["type"] == "extra_forbidden" and nested:
        return f"{place}: unknown key{nearest(str(detail['loc'][2]), list(nested.model_fields))}"
    if detail["type"] == "extra_forbidden":
        return f"{place}: unknown key{_nearest_key(*_keys(detail))}"
    if detail["type"] == "missing":
        return f"{place}: missing"
    if detail["type"] == "value_error":
        return f"{place}: {detail['ctx']['error']}"
    if detail["type"] == "model_type":
        return f"{place}: should be a mapping{_as_mapping(detail)}, got {shown(detail['input'])}"
    given = detail["input"]
    if detail["type"] == "list_type" and isinstance(given, str | int | float):
        return f"{place}: should be a list, such as [{given}], got {shown(given)}"
    message = detail["msg"].removeprefix("Input ").replace("valid dictionary", "mapping")
    return f"{place}: {message}, got {shown(detail['input'])}"


def _as_mapping(detail: ErrorDetails) -> str:
    """How a section is written that was given as one word, as `adapter: lora`."""
    (section, *nested), given = detail["loc"], detail["input"]
    keys = () if nested else _section(str(section)).model_fields
    key = next((name for name in ("path", "name", "method", "folder") if name in keys), None)
    return f", such as {section}: {{{key}: {given}}}" if key and isinstance(given, str) else ""


def _keys(detail: ErrorDetails) -> list[str]:
    """Section and key; what pydantic adds below (list index, arm of a union) is not in the file."""
    return [str(item) for item in detail["loc"][:2]]


def _nested(detail: ErrorDetails) -> type[Section] | None:
    """The section within a section that an error is in."""
    section, key, *below = [str(item) for item in detail["loc"]] + [""] * (2 - len(detail["loc"]))
    if not below or key not in _section(section).model_fields:
        return None
    kinds = get_args(_section(section).model_fields[key].annotation)
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)


def _nearest_key(first: str, second: str | None = None) -> str:
    sections = {name: list(_section(name).model_fields) for name in Config.model_fields}
    name = second or first
    elsewhere = [f"{section}.{name}" for section, keys in sections.items() if name in keys]
    if elsewhere:
        return f"; its name here is {' or '.join(elsewhere)}"
    if known := foreign(name):
        return f"; {known}"
    return nearest(name, sections[first] if second else list(sections))


def _section(name: str) -> type[Section]:
    annotation = Config.model_fields[name].annotation
    assert isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation
