"""Products in float8, emulated on the CPU: near bf16, exactly resumed, exported as ever."""

import sys

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain import InputError, Placement
from megatrain.model.float8 import convert
from tests.inside import program_of
from tests.parity.cases import (
    gradients,
    llama,
    make_batches,
    make_engine,
    plain_gradients,
    resumes,
    same,
    trained,
)
from tests.parity.test_packing import documents, packed
from tests.parity.test_quantised_folders import needs

needs_torchao = needs("torchao")


def gradients_in_bf16(step, *, float8):
    """Those of the model of transformers in bf16, its layers converted by torchao alone."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = llama()
    for parameter in model.parameters():  # buffers stay: the engine keeps angles in fp32, too
        parameter.data = parameter.data.bfloat16()
    if float8:
        config = Float8LinearConfig(emulate=True, pad_inner_dim=True)
        convert_to_float8_training(model.model.layers, config=config)
    return plain_gradients(model, step)[1]


def cosine(one, other):
    names = sorted(one)
    flat = [torch.cat([each[name].flatten().double() for name in names]) for each in (one, other)]
    return float(torch.cosine_similarity(*flat, dim=0))


@needs_torchao
def test_gradients_are_those_of_torchao_in_plain_pytorch():
    """One row, whose gradients are rounded to bf16 once, as the engine rounds its sums."""
    step = [{name: each[:1] for name, each in make_batches(1)[0][0].items()}]
    engine = make_engine(llama(), precision="fp8", clip=1e9)
    engine.step(step)
    found = gradients(engine)
    assert cosine(found, gradients_in_bf16(step, float8=True)) > 0.9999
    assert cosine(found, gradients_in_bf16(step, float8=False)) < 0.999


@needs_torchao
def test_losses_are_near_and_no_placement_changes_a_bit():
    steps = make_batches(3)
    results, weights = trained(llama(), steps, precision="fp8")
    near, _ = trained(llama(), steps, precision="bf16")
    assert [loss for loss, _ in results] == pytest.approx([loss for loss, _ in near], rel=0.02)
    for placement in (
        Placement(slots=3, layer_inputs="host"),
        Placement(passes=2, save_activations=2, save_all=1),
    ):
        again = trained(llama(), steps, precision="fp8", placement=placement)
        assert again[0] == results and same(again[1], weights)


@needs_torchao
def test_packed_rows_train_by_their_lengths_as_by_masks():
    engines = [make_engine(llama(), precision="fp8") for _ in range(2)]
    program_of(engines[1]).may_attend_by_lengths = False
    losses = [engine.step([packed(documents())]).loss for engine in engines]
    assert [program_of(engine).attends_by_lengths for engine in engines] == [True, False]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@needs_torchao
def test_a_scale_of_all_tokens_is_not_taken_for_documents_that_see_each_other():
    """Eight layers of the usual small weights: their losses follow each other by a rounding."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
                    num_attention_heads=4, num_key_value_heads=2)
    )  # fmt: skip
    engine = make_engine(model, precision="fp8")
    ids = [torch.randint(10, 110, (length,)) for length in (40, 30, 50, 8)]
    assert engine.step([packed(ids)]).loss > 0


@needs_torchao
def test_a_run_is_resumed_to_the_bit(tmp_path):
    first, *others = make_batches(3)
    engine = make_engine(llama(), precision="fp8")
    engine.step(first)
    resumes(engine, tmp_path / "saved", others)


@needs_torchao
def test_what_is_computed_in_bf16_stays_as_it_is():
    """Routers, and sizes that the GPU has no products for."""
    parts = {"q_proj": nn.Linear(32, 48), "gate": nn.Linear(16, 16), "odd": nn.Linear(16, 24)}
    module = nn.ModuleDict({**parts, "norm": nn.LayerNorm(16)})
    assert len(convert(module, torch.device("cpu"))) == 1
    assert type(module["q_proj"]) is not nn.Linear
    assert all(module[name] is part for name, part in parts.items() if name != "q_proj")


def test_the_library_that_it_needs_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(InputError, match=r"pip install 'megatrain\[fp8\]'"):
        make_engine(llama(), precision="fp8")
