"""Plain JSON values as the dataclasses that they should be, or a word on what is wrong."""

from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


def decode(wanted: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type `wanted`.

    Knows dataclasses (what has a default may be left out), `tuple[X, ...]`, `tuple[X, Y]`,
    `dict[str, X]`, unions, Any, Literal, `Annotated[X, allowed]` (a value must be `in allowed`),
    and the types of JSON itself. An integer is taken for a float, but no bool for a number.

    Raises:
        ValueError: it is none; `where` and the path to it begin the message.
    """
    if wanted is Any:
        return value
    if is_dataclass(wanted):
        return _record(wanted, value, where)
    if get_origin(wanted) is Annotated:
        inner, allowed = get_args(wanted)
        return _one_of(allowed, decode(inner, value, where), where)
    if get_origin(wanted) is Literal:
        return _one_of(get_args(wanted), value, where)
    if get_origin(wanted) in (UnionType, Union):  # `Annotated[...] | None` is the latter
        return _one_kind(get_args(wanted), value, where)
    if get_origin(wanted) is dict:
        items = _expect(dict, value, where).items()
        return {key: decode(get_args(wanted)[1], each, f"{where}.{key}") for key, each in items}
    if get_origin(wanted) is tuple:
        return _row(get_args(wanted), value, where)
    if wanted is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    return _expect(wanted, value, where)


def _record(wanted: Any, value: Any, where: str) -> Any:
    types, given = get_type_hints(wanted, include_extras=True), _expect(dict, value, where)
    needed = {
        field.name for field in fields(wanted) if field.default is field.default_factory is MISSING
    }
    wrong = min((given.keys() - types.keys()) | (needed - given.keys()), default=None)
    if wrong is not None:
        raise ValueError(f"{where} {'lacks' if wrong in types else 'has an unknown'} {wrong[:80]}")
    return wanted(**{n: decode(types[n], each, f"{where}.{n}") for n, each in given.items()})


def _one_kind(wanted: tuple, value: Any, where: str) -> Any:
    kinds = [each for each in wanted if each is not NoneType]
    if value is None and len(kinds) < len(wanted):
        return None
    *others, last = kinds
    for kind in others:
        with suppress(ValueError):
            return decode(kind, value, where)
    return decode(last, value, where)


def _row(wanted: tuple, value: Any, where: str) -> tuple:
    given = _expect(list, value, where)
    if wanted[-1] is Ellipsis:
        return tuple(decode(wanted[0], each, f"{where}[{i}]") for i, each in enumerate(given))
    if len(given) != len(wanted):
        raise ValueError(f"{where} has {len(given)} values instead of {len(wanted)}")
    pairs = zip(wanted, given, strict=True)
    return tuple(decode(kind, each, f"{where}[{i}]") for i, (kind, each) in enumerate(pairs))


def _expect(kind: type, value: Any, where: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{where[:200]} is a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _one_of(allowed: Any, value: Any, where: str) -> Any:
    if value not in allowed:
        raise ValueError(f"{where[:200]} is {str(value)[:40]}, which cannot be")
    return value
