"""On a real GPU: adapters of PEFT, those of experts that are one tensor among them."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from megatrain import AdamW, Engine, Placement
from megatrain.compat.transformers import set_experts
from tests.families.tiny import decoder_sizes
from tests.gpu.test_cuda import steps

pytestmark = pytest.mark.gpu

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTER = {"r": 4, "target_modules": ["q_proj", "v_proj"], "target_parameters": EXPERTS}


def train(device, experts, rank=4, **options):
    """Losses and gradient norms of four steps, and the adapter's masters after them."""
    torch.manual_seed(0)
    config = MixtralConfig(**decoder_sizes(512, 128, 256, 3, 4, 2), num_local_experts=4)
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


def train_in_float8(device, **options):
    """Numbers of four steps of a dense model whose frozen base is multiplied in float8."""
    torch.manual_seed(0)
    config = LlamaConfig(**decoder_sizes(512, 128, 256, 3, 4, 2))
    adapter = {"r": 4, "target_modules": "all-linear"}
    with Engine(
        LlamaForCausalLM(config), adapter=adapter, optimizer=AdamW(lr=1e-2), device=device, seed=0,
        **{"precision": "fp8"} | options,
    ) as engine:  # fmt: skip
        results = [engine.step(batch) for batch in steps(4)]
        evaluated = engine.evaluate(steps(1)[0])
    return [r.loss for r in results], [r.grad_norm for r in results], evaluated


@pytest.mark.parametrize("base", ["bf16", "fp8", "nf4"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_base_in_float8_trains_as_on_the_cpu(base, compiled):
    wanted = train_in_float8("cpu", base=base, placement=Placement(slots=2))
    got = train_in_float8("cuda", base=base, placement=Placement(slots=2, compile=compiled))
    assert got[0] == pytest.approx(wanted[0], rel=3e-3)
    assert got[1] == pytest.approx(wanted[1], rel=0.05)
    assert got[2] == pytest.approx(wanted[2], rel=3e-3)
    in_bf16 = train_in_float8("cpu", base=base, precision="bf16", placement=Placement(slots=2))
    assert got[0] == pytest.approx(in_bf16[0], rel=3e-3)


def test_what_is_kept_changes_no_bit_of_it():
    placements = (
        Placement(slots=2),
        Placement(slots=2, passes=2, save_activations=3, save_all=2),
        Placement(slots=3, resident=("layer 1",), offload_activations=2),
    )
    first, *others = (train_in_float8("cuda", placement=each) for each in placements)
    assert all(other == first for other in others)
