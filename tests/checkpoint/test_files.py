"""Files are written past the page cache, whatever their pieces' offsets and sizes."""

import os
import types

import pytest
import torch

from megatrain.checkpoint import files
from tests.inside import sized

SIZES = (123, 4096 - 123, 1, 4095, 3 * 4096 + 7, 20_000, 4096, 5)


def written(path):
    """A file of pieces with sizes like these, written last piece first."""
    data = torch.randint(256, (sum(SIZES),), dtype=torch.uint8)
    pieces = list(zip(data.split(SIZES), torch.tensor(SIZES).cumsum(0).tolist(), strict=True))
    with files.NewFile(path) as file:
        for piece, end in reversed(pieces):
            file.write(piece.numpy().data, end - len(piece))
    return data.numpy().tobytes()


@pytest.fixture
def calls(monkeypatch):
    """`(handle, bytes, offset)` of all writes from now on; direct ones in blocks of two pages."""
    made: list[tuple[int, int, int]] = []

    def pwrite(handle, part, offset):
        made.append((handle, len(part), offset))
        return os.pwrite(handle, part, offset)

    sized(monkeypatch, files, _DIRECT_BYTES=8192)
    monkeypatch.setattr(files, "os", types.SimpleNamespace(**vars(os) | {"pwrite": pwrite}))
    return made


def test_whole_blocks_go_past_the_page_cache(tmp_path, calls):
    assert written(tmp_path / "file") == (tmp_path / "file").read_bytes()
    [direct] = {handle for handle, size, _ in calls if size >= 4096}
    past = [(size, offset) for handle, size, offset in calls if handle == direct]
    assert all(size % 4096 == offset % 4096 == 0 and size <= 8192 for size, offset in past)
    rest = sum(SIZES) - sum(size for size, _ in past)
    assert rest < 2 * 4096 * len(SIZES)
    assert all(size < 4096 for handle, size, _ in calls if handle != direct)
