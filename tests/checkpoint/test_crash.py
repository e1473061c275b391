"""A save that dies at any of its calls to the system leaves whole checkpoints, old or new."""

import contextlib
import itertools
import os
import shutil
import types
from pathlib import Path

import pytest
import torch

from megatrain import Engine, RunFailed
from megatrain.base import whole_files
from megatrain.checkpoint import files, put_right, rotate, verify, whole_checkpoints
from tests.checkpoint.cases import batches, engine_of, state
from tests.inside import set_steps, sized
from tests.parity.cases import same
from tests.sweeps import swept

CALLS = {
    "os": (
        "open", "pwrite", "fsync", "posix_fadvise", "close", "rename", "lstat",
    ),
    "shutil": ("rmtree",),
}  # fmt: skip


class Calls:
    """Counts the calls that checkpoints make to the system; from the `at`-th on, they fail.

    With `dead` all that follow fail too, as if the process had been killed at that moment.
    """

    def __init__(self, patch, at=float("inf"), *, dead=False):
        self.at, self.dead, self.count = at, dead, itertools.count()
        for module, names in CALLS.items():
            real = getattr(files, module)
            fake = types.SimpleNamespace(**vars(real))
            for name in names:
                if hasattr(real, name):  # posix_fadvise: not on a Mac
                    setattr(fake, name, self._failing(name, getattr(real, name)))
            for part in (files, whole_files):
                patch.setattr(part, module, fake)

    def _failing(self, name, call):
        def counted(*args, **kwargs):
            number = next(self.count)
            if number == self.at or (self.dead and number > self.at):
                if name == "close":
                    call(*args)  # the system does this for a process that dies
                raise OSError(5, "Input/output error")
            return call(*args, **kwargs)

        return counted


@pytest.fixture
def engine():
    return engine_of(sizes={"num_hidden_layers": 1, "vocab_size": 128})


@pytest.fixture(autouse=True)
def large_pieces(monkeypatch, small_pieces):
    sized(monkeypatch, files, PIECE_BYTES=1 << 20)  # one for a plane


def count_calls(work, *given):
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        work(*given)
        return next(calls.count)


@swept(together=0, dead={"an error": False, "a kill": True}, name=["new", "old"])
@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_whatever_call_fails_a_whole_checkpoint_is_there(engine, every, name, dead, tmp_path):
    """Into a new folder, and over an old one. The first and the last calls are always tried."""
    folder = tmp_path / "run"
    engine.step(batches(1)[0])
    engine.save(folder / "old")
    old = state(engine)
    calls = count_calls(engine.save, tmp_path / "count" / "new")
    assert calls > 60
    failed = 0
    tried = sorted({*range(12), *range(0, calls, every), *range(calls - 12, calls + 8)})
    for at in tried:
        set_steps(engine, engine.steps + 1)  # so that one checkpoint is known from another
        with pytest.MonkeyPatch.context() as patch:
            Calls(patch, at, dead=dead)
            try:
                engine.save(folder / name)
            except RunFailed:
                failed += 1
        if dead:
            put_right(folder)
        there = {path.name for path in folder.iterdir()}
        assert there <= {"old", name, ".old.checkpoint-replaced"}, at
        assert [path.name for path in whole_checkpoints(folder)][-1] == "old", at
        for path in whole_checkpoints(folder):
            verify(path)
        if at % 20 == 0:
            assert same(state(Engine.load(folder / "old", device="cpu")), old)
        if name == "new":
            shutil.rmtree(folder / name, ignore_errors=True)
    assert failed >= len(tried) - 20


def test_whatever_call_of_a_rotation_fails_no_half_checkpoint_is_there(engine, tmp_path):
    whole = tmp_path / "whole"
    for number in range(4):
        set_steps(engine, number)
        engine.save(whole / f"step {number}")
    shutil.copytree(whole, tmp_path / "count")
    calls = count_calls(rotate, tmp_path / "count", 1)
    for at in range(calls - 8, calls):  # the removals; all calls before only read
        folder = tmp_path / str(at)
        shutil.copytree(whole, folder)
        with pytest.MonkeyPatch.context() as patch:
            Calls(patch, at, dead=True)
            with contextlib.suppress(OSError):
                rotate(folder, 1)
        left = whole_checkpoints(folder)
        assert left[0].name == "step 3"
        for path in left:
            verify(path)
        put_right(folder)
        assert sorted(left) == sorted(folder.iterdir())


def test_everything_is_on_the_disk_before_it_is_named(engine, tmp_path, monkeypatch):
    order: list[str] = []
    names: dict[int, str] = {}

    def note(name, what):
        real = getattr(fake, name)

        def noted(*args):
            result = real(*args)
            what(result, *args)
            return result

        setattr(fake, name, noted)

    fake = types.SimpleNamespace(**vars(files.os))
    for module in (files, whole_files):
        monkeypatch.setattr(module, "os", fake)
    note("open", lambda handle, path, *rest: names.update({handle: Path(path).name}))
    close = fake.close
    fake.close = lambda handle: (names.pop(handle), close(handle))  # then others get its number
    note("fsync", lambda result, handle: order.append(names.get(handle, "a document")))
    note("rename", lambda *args: order.append("rename"))
    engine.save(tmp_path / "saved")
    manifest, rename = order.index(".manifest.json.partial"), order.index("rename")
    tiles = [i for i, name in enumerate(order) if name.endswith(".safetensors")]
    assert len(tiles) == 5
    assert max(tiles) < order.index("tiles") < manifest
    assert order.index("model") < manifest
    assert order[manifest + 1 : rename] == [".saved.checkpoint-partial"]
    assert order[rename + 1 :] == [tmp_path.name]


def test_leftovers_of_killed_saves_go_at_the_next_save(engine, tmp_path):
    for end in ("a.checkpoint-partial", "saved.checkpoint-partial", "c.checkpoint-replaced"):
        (tmp_path / f".{end}" / "tiles").mkdir(parents=True)
        (tmp_path / f".{end}" / "tiles" / "0").write_text("half")
    for name in ("c", ".mine.partial"):
        (tmp_path / name).mkdir()
    engine.save(tmp_path / "b")
    (tmp_path / "b").rename(tmp_path / ".b.checkpoint-replaced")
    engine.save(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path)) == [".mine.partial", "b", "c", "saved"]
    assert whole_checkpoints(tmp_path) == [tmp_path / "saved", tmp_path / "b"]


# Files are written past the page cache, whatever their pieces' offsets and sizes.


SIZES = (123, 4096 - 123, 1, 4095, 3 * 4096 + 7, 20_000, 4096, 5)


def written(path):
    """A file of pieces with sizes like these, written last piece first."""
    data = torch.randint(256, (sum(SIZES),), dtype=torch.uint8)
    pieces = list(zip(data.split(SIZES), torch.tensor(SIZES).cumsum(0).tolist(), strict=True))
    path.touch()
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
