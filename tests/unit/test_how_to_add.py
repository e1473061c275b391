"""The code that docs/engine.md shows to who adds a rule, a loss or a device trains a model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import Engine
from megatrain.device import CpuDevice
from megatrain.loss import Loss
from megatrain.optim import NO_DECAY, Rule
from megatrain.optim.rule import master_of
from tests.parity.cases import llama, make_batches, make_engine, masters, parameters

DOCUMENT = Path(__file__).parents[2] / "docs" / "engine.md"
KNOWN = {each.__name__: each for each in (CpuDevice, Loss, Rule, Sequence, dataclass, master_of)}
[STEP] = make_batches(1)


@pytest.fixture(scope="module")
def shown():
    section = DOCUMENT.read_text(encoding="utf-8").split("\n## How to add\n")[1].split("\n## ")[0]
    names: dict[str, Any] = {"NO_DECAY": NO_DECAY, **KNOWN}
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    return names


def test_the_rule_moves_every_weight_by_its_rate(shown):
    model = llama()
    before = {name: value.clone() for name, value in parameters(model).items()}
    options = {"optimizer": shown["SignSGD"](lr=1e-3), "precision": "fp32", "device": "cpu"}
    with Engine(model, **options) as engine:
        engine.step(STEP)
        after = masters(engine)
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (after[name] - before[name]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=0, atol=1e-6)


def test_the_loss_counts_likely_labels_less(shown):
    with make_engine(llama()) as engine:
        plain = engine.evaluate(STEP)
        assert engine.evaluate(STEP, shown["FocalLoss"](0.0)) == pytest.approx(plain, rel=1e-6)
        less = engine.evaluate(STEP, shown["FocalLoss"](100.0))
        assert 0 < less < plain
        assert engine.step(STEP, shown["FocalLoss"](100.0)).loss == pytest.approx(less, rel=1e-6)


def test_the_device_counts_weights_and_gradients(shown):
    device = shown["CountingDevice"]()
    with make_engine(llama(), device=device) as engine:
        engine.step(STEP)
        assert device.copied_bytes > 4 * engine.num_parameters
