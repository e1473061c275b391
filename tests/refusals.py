"""What must be refused: tables of mistakes, and the one line that is said of each."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain.errors import InputError


def table(beside: str, name: str) -> Any:
    """A YAML file in the folder of the test file `beside`."""
    return yaml.safe_load(Path(beside).with_name(name).read_text(encoding="utf-8"))


@contextmanager
def refused(problem: str, kind: type[Exception] = InputError) -> Iterator[Any]:
    """The block ends in an error of one line that matches `problem`."""
    with pytest.raises(kind, match=problem) as caught:
        yield caught
    assert "\n" not in str(caught.value)
