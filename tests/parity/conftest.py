from collections.abc import Iterator

import pytest

from megatrain.checkpoint import files
from megatrain.engine import sink
from tests.inside import sized


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice's gradient leaves in several pieces."""
    sized(monkeypatch, sink, PIECE=1000)


@pytest.fixture(scope="package", autouse=True)
def saves_take_little_room() -> Iterator[None]:
    """An engine that saves in the background takes two pieces, of 32 MiB each for users."""
    with pytest.MonkeyPatch.context() as patch:
        sized(patch, files, PIECE_BYTES=1 << 20)
        yield
