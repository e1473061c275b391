"""Folders that bitsandbytes or torchao has quantised: their values, to the bit, and no others."""

import copy
import importlib.util
import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megatrain import Engine, InputError
from megatrain.checkpoint import open_checkpoint
from megatrain.cli.models import NamedModel, named_config
from megatrain.tile import Entry, formats
from megatrain.tile.formats import _NF4, BASES, FP8, NF4, NF4_WIDE, PACKINGS, _dynamic_values
from tests.families.tiny import tiny_model
from tests.inside import sized, store_of
from tests.parity.cases import gradients, in_dtype, llama, make_batches, make_engine, masters, same
from tests.parity.packed_folders import LORA, STEP, assert_trains_as, share_of_bf16, write
from tests.sweeps import few, placements

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SIZES = {"hidden_size": 64, "intermediate_size": 192}
SQUARE = {"hidden_size": 64, "intermediate_size": 64}
HOW = {
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp8": {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}},
    },
}


def needs(package):
    """`make test-all` installs them beside it: with torchao in, transformers always imports it."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


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


def quantised(folder, packing, family="llama"):
    """A folder of quantised weights without some modules, and one of what they stand for."""
    made = llama(**SIZES) if family == "llama" else tiny_model(family, changes=SQUARE)
    model = in_dtype(made, torch.bfloat16)
    model.save_pretrained(folder / "plain")
    model.save_pretrained(folder / "packed")
    tensors = load_file(folder / "plain" / "model.safetensors")
    parts, make = dict[str, Tensor](), fp8_parts if packing is FP8 else nf4_parts
    for name, values in tensors.items():
        linear = values.dim() == 2 and "layers" in name
        if linear and not name.endswith(("1.self_attn.o_proj.weight", "gate.weight")):
            parts |= make(name, values, packing)
            tensors[name] = packing.unpacked(packing.pack(values), values.shape).bfloat16()
        else:
            parts[name] = values
    save_file(tensors, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    write(folder / "packed", parts, HOW["fp8" if packing is FP8 else "nf4"])
    return folder / "packed", folder / "plain"


@pytest.mark.parametrize(
    ("packing", "most", "family"),
    few(
        [
            (NF4, 0.27, "llama"),
            (NF4, 0.29, "mixtral"),
            (NF4_WIDE, 0.29, "llama"),
            (FP8, 0.54, "llama"),
            (FP8, 0.54, "mixtral"),
        ],
        1,
    ),
    ids=str,
)
def test_training_resuming_and_merging_have_the_values_of_the_folder(
    packing, most, family, tmp_path
):
    """Experts that lie one by one are joined as they are; a plan counts what is packed."""
    folder, plain = quantised(tmp_path, packing, family)
    entries = assert_trains_as(folder, plain, tmp_path)
    assert share_of_bf16(entries) < most
    assert open_checkpoint(tmp_path / "saved").settings.left_out
    planned = NamedModel("a run", named_config(str(folder)), LORA).spec().packed
    assert planned.keys() == {entry.name for entry in entries if entry.needs_unpacking}


@pytest.mark.parametrize(("base", "key"), [("nf4", "llm_int8_skip_modules"), ("folder", "fp8")])
def test_a_plan_without_weights_leaves_what_the_configuration_skips(base, key):
    """As `transformers` matches names: from their begin, to their end, or as patterns."""
    config = llama(hidden_size=128, intermediate_size=128, num_key_value_heads=2).config
    skips = ["lm_head", r"model.layers.\d+.mlp.up_proj", "model.layers.1.mlp", "v_proj"]
    how = {"quant_method": "fp8", "modules_to_not_convert": skips}
    config.quantization_config = how if key == "fp8" else {**HOW[base], key: skips}
    packed = NamedModel("a hub id", config, LORA, base).spec().packed
    kept = {tuple(name.split(".")[2:5:2]) for name in packed}
    attention, rest = ("q_proj", "k_proj", "o_proj"), ("gate_proj", "down_proj")
    wanted = {*product("01", attention), *product("0", rest)}
    assert {(layer, name) for layer, name in kept if layer in "01"} == wanted


def test_patterns_of_skipped_modules_that_do_not_compile_are_refused_in_a_line():
    config = llama(**SIZES).config
    config.quantization_config = HOW["nf4"] | {"llm_int8_skip_modules": ["*.mlp"]}
    with pytest.raises(InputError, match=r"skips \['\*.mlp'\]: nothing to repeat"):
        NamedModel("a hub id", config, LORA).spec()


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
    "plain weights": (
        lambda folder: write(folder, llama(**SIZES).state_dict(), HOW["nf4"]), {},
        "is, as all others, not of bitsandbytes",
    ),
    "hqq": (
        lambda folder: write(folder, {"a": torch.zeros(1)}, {"quant_method": "hqq"}), {},
        "quantised by hqq; only NF4 of bitsandbytes",
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


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    "library", [pytest.param(name, marks=needs(name)) for name in ("bitsandbytes", "torchao")]
)
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


# A base that is kept in fewer bytes: training on what its library unpacks, bit for bit.


SHAPE = 192, 640  # groups of scales that are not whole


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


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_rows_of_a_stack_are_unpacked_from_their_bytes_alone(packing):
    values, rows = torch.randn(6, 64, 128, generator=torch.Generator().manual_seed(0)), [1, 2, 5]
    whole, shared = packing.pack(values), packing.sections(values.shape)[0]
    entry = Entry("experts", values.shape, 0, None, packed=packing)
    stored = torch.full_like(whole, 255)
    for start, stop in [(0, shared // 2), *entry.places_of(rows, 2)]:
        stored[2 * start : 2 * stop] = whole[2 * start : 2 * stop]
    out = torch.full(values.shape, torch.nan, dtype=packing.computed)
    packing.unpack(stored, out, rows=rows)
    assert entry.cut_in_rows() and out[[0, 3, 4]].isnan().all()
    assert out[rows].float().equal(packing.unpacked(whole, values.shape)[rows])


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
        for name in ("gate_up_proj", "down_proj") if hasattr(module, "has_gate") else ():
            stack = module.get_parameter(name).data
            stack.copy_(packing.unpacked(packing.pack(stack), stack.shape))
    return model


@pytest.mark.parametrize("family", few(["gpt_oss", "llama", "mixtral"]))
@pytest.mark.parametrize("base", few(BASES))
def test_training_is_that_on_the_unpacked_weights(base, family):
    model = llama() if family == "llama" else tiny_model(family, changes={"hidden_size": 64})
    plain, [step] = in_dtype(model, torch.bfloat16), make_batches(1)
    how = {"precision": "bf16", "clip": 1e9}
    engine = make_engine(adapted(rounded(plain, BASES[base])), **how)
    wanted, grads = engine.step(step), gradients(engine)
    for placement in placements("quantised folders"):
        packed = make_engine(adapted(plain), base=base, placement=placement, **how)
        got = packed.step(step)
        assert (got.loss, got.grad_norm) == (wanted.loss, wanted.grad_norm)
        assert same(gradients(packed), grads)
        assert same(masters(packed), masters(engine))
        assert packed.evaluate(step) == engine.evaluate(step)
    names = {e.name for _, e in store_of(packed).entries() if e.needs_unpacking}
    assert any("experts" in name for name in names) == (family != "llama")


@pytest.mark.parametrize("packing", [NF4, FP8], ids=lambda each: each.name)
def test_a_stack_is_packed_in_pieces_and_as_its_rows(packing, monkeypatch):
    stack = weights(torch.bfloat16).view(3, 64, 640)
    whole = packing.pack(stack)
    assert torch.equal(whole, packing.pack(stack.view(192, 640)))
    sized(monkeypatch, formats, PIECE=640)
    assert torch.equal(whole, packing.pack(stack))
    wanted = packing.unpacked(whole, (192, 640)).view(3, 64, 640)
    assert torch.equal(packing.unpacked(whole, (3, 64, 640)), wanted)


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="base is 'nf4', but no linear module"):
        make_engine(llama(), base="nf4", precision="bf16")
    with pytest.raises(InputError, match="is frozen; leave base out .a Conv1D is not linear"):
        adapter = {"target_modules": ["c_attn"]}
        make_engine(tiny_model("gpt2"), base="nf4", precision="bf16", adapter=adapter)
    with pytest.raises(InputError, match="base is 'fp8', and precision 'fp32'; take bf16"):
        make_engine(adapted(llama()), base="fp8")
    with pytest.raises(InputError, match="base is 'int3'; it must be bf16, nf4, fp8 or folder"):
        make_engine(adapted(llama()), base="int3", precision="bf16")
