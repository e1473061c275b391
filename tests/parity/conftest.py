import pytest

from megatrain.engine import sink


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice's gradient leaves in several pieces."""
    monkeypatch.setattr(sink, "PIECE", 1000)
