"""Folders packed for inference: unpacked to the values of transformers, to the bit, or refused."""

import importlib.util
import json
import logging
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from megatrain import Engine, InputError, Placement
from megatrain.model.quantised import quantised_base
from megatrain.tile.formats import BLOCKS, PACKINGS
from megatrain.train.export import export
from tests.families.tiny import tiny_model
from tests.inside import store_of
from tests.parity.cases import in_dtype, make_batches, make_engine, masters, same
from tests.sweeps import few

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
SIZES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 32},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
    "minimax_m2": {"hidden_size": 64, "intermediate_size": 32},
    "deepseek_v3": {
        "hidden_size": 64, "moe_intermediate_size": 32, "kv_lora_rank": 32, "q_lora_rank": 32,
        "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "num_nextn_predict_layers": 1,
    },
}  # fmt: skip
[STEP, LATER] = make_batches(2)


def mxfp4_parts(name, values):
    experts, inputs, outputs = values.shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(118, 126, blocks.shape[:-1], dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def fp8_parts(name, values, down=16, along=32):
    rows, columns = values.shape
    scales = torch.rand(-(-rows // down), -(-columns // along)) / 100
    return {name: values.mul(100).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def packed(folder, family, sizes=None, block=(16, 32)):
    """A folder in the published format, and the values that transformers unpacks of it."""
    torch.manual_seed(3)
    model = in_dtype(tiny_model(family, changes=sizes or SIZES[family]), torch.bfloat16)
    model.save_pretrained(folder / "packed")
    tensors, parts = load_file(folder / "packed" / "model.safetensors"), {}
    for name, values in tensors.items():
        if family == "gpt_oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts |= mxfp4_parts(name, values)
        elif (
            family != "gpt_oss" and "layers" in name and values.dim() == 2 and "gate.w" not in name
        ):
            parts |= fp8_parts(name, values, *block)
        else:
            parts[name] = values
    if family == "deepseek_v3":
        further = f"model.layers.{model.config.num_hidden_layers}.eh_proj.weight"
        parts |= fp8_parts(further, torch.randn(40, 72), *block)  # smaller blocks at the edges
    write(
        folder / "packed",
        parts,
        MXFP4 if family == "gpt_oss" else FP8 | {"weight_block_size": block},
    )
    how: Any = FineGrainedFP8Config(weight_block_size=block, dequantize=True)
    how = Mxfp4Config(dequantize=True) if family == "gpt_oss" else how
    theirs = AutoModelForCausalLM.from_pretrained(
        folder / "packed", quantization_config=how, dtype=torch.bfloat16
    )
    model.load_state_dict(theirs.state_dict())
    return folder / "packed", model


def write(folder, tensors, how):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": how}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", few(SIZES))
def test_it_is_trained_and_exported_as_the_model_that_transformers_unpacks(
    family, tmp_path, caplog
):
    folder, theirs = packed(tmp_path, family)
    with caplog.at_level(logging.INFO, "megatrain"), make_engine(folder) as engine:
        how = "mxfp4" if family == "gpt_oss" else "fp8"
        assert f"unpacked from {how} to bfloat16; exports are unpacked" in caplog.text
        got = masters(engine)
        assert same(got, {name: p.float() for name, p in theirs.named_parameters()})
        with make_engine(theirs) as other:
            assert engine.step(STEP).loss == other.step(STEP).loss
            assert same(masters(engine), masters(other))
    with make_engine(folder) as engine:
        engine.save_pretrained(tmp_path / "out")
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert not json.loads((tmp_path / "out" / "config.json").read_text()).get("quantization_config")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert same(dict(again.named_parameters()), dict(theirs.named_parameters()))
    if family == "deepseek_v3":
        [further] = [name for name in files if "eh_proj" in name]
        parts = load_file(folder / "model.safetensors")
        scales = parts[f"{further}_scale_inv"].repeat_interleave(16, 0).repeat_interleave(32, 1)
        wanted = parts[further].float() * scales[:40, :72]
        assert torch.equal(files[further], wanted.bfloat16())


@pytest.mark.parametrize("family", few(["gpt_oss", "qwen3_moe", "deepseek_v3"]))
def test_an_adapter_on_it_is_resumed_and_merged(family, tmp_path):
    folder, theirs = packed(tmp_path, family)
    theirs.save_pretrained(tmp_path / "plain")
    how: dict[str, Any] = {"adapter": LORA, "precision": "bf16", "base": "bf16"}
    with make_engine(tmp_path / "plain", **how) as engine:
        wanted = [engine.step(STEP).loss, engine.step(LATER).loss]
        last = masters(engine)
    with make_engine(folder, **how) as engine:
        assert engine.step(STEP).loss == wanted[0]
        engine.save(tmp_path / "saved")
    with Engine.load(tmp_path / "saved", device="cpu") as engine:
        assert engine.step(LATER).loss == wanted[1]
        assert same(masters(engine), last)
        engine.save_pretrained(tmp_path / "merged", merged=True)
        engine.save_pretrained(tmp_path / "adapter")
    export(str(tmp_path / "adapter"), tmp_path / "whole", merged=True)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("merged", "whole")]
    assert same(*files)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert "quantization_config" not in config


WHOLE = dict.fromkeys(("hidden_size", "moe_intermediate_size", "q_lora_rank"), 128)
KEPT = {
    "gpt_oss": SIZES["gpt_oss"],
    "qwen3_moe": dict.fromkeys(("hidden_size", "moe_intermediate_size"), 128),
    "deepseek_v3": SIZES["deepseek_v3"]
    | WHOLE
    | {"kv_lora_rank": 128, "qk_rope_head_dim": 128, "intermediate_size": 128},
}


@pytest.mark.parametrize("family", few(KEPT))
def test_a_base_that_is_kept_as_the_folder_has_it(family, tmp_path, caplog):
    """Training is that on the unpacked values, bit for bit, in the folder's own bytes."""
    folder, theirs = packed(tmp_path, family, KEPT[family], (128, 128))
    theirs.save_pretrained(tmp_path / "plain")
    how: dict[str, Any] = {"adapter": LORA, "precision": "bf16", "clip": 1e9}
    with make_engine(tmp_path / "plain", **how) as engine:
        wanted, first = engine.step(STEP), masters(engine)
        later, last = engine.step(LATER).loss, masters(engine)
        engine.save_pretrained(tmp_path / "plain merged", merged=True)
    for placement in (Placement(slots=1), Placement(slots=2, resident=("layer 1",), passes=2)):
        with make_engine(folder, base="folder", placement=placement, **how) as engine:
            got = engine.step(STEP)
            assert (got.loss, got.grad_norm) == (wanted.loss, wanted.grad_norm)
            assert same(masters(engine), first)
            kept = {e.name: e for _, e in store_of(engine).entries() if e.is_packed}
            assert all(any(f".{n}." in name for name in kept) for n in ("0", "1"))
            assert any("experts" in name for name in kept)
            stored, numel = (sum(getattr(e, n) for e in kept.values()) for n in ("stored", "numel"))
            assert 2 * stored <= numel * (4.26 / 8 if family == "gpt_oss" else 1.001)
            engine.save(tmp_path / "saved")
            assert engine.step(LATER).loss == later
            assert same(masters(engine), last)
    with Engine.load(tmp_path / "saved", device="cpu") as engine:
        assert engine.step(LATER).loss == later
        assert same(masters(engine), last)
        engine.save_pretrained(tmp_path / "merged", merged=True)
        assert "rounded" not in caplog.text
    files = [load_file(tmp_path / n / "model.safetensors") for n in ("merged", "plain merged")]
    assert same({name: files[0][name] for name in files[1]}, files[1])
    export(str(tmp_path / "saved"), tmp_path / "whole", merged=True)
    values = load_file(tmp_path / "whole" / "model.safetensors")
    assert all(torch.isfinite(each).all() for each in values.values())


def test_blocks_of_the_last_rows_are_smaller():
    """As those of DeepSeek's kv_a_proj_with_mqa are, of 576 rows; transformers refuses them."""
    codes = torch.randn(3, 320, 256).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3, 2) / 100
    stored = torch.cat([each.view(-1).view(torch.uint8) for each in (scales, codes)])
    assert len(stored) == BLOCKS.bytes_of(codes.shape)
    spread = scales.repeat_interleave(128, 1)[:, :320].repeat_interleave(128, 2)
    wanted = (codes.float() * spread).bfloat16().float()
    assert torch.equal(BLOCKS.unpacked(stored, codes.shape), wanted)
    near = BLOCKS.unpacked(BLOCKS.pack(wanted), codes.shape)
    assert (near - wanted).norm() < 0.04 * wanted.norm()


def test_mxfp4_is_that_of_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    kept = PACKINGS["mxfp4"]
    blocks, scales = mxfp4_parts("", torch.empty(3, 64, 40)).values()
    scales.random_(0, 255)  # also those of which fp32 has no normal number
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float()
    turned = scales.transpose(1, 2), blocks.flatten(2).transpose(1, 2)
    stored = torch.cat([each.flatten() for each in turned])
    assert torch.equal(kept.unpacked(stored, wanted.shape), wanted)
    values = torch.randn(3, 64, 40)
    near = kept.unpacked(kept.pack(values), values.shape)
    assert (near - values).norm() < 0.15 * values.norm()
    assert torch.equal(kept.unpacked(kept.pack(near), values.shape), near)


def test_only_what_is_kept_exactly_is_a_base_as_the_folder_has_it(tmp_path):
    how: dict[str, Any] = {"precision": "bf16", "base": "folder"}
    folder, theirs = packed(tmp_path, "qwen3_moe")
    with pytest.raises(InputError, match="'folder', but the model does not come in mxfp4 or in"):
        make_engine(folder, adapter=LORA, **how)
    with pytest.raises(InputError, match="'folder', but the model does not come in mxfp4 or in"):
        make_engine(theirs, adapter=LORA, **how)
    folder, _ = packed(tmp_path, "gpt_oss")
    with pytest.raises(InputError, match=r"are quantised, .* leave base out where you set it"):
        make_engine(folder, **how)


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path):
    tiny_model("deepseek_v3").save_pretrained(tmp_path / "kimi")
    path = tmp_path / "kimi" / "config.json"
    theirs = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.Any"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | theirs))
    with make_engine(tmp_path / "kimi") as engine:
        assert engine.step(STEP).loss == make_engine(tiny_model("deepseek_v3")).step(STEP).loss
        engine.save_pretrained(tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.config.model_type == "deepseek_v3" and not hasattr(exported.config, "auto_map")


def without(ending):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors.pop(next(name for name in tensors if name.endswith(ending)))
        write(folder, tensors, FP8)

    return change


def named(**settings):
    return lambda folder: write(folder, load_file(folder / "model.safetensors"), settings)


def parts(how, packing, change):
    """A change of a folder to plain weights, but for one that is packed; `change` its parts."""

    def to(folder):
        stored = load_file(folder / "model.safetensors")
        plain = {n: t.bfloat16() for n, t in stored.items() if not n.endswith("_inv")}
        packed = packing(plain.pop(Q))
        write(
            folder,
            plain | {Q + part: each for part, each in (packed | change(packed)).items()},
            how,
        )

    return to


def int4(change=lambda _: {}, **weights):
    return parts(
        scheme(**weights),
        lambda w: {
            "_packed": torch.zeros(w.shape[0], w.shape[1] // 8, dtype=torch.int32),
            "_scale": torch.ones(w.shape[0], w.shape[1] // 32, dtype=torch.bfloat16),
            "_shape": torch.tensor(w.shape),
        },
        change,
    )


def mxfp4(change):
    return parts(MXFP4, lambda w: mxfp4_parts("", w.expand(2, *w.shape)), change)


def fp8(change):
    def to(folder):
        stored = load_file(folder / "model.safetensors")
        write(folder, stored | change(stored), FP8)

    return to


def block(size):
    return named(**FP8 | {"weight_block_size": size})


Q = "model.layers.0.self_attn.q_proj.weight"
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
CT: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def scheme(kind="pack-quantized", **weights):
    weights = INT4 | weights
    return CT | {
        "format": kind, "quantization_status": "compressed",
        "config_groups": {"a": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"],
    }  # fmt: skip


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 16}
AWQ: dict[str, Any] = {**GPTQ, "quant_method": "awq", "version": "gemm", "zero_point": True}
ZEROS = Q.replace("weight", "qzeros")


def integer_parts(name, values, how, acts):
    """A matrix in the file of AutoGPTQ or AutoAWQ, and what the library makes of it."""
    (outputs, inputs), bits = values.shape, how["bits"]
    size, per, highest = how["group_size"], 32 // bits, 2**bits - 1
    stored = partial(torch.randint, -(2**31), 2**31 - 1, dtype=torch.int32)
    groups = inputs // size if size > 0 else 1
    scales, zeros = torch.rand(groups, outputs).half() / 50, stored((groups, outputs // per))
    index = torch.arange(inputs, dtype=torch.int32) * groups // inputs
    shifts = torch.arange(0, 32, bits)
    fields = partial(torch.bitwise_right_shift, other=shifts.int())
    offsets = fields(zeros[:, :, None].expand(-1, -1, per)).reshape(groups, -1)
    if how["quant_method"] == "awq":
        codes = stored((inputs, outputs // per))
        order = torch.arange(outputs).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(-1)
        values, offsets = fields(codes[:, :, None]).reshape(inputs, -1)[:, order], offsets[:, order]
    else:
        codes, index = stored((inputs // per, outputs)), index[torch.randperm(inputs)]
        values = (codes[:, None] >> shifts.int()[:, None]).reshape(inputs, outputs)
        offsets = offsets + (how.get("checkpoint_format") != "gptq_v2")
    parts = {"qweight": codes, "qzeros": zeros, "scales": scales}
    parts |= {"g_idx": index} if acts else {}
    at = index.long() if acts else torch.arange(inputs) // (size if size > 0 else inputs)
    wanted = scales[at] * ((values & highest) - (offsets & highest)[at])
    return {name.replace("weight", part): each for part, each in parts.items()}, wanted.T


def integer_folder(folder, how, acts=False):
    torch.manual_seed(3)
    model = tiny_model("qwen3_moe", changes=SIZES["qwen3_moe"]).half()
    model.save_pretrained(folder)
    parts, wanted = dict[str, Any](), dict[str, Any]()
    for name, values in load_file(folder / "model.safetensors").items():
        if "layers" not in name or values.dim() != 2 or "gate.w" in name:
            parts[name] = values
            continue
        packed, wanted[name] = integer_parts(name, values, how, acts)
        parts |= packed
    write(folder, parts, how)
    return wanted


@pytest.mark.parametrize(
    ("how", "acts"),
    few(
        [
            (GPTQ, True), (AWQ, False), (GPTQ | {"checkpoint_format": "gptq_v2"}, True),
            (GPTQ | {"bits": 8, "group_size": -1}, False), (AWQ | {"group_size": -1}, False),
        ]
    ),
)  # fmt: skip
def test_values_of_integers_are_those_of_their_library(how, acts, tmp_path, caplog):
    wanted = integer_folder(tmp_path / "packed", how, acts)
    caplog.set_level(logging.INFO, "megatrain")
    with Engine(tmp_path / "packed", device="cpu", precision="fp32") as engine:
        assert f"unpacked from {how['quant_method']} to float16" in caplog.text
        engine.save_pretrained(tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert wanted and same({name: got[name] for name in wanted}, wanted)


def gptq(change):
    def to(folder):
        shutil.rmtree(folder)
        integer_folder(folder, GPTQ)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        write(folder, tensors, GPTQ)

    return to


REFUSED = {
    "no scales": (without("q_proj.weight_scale_inv"), f"lacks its '{Q}_scale_inv'"),
    "no values": (without("q_proj.weight"), f"has no matrix '{Q}' of float8"),
    "no config": (named(), "one whose config.json has the right quantization_config"),
    "other blocks": (
        block([8, 8]),
        r"of \[64, 32\] has .* of \[4, 1\], which .* weight_block_size \[8, 8\]",
    ),
    "a scalar": (
        fp8(lambda _: {f"{Q}_scale_inv": torch.ones(())}),
        r"_inv' of \[\], .* \[16, 32\]",
    ),
    "blocks without block": (block(None), r"of \[4, 1\], which .* weight_block_size None"),
    **{
        f"block {size}": (block(size), re.escape(f"weight_block_size {size} (quantization_config"))
        for size in ("abc", [0, 0], [-16, 32], [16])
    },
    "cut scales": (
        int4(lambda p: {"_scale": p["_scale"][:, :1].contiguous()}),
        r"packed' of \[64, 8\] has .* of \[64, 1\], which .* strategy group, group_size 32",
    ),
    "cut values": (
        int4(lambda p: {"_packed": p["_packed"][:, :4].contiguous()}),
        r"packed' of \[64, 4\] has .* of \[64, 2\], which .* strategy group, group_size 32",
    ),
    "other groups": (int4(group_size=64), r"of \[64, 2\], which .* group_size 64"),
    "other shape": (int4(lambda _: {"_shape": torch.tensor([64, 63])}), r"is not \[64, 64\]"),
    "no zeros": (int4(symmetric=False), "has no zero points, but symmetric is False"),
    "zeros": (
        int4(lambda _: {"_zero_point": torch.zeros(8, 2, dtype=torch.int32)}),
        "has zero points, but symmetric is True",
    ),
    "cut zeros": (
        int4(lambda _: {"_zero_point": torch.zeros(8, 1, dtype=torch.int32)}, symmetric=False),
        r"zero_point' of \[8, 1\] has .* of \[64, 2\]",
    ),
    "float4": (int4(type="float"), "compressed-tensors with type float"),
    "plain beside": (mxfp4(lambda _: {"": torch.ones(2, 64, 64)}), "is stored beside its packed"),
    "int32 scales": (
        mxfp4(lambda p: {"_scales": p["_scales"].int()}),
        "lacks its .*_scales' of uint8",
    ),
    "NaN scale": (
        fp8(lambda stored: {f"{Q}_scale_inv": stored[f"{Q}_scale_inv"] * torch.nan}),
        f"'{Q}_scale_inv' holds a scale that is NaN or infinite",
    ),
    "groups of text": (
        named(**CT | {"config_groups": {"a": "int4", "b": {"weights": "int4"}}}),
        "compressed-tensors with config_groups {'a': 'int4'",
    ),
    "hqq": (named(quant_method="hqq"), "quantised by hqq; only NF4 of bitsandbytes"),
    "3 bits": (named(quant_method="gptq", bits=3), "gptq with bits 3 "),
    "marlin": (named(**GPTQ | {"checkpoint_format": "marlin"}), "gptq with checkpoint_format"),
    "by columns": (named(**AWQ | {"version": "gemv"}), "awq with version gemv"),
    "no zero points": (gptq(lambda p: p.pop(ZEROS)), f"qweight' lacks its '{ZEROS}'"),
    "other groups of gptq": (
        gptq(lambda p: p.update({ZEROS: p[ZEROS][:1].clone()})),
        "are not the scales of group_size",
    ),
    "nvfp4": (
        named(**CT | {"format": "nvfp4-pack-quantized"}),
        "compressed-tensors with config_groups None",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return packed(tmp_path_factory.mktemp("packed"), "qwen3_moe")[0]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_unpacked_is_refused(case, folder, tmp_path):
    change, message = REFUSED[case]
    change(copied := Path(shutil.copytree(folder, tmp_path / "packed")))
    with pytest.raises(InputError, match=message) as refused:
        make_engine(copied)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("base", ["bf16", "folder"])
def test_exponents_that_stand_for_nan_are_refused(base, tmp_path):
    folder, _ = packed(tmp_path, "gpt_oss")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scales"))
    tensors[name][0, 0, 0] = 255
    write(folder, tensors, MXFP4)
    with pytest.raises(InputError, match=f"'{name}' holds a scale that is NaN"):
        make_engine(folder, adapter=LORA, base=base, precision="bf16")


INT3, INT8 = INT4 | {"num_bits": 3}, INT4 | {"num_bits": 8, "group_size": None}
TWO = {"a": {"weights": INT4}, "b": {"weights": INT4 | {"group_size": 64}}}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (CT | {"config_groups": {"a": {"weights": INT3}}}, "num_bits 3"),
        (CT | {"config_groups": TWO}, "group_size 64"),
        (CT | {"format": "int-quantized", "config_groups": TWO}, "group_size 64"),
        (
            CT | {"config_groups": {"a": {"weights": INT4, "format": "nvfp4-pack-quantized"}}},
            "format nvfp4-pack-quantized",
        ),
        (
            CT | {"config_groups": {"a": {"weights": INT4}}, "transform_config": {"a": 1}},
            "transform_config {'a': 1}",
        ),
        (
            CT | {"config_groups": {"a": {"weights": INT4}}, "sparsity_config": {"a": 1}},
            "sparsity_config {'a': 1}",
        ),
    ],
)
def test_other_kinds_of_compressed_tensors_are_refused_by_what_is_other(settings, field):
    with pytest.raises(InputError, match=f"compressed-tensors with {field} .*; only"):
        quantised_base({"quantization_config": settings}, "config.json")


def test_parts_in_another_shard_than_the_values_count_as_read(folder, tmp_path, caplog):
    copied = Path(shutil.copytree(folder, tmp_path / "packed"))
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    shard = {name: f"{name.endswith('_scale_inv')}.safetensors" for name in tensors}
    for file in {*shard.values()}:
        save_file({n: t for n, t in tensors.items() if shard[n] == file}, copied / file)
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard}))
    with make_engine(copied) as engine, make_engine(folder) as whole:
        assert same(masters(engine), masters(whole))
    assert "named by no index" not in caplog.text


SCHEMES = {
    "int4": scheme(),
    "zeros": scheme(symmetric=False),
    "rows": scheme(strategy="channel", group_size=None),
    "int8": scheme("int-quantized", num_bits=8, strategy="channel", group_size=None),
    "float8": scheme(
        "float-quantized", num_bits=8, type="float", strategy="channel", group_size=None
    ),
    "float8 in blocks": scheme(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32],
        group_size=None,
    ),
}  # fmt: skip


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors"
)
@pytest.mark.parametrize("case", SCHEMES)
def test_values_are_those_of_compressed_tensors(case, tmp_path):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    torch.manual_seed(3)
    how = SCHEMES[case]
    weights = how["config_groups"]["a"]
    compressor = BaseCompressor.get_value_from_registry(how["format"])
    model = in_dtype(tiny_model("qwen3_moe", changes=SIZES["qwen3_moe"]), torch.bfloat16)
    model.save_pretrained(tmp_path)
    tensors, parts, wanted = load_file(tmp_path / "model.safetensors"), {}, {}
    for name, values in tensors.items():
        if "layers" not in name or values.dim() != 2 or "gate.w" in name:
            parts[name] = values
            continue
        stem, taken = name.removesuffix("weight"), QuantizationScheme(**weights)
        rows, columns = values.shape
        grids = {"channel": (rows, 1), "block": (rows // 16, columns // 32)}
        grid = grids.get(weights["weights"]["strategy"], (rows, columns // 32))
        state = {"weight": values, "weight_scale": torch.rand(grid).bfloat16() / 50}
        if not weights["weights"]["symmetric"]:
            state["weight_zero_point"] = torch.randint(-8, 8, grid, dtype=torch.int8)
        state = compressor.compress(state, taken)
        parts |= {stem + part: each.contiguous() for part, each in state.items()}
        wanted[name] = compressor.decompress(state, taken)["weight"]
    write(tmp_path, parts, how)
    with Engine(tmp_path, device="cpu") as engine:
        engine.save_pretrained(tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert wanted and same({name: got[name] for name in wanted}, wanted)
