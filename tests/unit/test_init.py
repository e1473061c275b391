"""Weights that are drawn: large tensors in pieces, by many threads."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatrain.model import init
from megatrain.model.probe import spec
from megatrain.source.source import open_source
from tests.families.tiny import tiny_config
from tests.inside import sized
from tests.unit.forecast_cases import tiny_config as llama_config
from tests.unit.forecast_cases import tiny_spec

PIECE = 4096


def drawn(model, *, threads=2, seed=3, alike=False):
    values: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        init.initialise(
            model,
            seed,
            lambda name, v: values.update({name: v.clone()}),
            threads=threads,
            alike=alike,
        )
    return values


@pytest.fixture
def pieces(monkeypatch):
    sized(monkeypatch, init, _PIECE=PIECE)


@pytest.mark.usefixtures("pieces")
def test_the_number_of_threads_changes_no_value():
    one, many = drawn(tiny_spec(), threads=1), drawn(tiny_spec(), threads=5)
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.usefixtures("pieces")
def test_no_piece_is_drawn_twice_and_all_have_the_class_s_spread():
    values = drawn(tiny_spec())
    large = [v.flatten() for v in values.values() if v.numel() > PIECE]
    cut = [piece[:PIECE] for flat in large for piece in flat.split(PIECE)]
    assert len(cut) > 1000
    assert len({tuple(piece[:4].tolist()) for piece in cut}) == len(cut)
    spread = llama_config().initializer_range
    assert all(0.9 * spread < float(piece.std()) < 1.1 * spread for piece in cut)
    followed = torch.stack([a @ b for a, b in pairwise(p for p in cut if len(p) == PIECE)])
    assert float(followed.abs().max()) < 6 * spread**2 * PIECE**0.5  # unlike their neighbours


def test_what_is_small_is_drawn_as_torch_draws_it(monkeypatch):
    """The size of a piece matters only to what is larger."""
    whole = drawn(tiny_spec())
    sized(monkeypatch, init, _PIECE=256 * 256)
    cut = drawn(tiny_spec())
    same = {name for name in whole if torch.equal(whole[name], cut[name])}
    small = {name for name in whole if whole[name].numel() <= 256 * 256}
    assert {name for name in whole if "q_proj" in name or "norm" in name} <= small
    assert same == small


@pytest.mark.usefixtures("pieces")
def test_the_seed_changes_every_piece():
    one, other = drawn(tiny_spec(), seed=3), drawn(tiny_spec(), seed=4)
    for name, values in one.items():
        if "norm" not in name:
            assert not torch.isin(values.flatten()[::PIECE], other[name].flatten()[::PIECE]).any()


@pytest.mark.parametrize(("family", "some"), [("llama", True), ("jamba", False)])
def test_layers_that_are_alike_are_drawn_once_where_that_is_asked_for(family, some):
    """Layers of jamba differ from the one before them, in attention or in experts."""
    model = spec(open_source(tiny_config(family)).model)
    usual, values = drawn(model), drawn(model, alike=True)
    assert values.keys() == usual.keys()
    layers = [
        {n.split(".", 3)[3]: v for n, v in values.items() if n.startswith(f"model.layers.{i}.")}
        for i in range(len(model.layers))
    ]
    follow = [(a, b) for a, b in pairwise(layers) if a.keys() == b.keys()]
    assert len(follow) == some * (len(layers) - 1)
    assert all(torch.equal(a[name], b[name]) for a, b in follow for name in a)
