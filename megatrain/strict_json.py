"""What JSON leaves open, decided."""

from collections import Counter
from typing import Any

_SHOWN = 60  # characters of a key


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook`: of a key that is there twice nobody can say which value was meant.

    Raises:
        ValueError: there is one.
    """
    content = dict(pairs)
    if len(content) != len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise ValueError(f"key {twice[:_SHOWN]!r} is there twice")
    return content
