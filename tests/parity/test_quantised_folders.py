"""Folders that bitsandbytes or torchao has quantised: their values, to the bit, and no others."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatrain import Engine, InputError
from megatrain.checkpoint import open_checkpoint
from megatrain.model.quantised import quantised_base
from megatrain.tile.layout import _NF4, FP8, NF4, NF4_WIDE, _dynamic_values
from megatrain.train.export import export
from tests.inside import store_of
from tests.parity.cases import gradients, in_dtype, llama, make_batches, make_engine, masters, same
from tests.sweeps import few

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
SIZES = {"hidden_size": 64, "intermediate_size": 192}
HOW = {
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp8": {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}},
    },
}
[STEP, LATER] = make_batches(2)


def nf4_parts(name, values, packing):
    """A matrix in the file of bitsandbytes."""
    packed, blocks = packing.pack(values), values.numel() // 64
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"}
    state["shape"] = list(values.shape)
    if packing is NF4:
        floats, codes, scales = packed.split((len(packed) - 33 * blocks, 32 * blocks, blocks))
        mean, largest = floats.view(torch.float32).split((1, len(floats) // 4 - 1))
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": mean.item()}
        nested = _dynamic_values(torch.device("cpu"))
        parts = {"absmax": scales, "nested_absmax": largest, "nested_quant_map": nested}
    else:
        scales, codes = packed.split((4 * blocks, 32 * blocks))
        parts = {"absmax": scales.view(torch.float32)}
    text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    parts |= {"quant_map": torch.tensor(_NF4), "quant_state.bitsandbytes__nf4": text}
    return {name: codes[:, None]} | {f"{name}.{part}": each for part, each in parts.items()}


def fp8_parts(name, values, packing):
    """A matrix in the file of torchao."""
    stored, stem = packing.pack(values), name.removesuffix(".weight")
    scales, codes = stored.split((4 * len(values), values.numel()))
    scale = scales.view(torch.float32)[:, None]
    qdata = codes.view(torch.float8_e4m3fn).view(values.shape)
    return {f"{stem}._weight_qdata": qdata, f"{stem}._weight_scale": scale}


def quantised(folder, packing):
    """A folder of quantised weights, and one of what they stand for."""
    model = in_dtype(llama(**SIZES), torch.bfloat16)
    model.save_pretrained(folder / "plain")
    tensors = load_file(folder / "plain" / "model.safetensors")
    parts, make = dict[str, Tensor](), fp8_parts if packing is FP8 else nf4_parts
    for name, values in tensors.items():
        linear = values.dim() == 2 and "layers" in name
        parts |= make(name, values, packing) if linear else {name: values}
        if linear:
            unpacked = packing.unpacked(packing.pack(values), values.shape)
            model.get_parameter(name).data.copy_(unpacked)
    model.save_pretrained(folder / "plain")
    model.save_pretrained(folder / "packed")
    write(folder / "packed", parts, HOW["fp8" if packing is FP8 else "nf4"])
    return folder / "packed", folder / "plain"


def write(folder, tensors, how):
    plain = {name: each.contiguous().clone() for name, each in tensors.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": how}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("packing", few([NF4, NF4_WIDE, FP8]), ids=lambda each: each.name)
def test_training_resuming_and_merging_have_the_values_of_the_folder(packing, tmp_path):
    folder, plain = quantised(tmp_path, packing)
    how: dict[str, Any] = {"adapter": LORA, "precision": "bf16", "clip": 1e9}
    with make_engine(plain, **how) as engine:
        wanted, grads = engine.step(STEP), gradients(engine)
        next_loss = engine.step(LATER).loss
        last = masters(engine)
    with make_engine(folder, **how) as engine:
        weights = sum(each.layout.numel for each in store_of(engine).tiles if "layer" in each.name)
        assert 2 * weights < 1.35 * sum(
            entry.numel * (1 if entry.packed else 2)
            for tile, entry in store_of(engine).entries() if "layer" in tile.name
        )  # fmt: skip
        got = engine.step(STEP)
        assert (got.loss, got.grad_norm) == (wanted.loss, wanted.grad_norm)
        assert same(gradients(engine), grads)
        engine.save(tmp_path / "saved")
        engine.step(LATER)
        assert same(masters(engine), last)
        engine.save_pretrained(tmp_path / "merged", merged=True)
        engine.save_pretrained(tmp_path / "adapter")
    assert open_checkpoint(tmp_path / "saved").settings.left_out
    with Engine.load(tmp_path / "saved", device="cpu") as engine:
        engine.save(tmp_path / "saved")
        assert engine.step(LATER).loss == next_loss
        assert same(masters(engine), last)
    export(str(tmp_path / "saved"), tmp_path / "exported", merged=True)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert not hasattr(exported.config, "quantization_config")
    files = [load_file(tmp_path / n / "model.safetensors") for n in ("merged", "exported")]
    export(str(tmp_path / "adapter"), tmp_path / "whole", merged=True)
    assert same(files[0], load_file(tmp_path / "whole" / "model.safetensors"))
    assert files[0].keys() == files[1].keys() == load_file(plain / "model.safetensors").keys()


def test_such_a_folder_is_run_as_it_is(tmp_path):
    folder, plain = quantised(tmp_path, NF4)
    with Engine(folder, device="cpu") as engine, Engine(plain, device="cpu") as other:
        assert engine.evaluate(STEP) == other.evaluate(STEP)
    wanted = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    with Engine(folder, device="cpu") as engine, engine.whole_model(spare=0) as model:
        assert same(dict(model.named_parameters()), dict(wanted.named_parameters()))


def changed(change):
    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        write(folder, tensors, HOW["nf4"])

    return edit


def said(**others):
    def change(tensors):
        name = next(name for name in tensors if name.endswith("__nf4"))
        state = json.loads(bytes(tensors[name].tolist())) | others
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return changed(change)


def first(ending):
    return lambda tensors: next(name for name in tensors if name.endswith(ending))


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "blocks": (said(blocksize=128), {}, "is quantised with {'blocksize': 128}"),
    "fp16": (said(dtype="float16"), {}, "{'dtype': 'float16'}"),
    "a shape": (said(shape=[64, 128]), {}, "do not make up its shape"),
    "codes": (changed(lambda t: t[first("quant_map")(t)].mul_(2)), {}, "other codes than NF4's"),
    "no scales": (changed(lambda t: t.pop(first(".absmax")(t))), {}, "do not make up its shape"),
    "no codes": (changed(lambda t: t.pop(first(".quant_map")(t))), {}, "do not make up its shape"),
    "no offset": (said(nested_offset=None), {}, "is quantised with {'nested_offset': None}"),
    "no adapter": (lambda folder: None, {"adapter": None}, "such are not trained; give an adapter"),
    "another base": (lambda folder: None, {"base": "fp8"}, "the model comes in nf4; leave base"),
    "fp32": (lambda folder: None, {"precision": "fp32"}, "base is 'nf4', and precision 'fp32'"),
    "gptq": (
        lambda folder: write(folder, {"a": torch.zeros(1)}, {"quant_method": "gptq"}), {},
        "quantised by gptq; only NF4 of bitsandbytes",
    ),
    "int8": (
        lambda folder: write(folder, {}, HOW["nf4"] | {"load_in_4bit": False}), {},
        "bitsandbytes in 8 bits",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def packed_folder(tmp_path_factory):
    return quantised(tmp_path_factory.mktemp("packed"), NF4)[0]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_taken_is_refused(case, packed_folder, tmp_path):
    change, options, message = REFUSED[case]
    folder = Path(shutil.copytree(packed_folder, tmp_path / "packed"))
    change(folder)
    with pytest.raises(InputError) as refused:
        make_engine(folder, **{"adapter": LORA, "precision": "bf16"} | options)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_way_that_is_a_word_alone_is_refused():
    with pytest.raises(InputError, match="config.json: its weights are quantised by bitsandbytes"):
        quantised_base({"quantization_config": "bitsandbytes"}, "config.json")


def needs(package):
    return pytest.param(
        package,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(package) is None, reason=f"needs {package}"
        ),
    )


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("library", [needs("bitsandbytes"), needs("torchao")])
def test_a_folder_that_the_library_has_written(library, nested, tmp_path):
    from transformers import BitsAndBytesConfig, TorchAoConfig

    in_dtype(llama(**SIZES), torch.bfloat16).save_pretrained(tmp_path / "plain")
    how: Any
    if library == "bitsandbytes":
        how = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested
        )
    else:
        from torchao.quantization import Float8WeightOnlyConfig

        how = TorchAoConfig(Float8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=how, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(tmp_path / "theirs")
    with Engine(tmp_path / "theirs", device="cpu") as engine:
        got = masters(engine)
    for name, module in model.named_modules():
        if f"{name}.weight" not in got or "layers" not in name:
            continue
        weight = module.weight
        if hasattr(weight, "quant_state"):
            import bitsandbytes.functional as functional

            weight.quant_state.dtype = torch.float32  # of its CPU code, see test_base.py
            weight = functional.dequantize_4bit(weight.data, weight.quant_state).bfloat16()
        elif hasattr(weight, "dequantize"):
            weight = weight.dequantize()
        assert torch.equal(got[f"{name}.weight"], weight.float()), name
