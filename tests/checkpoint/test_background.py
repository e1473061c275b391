"""Saving while training: the state is that of the call, and training does not notice."""

import errno
import itertools
import threading
import time
from unittest import mock

import pytest

from megatrain import Engine, InputError, Placement, RunFailed
from megatrain.checkpoint import files, verify, whole_checkpoints
from megatrain.device import CpuDevice
from tests.checkpoint.cases import SlowWrites, ThreadedDevice, batches, engine_of, state, tiny_pool
from tests.inside import store_of
from tests.parity.cases import same
from tests.race.late import LateDevice
from tests.sweeps import swept

RESIDENT = {"resident": ("embedding", "layer 1")}
ON_DISK = {"resident": ("layer 1",), "disk_moments": 2, "disk_remainder": 1, "disk_weights": 2}
DEVICES = {"program order": CpuDevice, "threads": ThreadedDevice, "late": LateDevice}


def saved_state(folder):
    return state(Engine.load(folder, device="cpu", disk=folder.parent))


CHOICES = {"streamed": {}, "resident": RESIDENT, "disk": ON_DISK}


@swept(together=0, device=DEVICES, clip=[0.5, None], choices=CHOICES)
def test_saves_change_no_bit_of_the_training(device, clip, choices, tmp_path):
    steps = batches(3)
    options = {"precision": "bf16", "clip": clip, "placement": tiny_pool(3, **choices)}
    wanted, losses = [], []
    with engine_of(device="cpu", **options) as engine:
        for step in steps:
            losses.append(engine.step(step).loss)
            wanted.append(state(engine))
    with engine_of(device=device(), **options) as engine:
        for step in steps:
            assert engine.step(step).loss == losses[engine.steps - 1]
            engine.save(tmp_path / f"after {engine.steps}", wait=False)
        assert same(state(engine), wanted[-1])
    for number, then in enumerate(wanted, start=1):
        assert same(saved_state(tmp_path / f"after {number}"), then)


@swept(together=0, clip=[0.5, None], blocks=[1, 5, 1000], choices=CHOICES)
def test_the_state_is_that_of_the_call(clip, blocks, choices, tmp_path, monkeypatch):
    """Writers that get nowhere at first, so that the updates of a step overtake them."""
    steps = batches(3)
    slow = SlowWrites(monkeypatch)
    options = {"precision": "bf16", "clip": clip, "placement": tiny_pool(blocks, **choices)}
    with engine_of(device=ThreadedDevice(), **options) as engine:
        for step in steps[:2]:
            engine.step(step)
        slow.may_go_on.clear()

        def go_on_when_waited_for():
            while not slow.may_go_on.is_set():
                time.sleep(0.005)
                if engine.saving is not None and engine.saving.snapshot.waited:
                    slow.may_go_on.set()

        threading.Thread(target=go_on_when_waited_for).start()
        saving = engine.save(tmp_path / "saved", wait=False)
        engine.step(steps[2])
        engine.flush()
        slow.may_go_on.set()
        saving.wait()
    assert saving.snapshot.moved_bytes > 0
    assert slow.count > 60
    assert verify(tmp_path / "saved").step == 2
    with engine_of(**options, device="cpu") as engine:
        for step in steps[:2]:
            engine.step(step)
        assert same(saved_state(tmp_path / "saved"), state(engine))


def test_only_updates_wait_for_the_disk(tmp_path, monkeypatch):
    """With no writer getting anywhere and no spare memory, a step is done all the same."""
    slow = SlowWrites(monkeypatch)
    steps = batches(3)
    with engine_of(device=ThreadedDevice(), placement=tiny_pool(0)) as engine:
        engine.step(steps[0])
        engine.flush()
        slow.may_go_on.clear()
        saving = engine.save(tmp_path / "saved", wait=False)
        before = state_without_flush(engine)
        engine.step(steps[1])  # the thread that launches work is not held up
        time.sleep(0.1)
        assert same(state_without_flush(engine), before)  # no update has overtaken the writers
        assert not saving.done
        assert engine.saving is saving
        slow.may_go_on.set()
        engine.step(steps[2])
        saving.wait()
        assert engine.saving is None
        assert saving.snapshot.moved_bytes == 0
    with engine_of(placement=tiny_pool(0)) as engine:
        engine.step(steps[0])
        assert same(saved_state(tmp_path / "saved"), state(engine))


def state_without_flush(engine):
    planes = [(t.name, plane) for t in store_of(engine).tiles for plane in t.planes.values()]
    return {f"{name} {i}": plane.data.clone() for i, (name, plane) in enumerate(planes)}


EVERYTHING = {"resident": ("embedding", *(f"layer {n}" for n in range(3)), "head")}


@pytest.mark.parametrize("choices", [{}, RESIDENT, EVERYTHING], ids=["none", "some", "all"])
def test_spare_memory_takes_the_updates_place(choices, tmp_path, monkeypatch):
    """With memory for all of it, training runs on although nothing is written."""
    slow = SlowWrites(monkeypatch)
    steps = batches(4)
    placement = Placement(slots=1, **choices)
    with engine_of(device=ThreadedDevice(), placement=placement) as engine:
        engine.step(steps[0])
        engine.flush()
        slow.may_go_on.clear()
        saving = engine.save(tmp_path / "saved", wait=False)
        for step in steps[1:]:
            engine.step(step)
        engine.flush()
        written = 4 * 4096  # that each of the writers may have had in its hands
        assert saving.snapshot.moved_bytes >= 12 * engine.num_parameters - 2 * written
        slow.may_go_on.set()
        saving.wait()


