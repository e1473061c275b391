from collections.abc import Iterator

import pytest

from megatrain.engine import sink
from tests.remade import made_once


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice's gradient leaves in several pieces."""
    monkeypatch.setattr(sink, "PIECE", 1000)


@pytest.fixture(scope="package", autouse=True)
def models_are_remade_once() -> Iterator[None]:
    with made_once():
        yield
