"""Planes on a disk: what they take, what they need, and a disk that fails."""

from pathlib import Path

import pytest
from torch import Tensor

from megatrain import DoesNotFit, Engine, InputError, Placement, RunFailed
from megatrain.checkpoint import verify
from megatrain.device import CpuDevice, disk
from megatrain.plane_file import BLOCK, PlaneFile
from tests.checkpoint.cases import ThreadedDevice, state
from tests.parity.cases import llama, make_batches, make_engine, same

ON_DISK = Placement(slots=1, disk_moments=99, disk_remainder=1)


def test_planes_on_a_disk_take_lanes_of_host_memory_alone(tmp_path: Path) -> None:
    engine = make_engine(llama(), precision="bf16", placement=ON_DISK, disk=tmp_path)
    plain = make_engine(llama(), precision="bf16").memory()
    memory, tiles = engine.memory(), engine._store.tiles
    largest = max(tile.layout.trainable_numel for tile in tiles)
    assert memory["host_moments_bytes"] == 0 < plain["host_moments_bytes"]
    assert 0 < memory["host_remainder_bytes"] < plain["host_remainder_bytes"]
    lane = memory["host_disk_lanes_bytes"] / 4
    assert 8 * largest <= lane <= 10 * largest + 3 * BLOCK
    assert plain["host_disk_lanes_bytes"] == 0
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_what_they_need_is_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="on a disk .*none is given; set disk to a folder"):
        make_engine(llama(), placement=ON_DISK, disk=None)
    with pytest.raises(DoesNotFit, match="and disk_space is 1 MiB; raise it"):
        make_engine(llama(), placement=ON_DISK, disk=tmp_path, disk_space=4096)
    with pytest.raises(InputError, match="disk_space is not a size: 'x'"):
        make_engine(llama(), placement=ON_DISK, disk=tmp_path, disk_space="x")


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("device", [CpuDevice, ThreadedDevice])
def test_a_disk_that_fails_ends_the_run_and_leaves_the_checkpoint(
    device: type[CpuDevice], verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a tile: what it has made of the weights is saved by nobody."""
    monkeypatch.setattr(disk, "PIECE", BLOCK)
    steps, move, calls = make_batches(3), getattr(PlaneFile, verb), []

    def failing(file: PlaneFile, offset: int, tensor: Tensor) -> None:
        calls.append(offset)
        if len(calls) == 4:
            raise RunFailed("the disk fails")
        move(file, offset, tensor)

    engine = make_engine(
        llama(), precision="bf16", placement=ON_DISK, disk=tmp_path, device=device()
    )
    engine.step(steps[0])
    wanted = state(engine)
    engine.save(tmp_path / "saved")
    monkeypatch.setattr(PlaneFile, verb, failing)
    with pytest.raises(RunFailed, match="the disk fails"):
        engine.step(steps[1])
        engine.step(steps[2])
    with pytest.raises(RunFailed):
        engine.save(tmp_path / "broken")
    assert not (tmp_path / "broken").exists()
    monkeypatch.undo()
    verify(tmp_path / "saved")
    with Engine.load(tmp_path / "saved", device="cpu", disk=tmp_path) as again:
        assert same(state(again), wanted)
