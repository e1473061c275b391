"""Saves beside a GPU that trains: exact, resumed bit for bit, and no step changed by them."""

import threading
import time

import pytest
import torch

from megatrain import AdamW, Engine, Placement
from megatrain.checkpoint import files, verify
from tests.gpu.test_cuda import model, steps
from tests.inside import sized, store_of

pytestmark = pytest.mark.gpu

PLACEMENTS = {
    "streamed": {"slots": 3},
    "resident": {"slots": 2, "resident": ("embedding", "layer 0", "layer 1", "layer 2", "head")},
    "on the host": {"slots": 2, "layer_inputs": "host", "save_activations": 2},
}


class Disk:
    """One that updates overtake: after `stall()` nothing is written for a while."""

    def __init__(self, monkeypatch):
        self._stalled_until = 0.0
        self._goes_on = threading.Event()
        write = files.NewFile.write

        def late(*args):
            self._goes_on.wait(max(0.0, self._stalled_until - time.monotonic()))
            write(*args)

        monkeypatch.setattr(files.NewFile, "write", late)

    def stall(self, seconds=1.0):
        """For the next save; one that is still going on would use the time up."""
        self._goes_on.clear()
        self._stalled_until = time.monotonic() + seconds

    def go_on(self):
        self._goes_on.set()


@pytest.fixture(autouse=True)
def disk(monkeypatch):
    """With many pieces a tile."""
    sized(monkeypatch, files, PIECE_BYTES=64 << 10)
    return Disk(monkeypatch)


def numbers(engine):
    """Masters and moments, on the CPU."""
    masters = [master for _, master in engine.named_masters()]
    return masters + [m.data.cpu() for tile in store_of(engine).tiles for m in tile.states.values()]


@pytest.mark.parametrize("blocks", [2, 1000])
@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_saves_are_exact_and_change_nothing(placement, clip, blocks, tmp_path, disk):
    """Where little can be set aside the updates wait, else it is all set aside and none waits."""
    batches, room_for_all = steps(6), blocks == 1000
    chosen = Placement(**PLACEMENTS[placement], save_bytes=blocks * (64 << 10))
    options = {"max_grad_norm": clip, "placement": chosen, "device": "cuda"}
    with Engine(model(), optimizer=AdamW(lr=1e-3), **options) as engine:
        wanted = [(r.loss, r.grad_norm) for r in map(engine.step, batches)]
        end = numbers(engine)
        everything = sum(p.data.nbytes for t in store_of(engine).tiles for p in t.planes.values())
    saves = []
    with Engine(model(), optimizer=AdamW(lr=1e-3), **options) as engine:
        got = []
        for number, batch in enumerate(batches, start=1):
            result = engine.step(batch)
            got.append((result.loss, result.grad_norm))
            if room_for_all and number in (3, 5):
                engine.flush()
                disk.go_on()
            if number in (2, 4):
                for saving in saves:
                    saving.wait()
                disk.stall(5.0 if room_for_all else 1.0)
                saves.append(engine.save(tmp_path / f"after {number}", wait=False))
        saves[-1].wait()
        assert got == wanted
        assert all(map(torch.equal, numbers(engine), end))
    for saving in saves:
        if room_for_all:
            assert (saving.snapshot.moved_bytes, saving.snapshot.waited) == (everything, 0)
        else:
            assert saving.snapshot.moved_bytes > 0
            assert saving.snapshot.waited > 0
    for number in (2, 4):
        verify(tmp_path / f"after {number}")
        with Engine.load(tmp_path / f"after {number}") as engine:
            assert engine.placement == chosen
            again = [(r.loss, r.grad_norm) for r in map(engine.step, batches[number:])]
            assert again == wanted[number:]
            assert all(map(torch.equal, numbers(engine), end))


def test_the_launching_thread_does_not_wait_for_the_disk(tmp_path, disk):
    batches = steps(2)
    with Engine(
        model(), optimizer=AdamW(), placement=Placement(slots=2, save_bytes=0), device="cuda"
    ) as engine:
        engine.step(batches[0])
        engine.flush()
        disk.stall()
        saving = engine.save(tmp_path / "saved", wait=False)
        engine.step(batches[1])  # its updates wait, the step's own end does not
        assert not saving.done
        saving.wait()
    verify(tmp_path / "saved")


def test_compiled_layers_and_kept_graphs_resume_alike(tmp_path):
    batches = steps(6, uneven=False)
    options = {"optimizer": AdamW(lr=1e-3), "device": "cuda", "tokens_per_step": 256}
    with Engine(model(), **options) as engine:
        for batch in batches[:4]:
            engine.step(batch)
        engine.save(tmp_path / "saved")
        placement = engine.placement
        wanted = [(r.loss, r.grad_norm) for r in map(engine.step, batches[4:])]
    with Engine.load(tmp_path / "saved") as engine:
        assert engine.placement == placement
        assert [(r.loss, r.grad_norm) for r in map(engine.step, batches[4:])] == wanted
