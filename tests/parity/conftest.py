from collections.abc import Iterator

import pytest
import torch

from megatrain.engine import sink


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The order of sums, and so the last bits, must not depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice's gradient leaves in several pieces."""
    monkeypatch.setattr(sink, "PIECE", 1000)
