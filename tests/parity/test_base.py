"""A base that is kept in fewer bytes: training on what its library unpacks, bit for bit."""

import copy
import importlib.util

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from megatrain import Engine, InputError, Placement
from megatrain.tile.layout import BASES, FP8, NF4
from tests.parity.cases import (
    gradients,
    in_dtype,
    llama,
    make_batches,
    make_engine,
    masters,
    resumes,
    same,
)
from tests.sweeps import few

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SHAPE = 192, 640  # groups of scales that are not whole
LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


def needs(package):
    """`make test-all` installs them beside the environment."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


def weights(dtype):
    torch.manual_seed(0)
    return (torch.randn(SHAPE) * torch.logspace(-0.4, 0.4, SHAPE[0])[:, None]).to(dtype)


@needs("bitsandbytes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_is_that_of_bitsandbytes(dtype):
    import bitsandbytes.functional as library

    values = weights(dtype)
    codes, state = library.quantize_4bit(values, quant_type="nf4", compress_statistics=True)
    state.dtype = torch.float32  # in bf16 its CPU code has the same values, rounded once
    floats = torch.cat((state.offset.view(1), state.state2.absmax)).view(torch.uint8)
    stored = torch.cat((floats, codes.flatten(), state.absmax))
    assert len(stored) == NF4.bytes_of(SHAPE)
    wanted = library.dequantize_4bit(codes, state)
    assert torch.equal(NF4.unpacked(stored, SHAPE), wanted.bfloat16().float())
    packed = NF4.pack(values)
    scales = len(state.absmax)
    assert torch.equal(packed[:-scales], stored[:-scales])
    # Its CPU code takes a neighbour of the nearest of 256 scales now and then.
    assert (packed[-scales:].int() - stored[-scales:].int()).abs().max() <= 1


@needs("torchao")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_is_that_of_torchao(dtype):
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    module = nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=dtype)
    module.weight.data = weights(dtype)
    quantize_(module, Float8WeightOnlyConfig())
    wanted = module.weight.dequantize().bfloat16().float()
    assert torch.equal(FP8.unpacked(FP8.pack(weights(dtype)), SHAPE), wanted)


@pytest.mark.parametrize(("packing", "most", "bytes_each"), [(NF4, 0.12, 0.52), (FP8, 0.04, 1.01)])
def test_values_are_near_and_few_bytes(packing, most, bytes_each):
    values = weights(torch.float32)
    values[5], values[:, 64:128] = 0, 0
    packed = packing.pack(values)
    assert len(packed) == packing.bytes_of(SHAPE) < bytes_each * values.numel()
    error = packing.unpacked(packed, SHAPE) - values
    assert (error.norm(dim=1) <= most * values.norm(dim=1)).all()
    again = packing.unpacked(packing.pack(values.bfloat16()), SHAPE)
    assert (again - values).norm() < most * values.norm()


def adapted(model):
    torch.manual_seed(1)
    return get_peft_model(copy.deepcopy(model), LoraConfig(**LORA))


def rounded(model, packing):
    """The model with the weights that `packing` keeps of its layers' linear modules."""
    model = copy.deepcopy(model)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            kept = packing.unpacked(packing.pack(module.weight.data), module.weight.shape)
            module.weight.data.copy_(kept)
    return model


PLACEMENTS = (
    Placement(slots=1),
    Placement(slots=3, layer_inputs="host", passes=2),
    Placement(resident=("layer 0", "layer 1", "layer 2"), save_activations=2, save_all=1),
)


@pytest.mark.parametrize("base", few(BASES))
def test_training_is_that_on_the_unpacked_weights(base):
    plain, [step] = in_dtype(llama(), torch.bfloat16), make_batches(1)
    how = {"precision": "bf16", "clip": 1e9}
    engine = make_engine(adapted(rounded(plain, BASES[base])), **how)
    wanted, grads = engine.step(step), gradients(engine)
    for placement in PLACEMENTS:
        packed = make_engine(adapted(plain), base=base, placement=placement, **how)
        got = packed.step(step)
        assert (got.loss, got.grad_norm) == (wanted.loss, wanted.grad_norm)
        assert same(gradients(packed), grads)
        assert same(masters(packed), masters(engine))
        assert packed.evaluate(step) == engine.evaluate(step)


def test_a_run_is_resumed_and_exported(tmp_path, caplog):
    plain, steps = in_dtype(llama(), torch.bfloat16), make_batches(2)
    with make_engine(adapted(plain), base="nf4", precision="bf16") as engine:
        engine.step(steps[0])
        resumes(engine, tmp_path / "saved", steps[1:])
        caplog.clear()
        engine.save_pretrained(tmp_path / "adapter")
        assert not caplog.messages
        engine.save_pretrained(tmp_path / "merged", merged=True)
        assert "written as their nf4 values" in caplog.text
        trained, loss = masters(engine), engine.evaluate(steps[0])
    opened = masters(Engine(tmp_path / "saved", device="cpu", precision="fp32"))
    frozen = {name for name, value in opened.items() if "lora" not in name}
    assert same({n: opened[n] for n in frozen}, {n: trained[n] for n in frozen})
    again = Engine(tmp_path / "merged", device="cpu", precision="bf16")
    assert again.evaluate(steps[0]) == pytest.approx(loss, rel=0.02)


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="base is 'nf4', but no linear module"):
        make_engine(llama(), base="nf4", precision="bf16")
    with pytest.raises(InputError, match="base is 'fp8', and precision 'fp32'"):
        make_engine(adapted(llama()), base="fp8")
    with pytest.raises(InputError, match="base is 'int3'; it must be bf16, nf4 or fp8"):
        make_engine(adapted(llama()), base="int3", precision="bf16")
