import pytest

from megatrain.checkpoint import files
from tests.inside import sized


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    """A layer of the tiny models has 25 pieces."""
    sized(monkeypatch, files, PIECE_BYTES=4096)
