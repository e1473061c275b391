"""What others add or build: the code of docs/engine.md, and the example for verl."""

import re
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from megatrain import AdamW, Engine, Placement
from megatrain.device import CpuDevice
from megatrain.loss import GRPO, Loss, log_probs_of
from megatrain.optim import NO_DECAY, Rule
from megatrain.optim.rule import master_of
from tests.parity.cases import llama, make_batches, make_engine, masters, parameters
from tests.structure.source_tree import ROOT

DOCUMENT = Path(__file__).parents[2] / "docs" / "engine.md"
SHOWN = (CpuDevice, Loss, Rule, Sequence, dataclass, log_probs_of, master_of)
KNOWN = {each.__name__: each for each in SHOWN}
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


def test_the_rule_decays_every_weight_and_moves_it_by_its_rate(shown):
    model = llama()
    before = {name: value.clone() for name, value in parameters(model).items()}
    rule = shown["SignSGD"](lr=1e-3, weight_decay=0.5)
    with Engine(model, optimizer=rule, precision="fp32", device="cpu") as engine:
        engine.step(STEP)
        after = masters(engine)
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (after[name] - before[name] * (1 - 1e-3 * 0.5)).abs()
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
    with make_engine(llama(), device=device, placement=Placement()) as engine:
        engine.step(STEP)
        assert device.copied_bytes > 4 * engine.num_parameters


# What builders of other frameworks need: the example for verl.


def test_the_example_for_verl_trains_as_the_loss_of_the_house(tmp_path):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (5, 9), generator=generator)
    mask = (torch.arange(9) > torch.tensor([2, 3, 4, 2, 3])[:, None]).long()
    advantages = torch.randn(5, 1, generator=generator)

    def policy(output, data):
        ratio = (output["log_probs"] - data["old_log_probs"]).exp()
        clipped = ratio.clamp(0.8, 1.2)
        each = -torch.min(ratio * advantages, clipped * advantages) * data["response_mask"]
        return each.sum() / data["response_mask"].sum(), {"ratio": float(ratio.detach().mean())}

    def make():
        return Engine(llama(), optimizer=AdamW(lr=0.01), precision="fp32", device="cpu")

    kind = runpy.run_path(str(ROOT / "examples" / "verl_engine.py"))["MegatrainEngine"]
    engine = kind(make, lambda made: LambdaLR(made, lambda step: 0.5**step), 2)
    engine.initialize()
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
    data["old_log_probs"] = engine.infer_batch(data)["model_output"]["log_probs"] + 0.1 * mask
    with engine.train_mode():
        metrics = engine.train_batch(data, policy)["metrics"]
    assert set(engine.lr_scheduler_step()) == {0.005}

    labels = ids.masked_fill(mask == 0, -100)
    step = {"input_ids": ids, "labels": labels, "old_logp": data["old_log_probs"]}
    step["example"] = torch.arange(5.0)[:, None].expand(5, 9).contiguous()
    step["advantage"] = advantages.expand(5, 9).contiguous()
    with make() as ours:
        result = ours.step([step], GRPO())
        assert metrics["loss"] == pytest.approx(result.loss, rel=1e-6)
        assert metrics["grad_norm"] == pytest.approx(result.grad_norm, rel=1e-5)
        wanted = masters(ours)
    for name, values in engine.get_per_tensor_param():
        torch.testing.assert_close(values, wanted[name], rtol=1e-4, atol=1e-5)
    engine.save_checkpoint(str(tmp_path / "saved"), global_step=1)
    again = engine.train_batch(data, policy)["metrics"]
    engine.load_checkpoint(str(tmp_path / "saved"))
    assert engine.train_batch(data, policy)["metrics"] == again
    engine.shutdown()
