"""The flat layout: every parameter has its place, groups are runs, frozen ones come last."""

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.tile import TileLayout
from megatrain.tile.layout import ALIGNMENT

shapes = st.lists(st.integers(1, 40), min_size=0, max_size=3).map(torch.Size)
groups = st.one_of(st.none(), st.integers(0, 3))
parameters = st.lists(st.tuples(shapes, groups), max_size=12).map(
    lambda found: [(f"p{i}", shape, group) for i, (shape, group) in enumerate(found)]
)


@given(parameters)
def test_entries_are_disjoint_aligned_and_complete(given_parameters):
    layout = TileLayout("tile", given_parameters)
    assert {(e.name, e.shape, e.group) for e in layout.entries} == {
        (name, tuple(shape), group) for name, shape, group in given_parameters
    }
    end = 0
    for entry in layout.entries:
        assert entry.offset >= end
        assert entry.offset % ALIGNMENT == 0
        end = entry.offset + entry.numel
    assert end <= layout.numel < end + ALIGNMENT
    assert layout.num_parameters == sum(prod(shape) for _, shape, _ in given_parameters)


@given(parameters, st.data())
def test_runs_cover_each_group_once_and_nothing_frozen(given_parameters, data):
    layout = TileLayout("tile", given_parameters)
    trainable = [group for _, _, group in given_parameters if group is not None]
    first = {entry.name: entry.group for entry in layout.trainable}
    assert [group for group, _, _ in layout.runs(first)] == sorted(set(trainable))
    moved = {name: data.draw(st.integers(0, 3)) for name in first}
    for groups in (first, moved):
        runs = layout.runs(groups)
        assert all(one[0] != other[0] for one, other in pairwise(runs))
        covered = {place: group for group, start, stop in runs for place in range(start, stop)}
        assert set(covered) == set(range(layout.trainable_numel))
        for entry in layout.entries:
            places = range(entry.offset, entry.offset + entry.numel)
            assert {covered.get(place) for place in places} <= {groups.get(entry.name)}
    assert layout.trainable == tuple(e for e in layout.entries if e.group is not None)


@given(parameters, st.data())
def test_frozen_ones_of_more_bits_come_before_the_others(given_parameters, data):
    wide = [name for name, _, _ in given_parameters if data.draw(st.booleans())]
    layout = TileLayout("tile", given_parameters, wide=wide)
    order = [0 if e.group is not None else 1 if e.wide else 2 for e in layout.entries]
    assert order == sorted(order)
    assert {e.name for e in layout.entries if e.wide} == {
        name for name, _, group in given_parameters if group is None and name in wide
    }
    assert layout.trainable_numel == TileLayout("tile", given_parameters).trainable_numel


@given(parameters)
def test_views_share_the_plane_and_keep_apart(given_parameters):
    layout = TileLayout("tile", given_parameters)
    plane = torch.full((layout.numel,), -1.0)
    for number, view in enumerate(layout.views(plane).values()):
        assert (view == -1).all()
        view.fill_(number)
    for number, (name, view) in enumerate(layout.views(plane).items()):
        assert (view == number).all()
        assert torch.equal(layout.by_name[name].view(plane), view)


@given(parameters, st.integers(1, 4), st.data())
def test_copies_in_fp32_are_whole_wherever_ranks_cut(given_parameters, ranks, data):
    """Each rank's copies lie in its block; together they are the parameters."""
    fp32 = [name for name, _, _ in given_parameters if data.draw(st.booleans())]
    layout = TileLayout("tile", given_parameters, fp32=fp32, ranks=ranks)
    plane, values = torch.zeros(layout.numel, dtype=torch.bfloat16), torch.rand(layout.numel)
    for pieces in layout.copies.values():
        for start, stop, at in pieces:
            plane[at : at + 2 * (stop - start)].view(torch.float32).copy_(values[start:stop])
            block = layout.trainable_numel // ranks
            rank = start // block
            assert (stop - 1) // block == rank
            assert [*layout.blocks(rank)][1][0] <= at < sum([*layout.blocks(rank)][1])
    views = layout.views(plane)
    assert layout.copies.keys() == {e.name for e in layout.trainable if e.name in fp32 and e.numel}
    for name in layout.copies:
        assert torch.equal(views[name], layout.by_name[name].view(values))
    assert {name for name, view in views.items() if view.dtype == torch.float32} >= {
        e.name for e in layout.entries if e.name in fp32 and e.numel
    }


def test_a_tile_without_parameters():
    layout = TileLayout("nothing", [])
    assert layout.numel == layout.trainable_numel == layout.num_parameters == 0
    assert layout.runs({}) == []
