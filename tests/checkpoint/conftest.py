import pytest

from megatrain.checkpoint import files


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    """A layer of the tiny models has 25 pieces."""
    monkeypatch.setattr(files, "PIECE_BYTES", 4096)
