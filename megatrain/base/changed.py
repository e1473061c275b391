"""A context in which attributes have other values."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def changed(objects: Iterable[Any], **values: Any) -> Iterator[None]:
    """Within this context set attributes to `values`, on the objects that have them."""
    saved = [(o, name, getattr(o, name)) for o in objects for name in values if hasattr(o, name)]
    try:
        for changing, name, _ in saved:
            setattr(changing, name, values[name])
        yield
    finally:
        try:
            _put_back(saved)
        except BaseException:  # Ctrl-C may come here, too
            _put_back(saved)
            raise


def _put_back(saved: Iterable[tuple[Any, str, Any]]) -> None:
    for changing, name, value in saved:
        setattr(changing, name, value)
