"""Planes on a disk: what they take, what they need, and a disk that fails."""

from dataclasses import replace

import pytest
from torch import nn

from megatrain import DoesNotFit, Engine, InputError, Placement, RunFailed
from megatrain.checkpoint import verify
from megatrain.device import CpuDevice, disk
from megatrain.device.disk import BLOCK, PlaneFile
from tests.checkpoint.cases import ThreadedDevice, state
from tests.inside import parts_of, sized, store_of
from tests.parity.cases import frozen, llama, make_batches, make_engine, same
from tests.sweeps import swept

ON_DISK = Placement(slots=1, disk_moments=99, disk_remainder=1)
ALL = replace(ON_DISK, disk_remainder=99, disk_weights=99)


def test_planes_on_a_disk_take_lanes_of_host_memory_alone(tmp_path):
    placement = replace(ON_DISK, disk_weights=99)
    engine = make_engine(llama(), precision="bf16", placement=placement, disk=tmp_path)
    plain = make_engine(llama(), precision="bf16").memory()
    memory, tiles = engine.memory(), store_of(engine).tiles
    layers = [tile.layout.numel for tile in tiles if tile.name.startswith("layer")]
    largest = max(tile.layout.trainable_numel for tile in tiles)
    assert memory["host_moments_bytes"] == 0 < plain["host_moments_bytes"]
    assert 0 < memory["host_remainder_bytes"] < plain["host_remainder_bytes"]
    assert plain["host_weights_bytes"] - memory["host_weights_bytes"] >= 2 * sum(layers) > 0
    lanes = memory["host_disk_lanes_bytes"] - 2 * max(layers)  # the lane to the slots
    assert 4 * 8 * largest <= lanes <= 4 * (12 * largest + 4 * BLOCK) + BLOCK
    assert plain["host_disk_lanes_bytes"] == 0
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_what_they_need_is_asked_for_by_name(tmp_path):
    with pytest.raises(InputError, match="on a disk .*none is given; set disk to a folder"):
        make_engine(llama(), placement=ON_DISK, disk=None)
    with pytest.raises(DoesNotFit, match="and disk_space is 1 MiB; raise it"):
        make_engine(llama(), placement=ON_DISK, disk=tmp_path, disk_space=4096)
    with pytest.raises(InputError, match="disk_space: not a size: 'x'"):
        make_engine(llama(), placement=ON_DISK, disk=tmp_path, disk_space="x")


@swept(
    together=1,
    verb=["read", "write", "read weights"],
    device=[CpuDevice, ThreadedDevice],
)
def test_a_disk_that_fails_ends_the_run_and_leaves_the_checkpoint(
    device, verb, tmp_path, monkeypatch
):
    """In the middle of a tile, whose state is saved by nobody; or in a forward, before updates."""
    sized(monkeypatch, disk, PIECE=BLOCK)
    verb, _, of_weights = verb.partition(" ")
    steps, move, calls = make_batches(3), getattr(PlaneFile, verb), []
    engine = make_engine(
        llama(),
        precision="bf16",
        placement=ALL if of_weights else ON_DISK,
        disk=tmp_path,
        device=device(),
    )
    engine.step(steps[0])
    wanted, weights = state(engine), store_of(engine).tiles[3].weights
    engine.save(tmp_path / "saved")

    def failing(file, offset, tensor):
        calls.append(offset)
        if offset == weights.at if of_weights else len(calls) == 4:
            raise RunFailed("the disk fails")
        move(file, offset, tensor)

    monkeypatch.setattr(PlaneFile, verb, failing)
    with pytest.raises(RunFailed, match="the disk fails"):
        engine.step(steps[1])
        engine.step(steps[2])
    if of_weights:
        assert not parts_of(engine).update.torn
    else:
        with pytest.raises(RunFailed):
            engine.save(tmp_path / "broken")
        assert not (tmp_path / "broken").exists()
    monkeypatch.undo()
    verify(tmp_path / "saved")
    with Engine.load(tmp_path / "saved", device="cpu", disk=tmp_path) as again:
        assert same(state(again), wanted)


def test_a_layer_that_is_smaller_than_a_slot_is_read_and_nothing_behind_it():
    def train(placement):
        model, sizes = llama(), {"gate_proj": (32, 16), "up_proj": (32, 16), "down_proj": (16, 32)}
        for name, size in sizes.items():
            setattr(model.model.layers[-1].mlp, name, nn.Linear(*size, bias=False))
            nn.init.ones_(model.get_parameter(f"model.layers.1.mlp.{name}.weight"))
        engine = make_engine(model, precision="bf16", placement=placement, saveable=False)
        engine.step(make_batches(1)[0])
        return state(engine)

    assert same(train(Placement(disk_weights=99)), train(Placement()))


def test_frozen_weights_on_a_disk_are_only_read(tmp_path, monkeypatch):
    """Layers frozen as a whole, and a frozen part of a layer that is trained."""
    sized(monkeypatch, disk, PIECE=BLOCK)
    steps, written = make_batches(2), []
    write = PlaneFile.write

    def noting(file, offset, tensor):
        written.append((offset, tensor.nbytes))
        write(file, offset, tensor)

    def train(**given):
        model = frozen(llama(), lambda name: "layers.0.mlp" in name)
        engine = make_engine(model, precision="bf16", **given)
        monkeypatch.setattr(PlaneFile, "write", noting)
        for step in steps:
            engine.step(step)
        monkeypatch.undo()
        return state(engine), store_of(engine).tiles

    wanted, _ = train()
    found, tiles = train(placement=ALL, disk=tmp_path)
    assert same(found, wanted)
    only_read = [t.weights for t in tiles if t.name.startswith("layer") and not t.layout.trainable]
    assert only_read and written
    for there in only_read:
        assert isinstance(there, disk.DiskBuffer)
        end = there.at + there.data.nbytes
        assert not any(at < end and there.at < at + size for at, size in written)
