"""Reads untrusted JSON and YAML: bounded in size and nesting, plain data, each key once."""

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from megatrain.base.units import MIB
from megatrain.errors import InputError, explained, in_one_line

# The largest published index (a trillion parameters, expert by expert) is 15 MB; parsed JSON takes
# some twenty times its text, and a hostile file must not take the memory.
MAX_JSON_BYTES = 32 * MIB
MAX_YAML_BYTES = 1 * MIB
MAX_NAME_LENGTH = 1000
DAMAGED = "the file is damaged, download or copy it again"
_SHOWN = 60  # characters of a key

Pairs = list[tuple[str, Any]]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a plain file. Raises InputError: unreadable, too large, no object."""
    return parse_object(_read(path, MAX_JSON_BYTES, regular=True), path)


def parse_object(text: bytes, what: str | Path) -> dict[str, Any]:
    """Parse a JSON object with keys of at most `MAX_NAME_LENGTH` characters; messages name `what`.

    Raises InputError: not JSON, nested too deeply, a key twice or too long, or not an object.
    """
    with explained(f"{what}: its JSON cannot be read", DAMAGED, of=ValueError):
        content = parse_json(text, _short_keys)
    if not isinstance(content, dict):
        raise InputError(f"{what}: its JSON is not an object; {DAMAGED}")
    return content


def each_key_once(pairs: Pairs) -> dict[str, Any]:
    """Make a JSON object of its keys and values. Raises ValueError: a key is there twice."""
    content = dict(pairs)
    if len(content) != len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise ValueError(f"key {twice[:_SHOWN]!r} is there twice")
    return content


def _short_keys(pairs: Pairs) -> dict[str, Any]:
    if any(len(key) > MAX_NAME_LENGTH for key, _ in pairs):
        raise ValueError(f"a key is longer than {MAX_NAME_LENGTH} characters")
    return each_key_once(pairs)


def parse_json(
    text: str | bytes, as_object: Callable[[Pairs], dict[str, Any]] = each_key_once
) -> Any:
    """Parse one JSON text (UTF-8).

    Raises ValueError: not UTF-8, not JSON, nested too deeply, a key twice, a number without end.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=as_object)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def json_crc32(content: dict[str, Any]) -> int:
    """A checksum of a JSON object, to be kept in it."""
    return zlib.crc32(json.dumps(content).encode())


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping from a file or pipe. Raises InputError: no mapping, or refused."""
    with explained(str(path), of=ValueError):
        tree = parse_yaml(read_text(path, MAX_YAML_BYTES, regular=False))
    if not isinstance(tree, dict):
        raise InputError(
            f"{path}: not a mapping of sections such as model, data and training; `megatrain init` "
            "writes one"
        )
    return tree


def parse_yaml(text: str) -> Any:
    """Parse one YAML document.

    Raises ValueError, in one line: malformed, nested too deep, aliases, tags or repeated keys.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: plain data only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}: " if mark else ""
        problem = ", ".join(filter(None, (error.context, error.problem)))
        is_indented_badly = r"\t" in problem or "<block" in problem
        remedy = "; indent by spaces, all keys of a section alike" if is_indented_badly else ""
        raise ValueError(f"{place}not valid: {problem}{remedy}") from error
    except RecursionError as error:
        raise ValueError("not valid: nested too deeply") from error
    except yaml.YAMLError as error:
        raise ValueError(f"not valid: {in_one_line(error, 200)}") from error


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads `1e-5` as a number, as YAML 1.2 does, and refuses what is ambiguous:

    repeated keys, aliases, tags, and scalars that differ in YAML 1.1: `010`, `1:30`.
    """

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refusal("aliases are not supported: write the value out", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise _refusal("tags are not supported: leave the tag out", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal("a key is not a name", key.start_mark)
            if key.value in keys:
                raise _refusal(f"key {key.value!r} is given twice", key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)

    def one_number(self, node: yaml.ScalarNode) -> int | float:
        """The number of a scalar, if all versions of YAML agree on it."""
        is_integer = node.tag.endswith(":int")
        construct = self.construct_yaml_int if is_integer else self.construct_yaml_float
        number: int | float = construct(node)
        if _OLD_NUMBER.fullmatch(node.value):
            raise _refusal(
                f"{node.value} is {number} in YAML 1.1 and something else in YAML 1.2: write the "
                "number without a leading 0 or a colon, and text in quotes",
                node.start_mark,
            )
        return number


_OLD_NUMBER = re.compile(r"[-+]?0[0-7_]+|.*:.*")  # octal, and base 60
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.one_number)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def _refusal(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, problem, mark)


def read_text(path: Path, max_bytes: int, *, regular: bool = True) -> str:
    """Read a small UTF-8 text; `regular`: no pipe. Raises InputError: unreadable, too large."""
    problem = f"{path}: cannot be read: not UTF-8"
    with explained(problem, "save it as UTF-8", of=UnicodeDecodeError):
        return _read(path, max_bytes, regular=regular).decode("utf-8-sig")


def _read(path: Path, max_bytes: int, *, regular: bool) -> bytes:
    """Read a file. Raises InputError: too large, unreadable, or a pipe although `regular`."""
    with explained(f"{path}: cannot be read", of=OSError):
        if regular and path.exists() and not path.is_file():  # to open a pipe could wait for ever
            raise InputError(f"{path}: not a plain file")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise InputError(f"{path}: larger than {max_bytes // MIB} MiB; name another file")
    return content
