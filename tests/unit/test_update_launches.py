"""What updates on a GPU cost a rule that has no kernel there: torch's operations, one by one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatrain import SGD, AdamW, Engine, Lion, Muon, Placement, kernels
from megatrain.base.units import GIB
from megatrain.device.base import COMPUTE, Buffer, Kind, Name
from megatrain.forecast.prices import CostModel
from megatrain.kernels import reference
from megatrain.machine import machine_for
from tests.inside import parts_of, sized

H200 = machine_for("NVIDIA H200", 120 * GIB, 16, 139 * GIB)


class Operations(TorchDispatchMode):
    """Counts what is launched: views are not."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", (Muon(), Lion(), SGD()), ids=lambda rule: rule.name)
def test_a_rule_says_what_its_update_launches(rule, monkeypatch):
    """On a layer of 16 blocks, without its five vectors, which launch as much as a block."""
    width, block = 128, 128 * 128
    sized(monkeypatch, reference, UPDATE_BLOCK=block)
    monkeypatch.setattr(kernels, "_chosen", reference)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with Engine(model, optimizer=rule, placement=Placement(slots=2), device="cpu") as engine:
        update, found = parts_of(engine).update, {}
        apply = update._apply

        def counted(tile, first, host_grad, runs, *rest):
            with Operations() as operations:
                matrices = [run for run in runs if run.stop - run.start >= block]
                apply(tile, first, host_grad, matrices, *rest)
            found[tile.name] = operations.count, sum(run.stop - run.start for run in matrices)

        monkeypatch.setattr(update, "_apply", counted)
        ids = torch.randint(100, (1, 8))
        engine.step([{"input_ids": ids, "labels": ids}])
        engine.flush()
    launched, numel = found["layer 0"]
    assert launched / (numel / block) == pytest.approx(rule.launches, rel=0.1)


def seconds(rule, *sizes):
    """Of an update on the device whose planes have so many elements."""
    costs = CostModel(H200, rule)
    planes = [
        Buffer("plane", torch.empty(size, dtype=torch.bfloat16, device="meta")) for size in sizes
    ]
    return costs.run(COMPUTE, Name(Kind.UPDATE, "update"), lambda: None, planes[:1], planes).seconds


def test_an_update_without_a_kernel_takes_its_launches():
    layer = 233_057_792  # parameters of a layer of 7B, of which 22 rest on the device
    assert 22 * seconds(Muon(), layer, layer, 0) == pytest.approx(0.893, rel=0.05)  # as measured
    assert 22 * seconds(AdamW(), layer, layer, layer, layer) < 0.05
    assert seconds(Muon(), layer, layer, layer) < 2e-3  # by AdamW's kernel: embeddings
    assert seconds(Lion(), layer, layer, layer) > 0.03