@pytest.mark.parametrize("blocks", [0, 3])
def test_the_call_waits_for_no_disk(blocks, tmp_path, monkeypatch):
    """Not even where everything rests on the device and must leave it through little memory."""
    slow = SlowWrites(monkeypatch)
    placement = tiny_pool(blocks, **EVERYTHING)
    with engine_of(device=ThreadedDevice(), placement=placement) as engine:
        engine.step(batches(1)[0])
        wanted = state(engine)
        slow.may_go_on.clear()
        saving = engine.save(tmp_path / "saved", wait=False)
        assert not saving.done
        slow.may_go_on.set()
        saving.wait()
    assert same(saved_state(tmp_path / "saved"), wanted)


def test_a_save_waits_for_the_one_before_and_closing_for_both(tmp_path, monkeypatch):
    slow = SlowWrites(monkeypatch, seconds=0.002)
    slow.may_go_on.clear()
    engine = engine_of(device=ThreadedDevice())
    first = engine.save(tmp_path / "first", wait=False)
    threading.Timer(0.2, slow.may_go_on.set).start()
    second = engine.save(tmp_path / "second", wait=False)
    assert first.done
    engine.close()
    assert second.done
    for saving in (first, second):
        saving.wait()
        verify(saving.folder)


@swept(together=1, device=DEVICES, at=[1, 30])
def test_a_full_disk_costs_the_save_and_nothing_else(device, at, tmp_path, monkeypatch):
    steps = batches(4)
    placement = tiny_pool(2, **RESIDENT)
    with engine_of(placement=placement, device=device()) as engine:
        engine.step(steps[0])
        engine.save(tmp_path / "whole")
        with monkeypatch.context() as patch:
            _full_from(patch, at)
            saving = engine.save(tmp_path / "failed", wait=False)
            engine.step(steps[1])
            with pytest.raises(RunFailed, match=r"failed: cannot save.*step 1: No space left"):
                saving.wait()
        assert saving.done
        assert isinstance(saving.error, RunFailed)
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]
        assert engine.saving is None
        assert whole_checkpoints(tmp_path)[0] == tmp_path / "whole"
        engine.step(steps[2])
        saving = engine.save(tmp_path / "again", wait=False)
        engine.step(steps[3])
        saving.wait()
        end = state(engine)
    verify(tmp_path / "whole")
    with Engine.load(tmp_path / "again", device="cpu") as engine:
        engine.step(steps[3])
        assert same(state(engine), end)


def _full_from(patch, at):
    count = itertools.count()
    write = files.NewFile.write

    def full(file, data, offset):
        if next(count) >= at:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data, offset)

    patch.setattr(files.NewFile, "write", full)


@pytest.mark.parametrize("name", ["a link", "a link to a folder", "two\nlines", "an error"])
def test_an_attachment_that_could_not_be_read_back_fails_the_save(name, tmp_path):
    """The checkpoint that is there stays."""
    target = {"a link": "/etc/hostname", "a link to a folder": "/etc"}.get(name)

    def attach(folder):
        if name == "an error":
            raise ValueError("no tokenizer")
        if target is None:
            (folder / name).write_text("")
        else:
            (folder / name).symlink_to(target)

    engine = engine_of()
    engine.save(tmp_path / "saved")
    with pytest.raises(RunFailed, match="links are not|no name that every|no tokenizer"):
        engine.save(tmp_path / "saved", attach=attach)
    verify(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize(
    ("thread", "work", "choices"),
    [("update", "kernels.update", {}), ("save", "checkpoint.snapshot.Snapshot.release", RESIDENT)],
)
def test_a_dead_thread_fails_the_save(thread, work, choices, tmp_path):
    """Its events pass, but the planes are not what the versions say."""
    steps = batches(2)
    engine = engine_of(device=ThreadedDevice(), placement=Placement(**choices))
    engine.step(steps[0])
    engine.flush()
    with mock.patch(f"megatrain.{work}", side_effect=MemoryError):
        engine.step(steps[1])
        saving = engine.save(tmp_path / "saved", wait=False)
        with pytest.raises(RunFailed, match=f"{thread} thread failed"):
            saving.wait()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("foreign", ["thesis.tex", ".git"])
def test_a_file_or_a_folder_with_other_files_is_refused_and_left_alone(foreign, tmp_path):
    """A save replaces a folder, so it must be a checkpoint: else what is in it would be lost."""
    (tmp_path / "a file").write_text("mine")
    with engine_of() as engine:
        engine.save(tmp_path / "saved")
        (tmp_path / "saved" / foreign).mkdir()
        for folder in (tmp_path, tmp_path / "saved"):
            with pytest.raises(InputError, match="which is no part of a checkpoint"):
                engine.save(folder)
        with pytest.raises(InputError, match="is a file"):
            engine.save(tmp_path / "a file")
    assert (tmp_path / "saved" / foreign).is_dir()
    assert (tmp_path / "a file").read_text() == "mine"


def test_a_damaged_checkpoint_and_a_link_that_has_the_name_give_way(tmp_path):
    with engine_of() as engine:
        for lost in ("manifest.json", "extra.json"):
            engine.save(tmp_path / "saved")
            (tmp_path / "saved" / lost).unlink()
        engine.save(tmp_path / "saved")
        (tmp_path / "latest").symlink_to("saved")
        for _ in range(2):
            engine.save(tmp_path / "latest")
    assert verify(tmp_path / "saved").settings.steps == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "saved"]
    assert not (tmp_path / "latest").is_symlink()
