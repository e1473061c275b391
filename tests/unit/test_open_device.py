"""Which GPU a device's name means, as torch has it; no GPU is opened."""

import pytest

from megatrain import InputError
from megatrain.device import cuda, open_device


@pytest.fixture
def opened(monkeypatch):
    """Three GPUs, of which torch takes the second; what was opened of them."""
    numbers: list[tuple[int, bool]] = []

    def note(index, *, shared):
        numbers.append((index, shared))

    for name, value in {"available": True, "count": 3, "current": 1}.items():
        monkeypatch.setattr(cuda, name, lambda value=value: value)
    monkeypatch.setattr(cuda, "CudaDevice", note)
    return numbers


@pytest.mark.parametrize(
    ("name", "rank", "number"),
    [(None, None, 1), ("auto", None, 1), ("cuda", None, 1), ("cuda:0", None, 0),
     (None, 0, 0), ("cuda", 2, 2), ("cuda:1", 2, 1)],
)  # fmt: skip
def test_a_gpu_without_a_number_is_the_ranks_or_torchs_current_one(name, rank, number, opened):
    open_device(name, rank)
    assert opened == [(number, rank is not None)]


def test_a_gpu_that_is_not_there_is_refused(opened):
    with pytest.raises(InputError, match="cuda:3 was asked for, but torch sees 3 GPUs"):
        open_device("cuda:3")
    assert not opened
