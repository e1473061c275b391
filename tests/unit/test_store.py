"""Planes in host memory: exact masters in 12 bytes, whichever dtype they come in."""

import pytest
import torch

from megatrain import AdamW, InputError
from megatrain.device import CpuDevice
from megatrain.placement import Placement
from megatrain.store.store import Store
from megatrain.tile import TileLayout

SHAPE = (3, 50)


def layouts():
    return [
        TileLayout("first", [("a", torch.Size(SHAPE), 0), ("b", torch.Size([7]), None)], wide="b"),
        TileLayout("second", [("c", torch.Size([2, 2]), 1)]),
        TileLayout("empty", []),
    ]


def store(dtype=torch.bfloat16, **options):
    options.setdefault("rule", AdamW())
    return Store(CpuDevice(), layouts(), dtype, **options)


def values(dtype):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("resident", [(), ("first",)])
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_masters_are_what_was_written(dtype, compute, resident):
    kept = store(compute, placement=Placement(resident=resident))
    tile, entry = next(kept.entries())
    written = values(dtype)
    tile.write_master(entry, torch.full(SHAPE, 3.3))  # something to be overwritten
    tile.write_master(entry, written)
    master = tile.read_master(entry)
    assert master.dtype == torch.float32
    assert torch.equal(master, written.float())
    streamed = entry.view(tile.weights.data)
    assert streamed.dtype == compute
    if compute == torch.float32:
        assert torch.equal(streamed, master)
    else:  # a nearest one; of two that are equally near, the larger
        nearest = master.bfloat16().float()
        tie = (nearest - master).abs() == (streamed.float() - master).abs()
        assert (tie | (streamed.float() == nearest)).all()


def test_writing_a_parameter_touches_no_other():
    kept = store()
    first, second = kept.tiles[:2]
    for tile, entry in kept.entries():
        tile.write_master(entry, torch.full(entry.shape, 1.1))
    a = first.layout.by_name["a"]
    first.write_master(a, values(torch.float32))
    for tile, name in ((first, "b"), (second, "c")):
        entry = tile.layout.by_name[name]
        assert torch.equal(tile.read_master(entry), torch.full(entry.shape, 1.1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_master_read_is_a_copy(dtype):
    kept = store(dtype)
    tile, entry = next(kept.entries())
    tile.write_master(entry, values(torch.float32))
    tile.read_master(entry).zero_()
    assert torch.equal(tile.read_master(entry), values(torch.float32))


def test_planes_begin_at_zero_on_pages_of_their_own():
    kept = store()
    for tile in kept.tiles:
        assert tile.version == 0
        assert tile.updated is None
        for buffer in tile.planes.values():
            assert not buffer.data.any()
            assert buffer.data.numel() == 0 or buffer.data.data_ptr() % 4096 == 0
    first = kept.tiles[0]
    assert [len(m.data) for m in first.states.values()] == [first.layout.trainable_numel] * 2


def test_without_training_there_are_weights_only():
    for dtype in (torch.bfloat16, torch.float32):
        kept = store(dtype, rule=None)
        assert all(not tile.states and tile.remainder is None for tile in kept.tiles)
        planes = kept.bytes_by_plane()
        assert planes["weights"] > 0 == planes["remainder"] + planes["moments"]


def test_a_tile_that_does_not_exist_cannot_rest_on_the_device():
    with pytest.raises(InputError, match="no tile 'third'; it has first, second, empty"):
        store(placement=Placement(resident=("first", "third")))
