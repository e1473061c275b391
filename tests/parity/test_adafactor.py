"""Adafactor against torch.optim.Adafactor."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import Adafactor, Engine, Placement
from megatrain.device import disk
from megatrain.device.plane_file import BLOCK
from megatrain.optim import TileRange, UpdateOptions, adafactor
from tests.checkpoint.cases import state
from tests.parity.cases import (
    gradients,
    llama,
    make_batches,
    make_engine,
    masters,
    model_of,
    parameters,
    relative_error,
    same,
)
from tests.sweeps import few
from tests.unit.kernel_cases import randn

# Vectors, small and narrow matrices, matrices in blocks of rows, several in a block or in blocks.
SHAPES = [(7,), (4, 6), (1, 9), (40, 1, 4), (40, 4, 1), (300, 200), (5, 160, 130), (3, 140, 900)]


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 1e-2},
        # From the second step on a smaller step than lr is taken.
        {"lr": 0.9, "d": 2.0, "beta2_decay": -0.5, "eps": (1e-5, 1e-2)},
    ],
)
@pytest.mark.parametrize("size", [1e-6, 1e-2, 1.0])  # eps counts with small gradients
@pytest.mark.parametrize("shape", SHAPES)
def test_updates_are_torch_s(shape: tuple[int, ...], size: float, settings: Any) -> None:
    rule, numel = Adafactor(weight_decay=0.1, **settings), math.prod(shape)
    theirs = torch.nn.Parameter(randn(numel, 0).view(shape) * 0.02)
    ours, start = theirs.detach().clone(), theirs.detach().clone()
    room = adafactor._PER if adafactor._has_factors(shape) else 1
    state = torch.zeros(-(-numel // room))
    optimizer = torch.optim.Adafactor([theirs], weight_decay=0.1, **settings)
    for step in range(1, 6):
        grad = randn(numel, step).view(shape) * size
        theirs.grad = grad * 0.37
        optimizer.step()
        tile = TileRange(ours, None, [state], grad)
        rule.update(tile, vars(rule), UpdateOptions(step=step, grad_scale=0.37))
    assert torch.linalg.vector_norm(ours - theirs) < 1e-5 * torch.linalg.vector_norm(ours - start)


@pytest.mark.parametrize("model", ["llama", "mixtral"])
@pytest.mark.parametrize("placement", [Placement(slots=1), Placement(resident=("layer 1", "head"))])
def test_steps_are_torch_s_on_the_same_gradients(
    placement: Placement, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adafactor, "_PER", 4)  # so that small matrices are kept as large ones
    clip, plain = 0.5, model_of(model)
    engine = make_engine(plain, clip=clip, rule="adafactor", placement=placement)
    start = parameters(plain)
    named = {name: torch.nn.Parameter(p.clone()) for name, p in start.items()}
    groups = [
        {"params": [named[n] for n in group["param_names"]], "weight_decay": group["weight_decay"]}
        for group in engine.optimizer.param_groups
    ]
    optimizer = torch.optim.Adafactor(groups, lr=1e-2)
    for step in make_batches(3):
        norm = engine.step(step).grad_norm
        engine.flush()
        for name, gradient in gradients(engine).items():
            named[name].grad = gradient * min(1.0, clip / (norm + 1e-6))
        optimizer.step()
    trained = {name: p.detach() for name, p in named.items()}
    assert relative_error(masters(engine), trained, start) < 1e-5


def test_any_range_of_matrices_is_cut_into_rectangles() -> None:
    """Each element once; all of them are a single one."""
    for shape in ((1, 1, 9), (3, 4, 5), (4, 1, 3), (2, 6, 2)):
        numel = math.prod(shape)
        assert len([*adafactor._rectangles(shape, 0, numel)]) == 1
        for start, stop in itertools.combinations(range(numel + 1), 2):
            values, found = torch.arange(start, stop), torch.full(shape, -1)
            for each in adafactor._rectangles(shape, start, stop):
                there = found[each.matrices, each.rows, each.columns]
                assert (there == -1).all()
                there.copy_(each.of(values))
            wanted = torch.full((numel,), -1)
            wanted[start:stop] = values
            assert torch.equal(found.view(-1), wanted), (shape, start, stop)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", few(["bf16", "fp32"]))
def test_planes_on_a_disk_change_no_bit(
    precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles go in one piece, whatever the size of pieces of other rules."""
    monkeypatch.setattr(adafactor, "_PER", 4)
    monkeypatch.setattr(disk, "PIECE", BLOCK)
    wanted = trained(precision, tmp_path, Placement())
    on_disk = Placement(slots=1, disk_moments=99, disk_remainder=99, disk_weights=99)
    assert same(trained(precision, tmp_path, on_disk), wanted)


def trained(precision: Any, folder: Path, placement: Placement) -> dict[str, torch.Tensor]:
    """All masters and states after four steps, between which the run was saved and loaded."""
    steps = make_batches(4)
    settings = {"rule": "adafactor", "precision": precision, "disk": folder}
    with make_engine(llama(), placement=placement, **settings) as engine:
        for step in steps[:2]:
            engine.step(step)
        engine.save(folder / "saved")
        if placement.disk_moments:  # as large as all that the rule keeps of the largest tile
            largest = max(tile.layout.trainable_numel for tile in engine._store.tiles)
            assert engine.memory()["host_disk_lanes_bytes"] >= 3 * 2 * largest
            assert engine.memory()["host_remainder_bytes"] == 0
    with Engine.load(folder / "saved", device="cpu", disk=folder) as engine:
        for step in steps[2:]:
            engine.step(step)
        return state(engine)


@pytest.mark.parametrize("shape", [(0,), (0, 4)])
def test_a_parameter_without_elements_changes_nothing(shape: tuple[int, ...]) -> None:
    [step], plain, model = make_batches(1), llama(), llama()
    model.model.layers[0].mlp.empty = torch.nn.Parameter(torch.zeros(shape))
    with (
        make_engine(plain, rule="adafactor") as one,
        make_engine(model, rule="adafactor", saveable=False) as other,
    ):
        assert other.step(step).loss == one.step(step).loss
        wanted, found = masters(one), masters(other)
    assert found.pop("model.layers.0.mlp.empty").shape == shape
    assert same(found, wanted)
