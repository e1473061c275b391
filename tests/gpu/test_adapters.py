"""On a real GPU: adapters of PEFT, those of experts that are one tensor among them."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from megatrain import AdamW, Engine, Placement
from megatrain.compat.transformers import set_experts
from tests.gpu.test_cuda import steps

pytestmark = pytest.mark.gpu

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTER = {"r": 4, "target_modules": ["q_proj", "v_proj"], "target_parameters": EXPERTS}


def train(device, experts, rank=4, **options):
    """Losses and gradient norms of four steps, and the adapter's masters after them."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    set_experts(config, experts)
    with Engine(
        MixtralForCausalLM(config), adapter=ADAPTER | {"r": rank}, optimizer=AdamW(lr=1e-3),
        device=device, seed=0, **options,
    ) as engine:  # fmt: skip
        results = [engine.step(batch) for batch in steps(4)]
        masters = {n: m.clone() for n, m in engine.named_masters() if "lora_" in n}
    return [number for r in results for number in (r.loss, r.grad_norm)], masters


def test_adapters_of_experts_train_as_on_the_cpu():
    got, masters = train("cuda", "eager", precision="fp32", placement=Placement(slots=2))
    wanted, same = train("cpu", "eager", precision="fp32", placement=Placement(slots=2))
    assert got == pytest.approx(wanted, rel=1e-4)
    assert any("experts" in name for name in masters)
    for name, master in masters.items():
        assert torch.allclose(master, same[name], rtol=1e-3, atol=2e-5), name


@pytest.mark.parametrize(("compiled", "rank"), [(False, 4), (True, 4), (True, 8)])
def test_and_in_bf16_with_grouped_products_within_its_noise(compiled, rank):
    placement = Placement(slots=2, compile=compiled)
    wanted, _ = train("cpu", "eager", rank, precision="fp32", placement=Placement(slots=2))
    got, _ = train("cuda", "grouped_mm", rank, placement=placement)
    assert got[::2] == pytest.approx(wanted[::2], rel=1e-3)
    assert got[1::2] == pytest.approx(wanted[1::2], rel=0.05)
