"""YAML from anybody: bounded in size and nesting, plain data, no aliases, tags or repeated keys."""

import re
from pathlib import Path
from typing import Any

import yaml

from megatrain.errors import InputError, first_line
from megatrain.units import MIB

MAX_FILE_BYTES = 1 * MIB
MAX_NESTING = 16


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping, with bounded size and nesting, without aliases, tags or repeated keys.

    Raises:
        InputError: the file cannot be read or is not such a mapping.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise InputError(f"{path}: larger than {MAX_FILE_BYTES} bytes, so not a run file")
    try:
        tree = parse_yaml(raw.decode("utf-8-sig"))
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    if not isinstance(tree, dict):
        raise InputError(f"{path}: not a mapping of sections such as model, data and training")
    return tree


def parse_yaml(text: str) -> Any:
    """The value of one YAML document.

    Raises:
        ValueError: malformed, nested too deep, with aliases, tags or repeated keys; in one line.
    """
    try:
        _refuse_bombs(text)
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: plain data only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}: " if mark else ""
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise ValueError(f"{place}not valid: {problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"not valid: {first_line(error)}") from error


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys and reads `1e-5` as a number, as YAML 1.2 does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal("a key is not a name", key.start_mark)
            if key.value in seen:
                problem = f"key {key.value!r} is given twice"
                raise _refusal(problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def _refusal(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, problem, mark)


def _refuse_bombs(text: str) -> None:
    """Look at the events only: nothing is built before aliases, tags and depth are harmless."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise _refusal("aliases are not supported", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise _refusal("tags are not supported", event.start_mark)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            raise _refusal("nested too deep", event.start_mark)
