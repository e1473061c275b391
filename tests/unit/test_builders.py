"""What builders of other frameworks need: weights without a copy, and the example for verl."""

import importlib.util
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from megatrain import AdamW, Engine, Placement
from megatrain.loss import GRPO
from tests.inside import store_of
from tests.parity.cases import llama, make_batches, make_engine, masters
from tests.structure.source_tree import ROOT


def test_weights_of_tiles_are_those_of_the_last_step_without_a_copy():
    kept = Placement(resident=("layer 1",))
    with make_engine(llama(), placement=kept) as engine:
        assert {tile.version for tile in engine.updated_tiles()} == {0}
        engine.step(make_batches(1)[0])
        found = masters(engine)
        names = []
        rest = [tile for tile in store_of(engine).tiles if tile.layout.entries]
        for tile, own in zip(engine.updated_tiles(), rest, strict=True):
            assert (tile.name, tile.version) == (own.name, 1)
            plane = own.weights.data.untyped_storage().data_ptr()
            for name, values in tile.weights.items():
                assert values.equal(found[name])
                assert values.untyped_storage().data_ptr() == plane
                names.append(name)
        assert sorted(names) == sorted(found)


def test_a_tile_is_waited_for_alone(monkeypatch):
    with make_engine(llama()) as engine:
        engine.step(make_batches(1)[0])
        waited: list[Any] = []
        monkeypatch.setattr(engine.device, "synchronize", lambda event, name: waited.append(event))
        tiles = engine.updated_tiles()
        next(tiles)
        first = next(tile for tile in store_of(engine).tiles if tile.layout.entries)
        assert waited == [first.updated, first.written]


def example():
    path = ROOT / "examples" / "verl_engine.py"
    spec = importlib.util.spec_from_file_location("verl_engine", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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

    engine = example().MegatrainEngine(make, lambda made: LambdaLR(made, lambda step: 0.5**step), 2)
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
