"""Folders packed for inference: unpacked to the values of transformers, to the bit, or refused."""

import json
import logging
import re
import shutil
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from megatrain import Engine, InputError
from megatrain.model.quantised import quantised_base, with_packed_weights
from megatrain.model.safetensors_io import stored_tensors
from megatrain.source.source import open_source, structure
from megatrain.tile.formats import BLOCKS, PACKINGS
from megatrain.train.export import export
from tests.families.tiny import tiny_config, tiny_model, tiny_multimodal
from tests.parity.cases import in_dtype, llama, make_engine, masters, same
from tests.parity.packed_folders import LORA, STEP, assert_trains_as, share_of_bf16, write
from tests.refusals import refused, table
from tests.sweeps import few

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
LINEAR = re.compile(r".*layers.*(?<!gate)\.weight")
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


def mxfp4_parts(name, values):
    experts, inputs, outputs = values.shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(118, 126, blocks.shape[:-1], dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def fp8_parts(name, values, down=16, along=32):
    rows, columns = values.shape
    scales = torch.rand(-(-rows // down), -(-columns // along)) / 100
    return {name: values.mul(100).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def v4_parts(name, values, *block):
    """Experts in 4 bits, all else in 8, with exponents as scales, as DeepSeek V4 is published."""
    rows, columns = values.shape
    of_experts = ".experts." in name
    down, along = (1, 32) if of_experts else block
    grid = -(-rows // down), -(-columns // along)
    exponents = torch.randint(118, 126, grid, dtype=torch.uint8)
    codes = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
    codes = codes if of_experts else values.mul(100).to(torch.float8_e4m3fn)
    scales = exponents.view(torch.float8_e8m0fnu)
    return {name: codes, name.removesuffix("weight") + "scale": scales}


def packed(folder, family, sizes=None, block=(16, 32)):
    """A folder in the published format, and the values that transformers unpacks of it."""
    torch.manual_seed(3)
    changes = sizes or SIZES.get(family, {"moe_intermediate_size": 32})
    model = in_dtype(tiny_model(family, changes=changes), torch.bfloat16)
    make, block = (v4_parts, (8, 8)) if family == "deepseek_v4" else (fp8_parts, block)
    model.save_pretrained(folder / "packed")
    tensors, parts = load_file(folder / "packed" / "model.safetensors"), {}
    for name, values in tensors.items():
        if family == "gpt_oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts |= mxfp4_parts(name, values)
        elif family != "gpt_oss" and LINEAR.fullmatch(name) and values.dim() == 2:
            parts |= make(name, values, *block)
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


@pytest.mark.parametrize("family", few([*SIZES, "deepseek_v4"], 0, 4))
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


def test_the_settings_may_be_in_those_of_the_text(tmp_path):
    """Kimi K2.5 is published so; an export has them in neither place."""
    model, parts = in_dtype(tiny_multimodal("kimi_k25"), torch.bfloat16), {}
    for place in ("outside", "inside"):
        model.save_pretrained(tmp_path / place)
    for name, values in load_file(tmp_path / "outside" / "model.safetensors").items():
        parts |= fp8_parts(name, values) if "_proj.weight" in name else {name: values}
    for place in ("outside", "inside"):
        write(tmp_path / place, parts, FP8)
        config = json.loads((tmp_path / place / "config.json").read_text())
        if place == "inside":
            config["text_config"]["quantization_config"] = config.pop("quantization_config")
        (tmp_path / place / "config.json").write_text(json.dumps(config))
        with make_engine(tmp_path / place) as engine:
            engine.save_pretrained(tmp_path / f"{place} out")
        assert "quant" not in (tmp_path / f"{place} out" / "config.json").read_text()
    outputs = [tmp_path / f"{place} out" / "model.safetensors" for place in ("outside", "inside")]
    assert same(*map(load_file, outputs))


@pytest.mark.parametrize("family", few(SIZES))
def test_an_export_is_packed_as_its_folder(family, tmp_path):
    """What has not changed keeps its bytes; transformers reads what has as it is read here."""
    folder, _ = packed(tmp_path, family)
    with make_engine(folder) as engine:
        engine.save_pretrained(tmp_path / "as it came")
        engine.step(STEP)
        engine.save(tmp_path / "saved")
        trained = masters(engine)
    export(str(tmp_path / "as it came"), tmp_path / "unchanged", like=folder)
    assert same(*(load_file(f / "model.safetensors") for f in (tmp_path / "unchanged", folder)))
    out = tmp_path / "out"
    export(str(tmp_path / "saved"), out, like=folder)
    read = json.loads((out / "config.json").read_text())["quantization_config"]
    assert read == json.loads((folder / "config.json").read_text())["quantization_config"]
    how: Any = FineGrainedFP8Config(weight_block_size=(16, 32), dequantize=True)
    how = Mxfp4Config(dequantize=True) if family == "gpt_oss" else how
    theirs = AutoModelForCausalLM.from_pretrained(
        out, quantization_config=how, dtype=torch.bfloat16
    )
    with make_engine(out) as engine:
        got = masters(engine)
    assert same(got, {name: p.float() for name, p in theirs.named_parameters()})
    most = 1 / 4 if family == "gpt_oss" else 1 / 16  # of the largest: half of a code's last step
    for name, values in trained.items():
        assert (got[name] - values).abs().max() <= most * values.abs().max()
    assert any(
        not torch.equal(got[name], values.bfloat16().float()) for name, values in trained.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_float8_is_packed_near_its_values(dtype, tmp_path):
    """Whatever scales are kept in; the last blocks are smaller, and one is zero."""
    values = torch.randn(2, 40, 72) * torch.logspace(-6, 6, 40)[:, None]
    values[1, :16, :32] = 0
    scales = torch.ones(2, 3, 3, dtype=dtype)
    tensors = {"w": values.to(torch.float8_e4m3fn), "w_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    weight = with_packed_weights(tmp_path, stored_tensors(tmp_path))["w"]
    parts = {name: part.contiguous() for name, part in weight.packed(values).items()}
    save_file(parts, tmp_path / "model.safetensors")
    again = with_packed_weights(tmp_path, stored_tensors(tmp_path))["w"].read().float()
    for rows, columns in product(range(0, 40, 16), range(0, 72, 32)):
        block = (slice(None), slice(rows, rows + 16), slice(columns, columns + 32))
        largest = values[block].abs().amax((1, 2), keepdim=True)
        assert ((again[block] - values[block]).abs() <= largest / 16).all()
    assert not again[1, :16, :32].any()


def test_what_cannot_be_packed_alike_is_refused(tmp_path):
    folder, _ = packed(tmp_path, "qwen3_moe")
    (llama_folder := tmp_path / "llama").mkdir()
    llama().save_pretrained(llama_folder)
    for run, like, why in (
        (llama_folder, llama_folder, "are packed by nothing; only mxfp4 and float8"),
        (tmp_path / "none", llama_folder, "are packed by nothing"),  # before a model is written
        (llama_folder, folder, "in the exported model.*give the folder from which the run began"),
    ):
        with refused(f"--like {like}.*{why}"):
            export(str(run), tmp_path / "out", like=like)
        assert not (tmp_path / "out").exists()


WHOLE = dict.fromkeys(("hidden_size", "moe_intermediate_size", "q_lora_rank"), 128)
KEPT = {
    "gpt_oss": SIZES["gpt_oss"],
    "qwen3_moe": dict.fromkeys(("hidden_size", "moe_intermediate_size"), 128),
    "deepseek_v3": SIZES["deepseek_v3"]
    | WHOLE
    | {"kv_lora_rank": 128, "qk_rope_head_dim": 128, "intermediate_size": 128},
}


@pytest.mark.parametrize(
    ("base", "family"), few([(b, f) for b in ("folder", "bf16") for f in KEPT])
)
def test_an_adapter_on_it_trains_as_on_the_unpacked_values(base, family, tmp_path, caplog):
    """Bit for bit; also where the base is kept in the folder's own bytes."""
    folder, theirs = packed(tmp_path, family, KEPT[family], (128, 128))
    theirs.save_pretrained(tmp_path / "plain")
    entries = assert_trains_as(folder, tmp_path / "plain", tmp_path, base=base)
    kept = [entry.name for entry in entries if entry.needs_unpacking]
    assert bool(kept) == (base == "folder") and "rounded" not in caplog.text
    if kept:
        assert all(any(part in name for name in kept) for part in (".0.", ".1.", "experts"))
        assert share_of_bf16(entries) <= (4.26 / 16 if family == "gpt_oss" else 1.001 / 2)


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


@pytest.mark.parametrize("experts", ["fp8", "fp4"])
def test_a_plan_counts_experts_in_4_bits_as_they_are_kept_in_bf16(experts):
    config = tiny_config("deepseek_v4", {"hidden_size": 128, "moe_intermediate_size": 128})
    config.quantization_config = FP8 | {"weight_block_size": [128, 128], "expert_dtype": experts}
    kept = structure(open_source(config, {"target_modules": ["kv_proj"]}, "folder")).packed
    assert kept and any("gate_up_proj" in name for name in kept) == (experts == "fp8")


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


Q = "model.layers.0.self_attn.q_proj.weight"
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def scheme(**weights):
    groups = {"a": {"targets": ["Linear"], "weights": INT4 | weights}}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "compressed", "config_groups": groups, "ignore": ["lm_head"],
    }  # fmt: skip


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 16}
AWQ: dict[str, Any] = {**GPTQ, "quant_method": "awq", "version": "gemm", "zero_point": True}


stored = partial(torch.randint, -(2**31), 2**31 - 1, dtype=torch.int32)


def grouped_parts(name, values):
    """A matrix in the file of compressed-tensors, in int4, and what the library makes of it."""
    rows, columns = values.shape
    codes, scales = stored((rows, columns // 8)), torch.rand(rows, columns // 32).half() / 50
    fields = (codes[:, :, None] >> torch.arange(0, 32, 4).int()) & 15
    wanted = (fields.reshape(rows, -1) - 8) * scales.repeat_interleave(32, 1)
    parts = {"_packed": codes, "_scale": scales, "_shape": torch.tensor(values.shape)}
    return {name + part: each for part, each in parts.items()}, wanted


def integer_parts(name, values, how, acts):
    """A matrix in the file of AutoGPTQ or AutoAWQ, and what the library makes of it."""
    if "bits" not in how:
        return grouped_parts(name, values)
    (outputs, inputs), bits = values.shape, how["bits"]
    size, per, highest = how["group_size"], 32 // bits, 2**bits - 1
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
            (scheme(), False),
        ],
        *(0, 1, 2, 5),
    ),
)  # fmt: skip
def test_values_of_integers_are_those_of_their_library(how, acts, tmp_path, caplog):
    wanted = integer_folder(tmp_path / "packed", how, acts)
    caplog.set_level(logging.INFO, "megatrain")
    with Engine(tmp_path / "packed", device="cpu", precision="fp32") as engine:
        assert re.search(f"unpacked from {how['quant_method']}.* to float16", caplog.text)
        engine.save_pretrained(tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert wanted and same({name: got[name] for name in wanted}, wanted)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (GPTQ | {"checkpoint_format": "gptq_v2"}, GPTQ | {"format": "gptq_v2"}),
        (GPTQ, {"quant_method": "gptq", "group_size": 16}),
        (AWQ, {"quant_method": "awq", "q_group_size": 16, "w_bit": 4, "format": "gemm"}),
    ],
    ids=["format", "no bits", "awq"],
)
def test_settings_may_have_other_names(how, named, tmp_path):
    """The names that transformers also takes, and those of AutoAWQ's own file."""
    integer_folder(tmp_path, how)
    wanted = masters(make_engine(tmp_path))
    write(tmp_path, load_file(tmp_path / "model.safetensors"), named)
    assert same(masters(make_engine(tmp_path)), wanted)


@pytest.mark.parametrize("kind", ["float", "int"])
def test_scales_of_activations_and_of_caches_are_left_aside(kind, tmp_path):
    model = in_dtype(llama(), torch.bfloat16)
    model.save_pretrained(tmp_path)
    parts, wanted = dict[str, Any](), dict[str, Any]()
    for name, values in load_file(tmp_path / "model.safetensors").items():
        if "_proj" not in name:
            parts[name] = values
            continue
        scales = torch.rand(len(values), 1).bfloat16()
        codes = (values * 20).to(torch.int8 if kind == "int" else torch.float8_e4m3fn)
        wanted[name] = (codes.float() * scales.float()).bfloat16().float()
        parts |= {name: codes, f"{name}_scale": scales}
        for end in ("input_zero_point", "output_scale", "k_scale"):
            parts[name.replace("weight", end)] = torch.ones(1)
    how = scheme(type=kind, num_bits=8, strategy="channel", group_size=None)
    write(tmp_path, parts, how | {"format": "naive-quantized"})
    with make_engine(tmp_path) as engine:
        got = masters(engine)
    assert wanted and same({name: got[name] for name in wanted}, wanted)


def altered(folder, how, change):
    """Let a folder of fp8 be as `how` says, with one packed matrix if that is another format."""
    tensors = load_file(folder / "model.safetensors")
    if how.get("quant_method", "fp8") != "fp8":
        tensors = {name: t.bfloat16() for name, t in tensors.items() if not name.endswith("_inv")}
        values = tensors.pop(Q)
        if how == MXFP4:
            tensors |= mxfp4_parts(Q, values.expand(2, *values.shape))
        else:
            tensors |= integer_parts(Q, values, how, acts=False)[0]
    change(tensors)
    write(folder, tensors, how)


def but(**parts):
    """A change of Q's parts, by their endings."""
    return lambda tensors: tensors.update({Q + end: make(tensors) for end, make in parts.items()})


ZEROS, CODES = (Q.replace("weight", part) for part in ("qzeros", "qweight"))
REFUSED: dict[str, tuple[dict[str, Any], Any]] = {
    f"lacks its '{Q}_scale_inv'": (FP8, lambda t: t.pop(f"{Q}_scale_inv")),
    f"has no matrix '{Q}' of float8": (FP8, lambda t: t.pop(Q)),
    "scale that is NaN or inf": (FP8, lambda t: t[f"{Q}_scale_inv"].mul_(torch.nan)),
    "one whose config.json has the right quantization_config": ({}, len),
    r"of \[64, 32\] has .* of \[4, 1\], which .* weight_block_size \[8, 8\]": (
        FP8 | {"weight_block_size": [8, 8]}, len,
    ),
    r"packed' of \[64, 8\] has .* of \[64, 1\], which .* strategy group, group_size 32": (
        scheme(), but(_scale=lambda t: t[f"{Q}_scale"][:, :1]),
    ),
    r"of \[64, 2\], which .* group_size 64": (scheme(group_size=64), len),
    r"is not \[64, 64\]": (scheme(), but(_shape=lambda t: torch.tensor([64, 63]))),
    "has no zero points, but symmetric is False": (scheme(symmetric=False), len),
    "has zero points, but symmetric is True": (
        scheme(), but(_zero_point=lambda t: torch.zeros(8, 2, dtype=torch.int32)),
    ),
    r"zero_point' of \[8, 1\] has .* of \[64, 2\]": (
        scheme(symmetric=False), but(_zero_point=lambda t: torch.zeros(8, 1, dtype=torch.int32)),
    ),
    "is stored beside its packed": (MXFP4, lambda t: t.update({Q: torch.ones(2, 64, 64)})),
    "lacks its .*_scales' of uint8": (MXFP4, but(_scales=lambda t: t[f"{Q}_scales"].int())),
    f"qweight' lacks its '{ZEROS}'": (GPTQ, lambda t: t.pop(ZEROS)),
    "are not the scales of group_size": (GPTQ, lambda t: t.update({ZEROS: t[ZEROS][:1]})),
    "not matrices of int32": (GPTQ, lambda t: t.update({CODES: t[CODES][None]})),
    "groups of .*: index out of range": (
        GPTQ, lambda t: t.update({CODES.replace("qweight", "g_idx"): torch.full((64,), -1)}),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return packed(tmp_path_factory.mktemp("packed"), "qwen3_moe")[0]


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_unpacked_is_refused(message, folder, tmp_path):
    how, change = REFUSED[message]
    copied = Path(shutil.copytree(folder, tmp_path / "packed"))
    altered(copied, how, change)
    with refused(message):
        make_engine(copied)


@pytest.mark.parametrize("base", ["bf16", "folder"])
def test_exponents_that_stand_for_nan_are_refused(base, tmp_path):
    folder, _ = packed(tmp_path, "gpt_oss")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scales"))
    tensors[name][0, 0, 0] = 255
    write(folder, tensors, MXFP4)
    with pytest.raises(InputError, match=f"'{name}' holds a scale that is NaN"):
        make_engine(folder, adapter=LORA, base=base, precision="bf16")


OTHERS = table(__file__, "refusals.yaml")["packed"]


@pytest.mark.parametrize("said", OTHERS)
def test_other_formats_are_refused_by_what_is_other(said):
    with pytest.raises(InputError, match=f"quantised by {said}.*; only NF4 of bitsandbytes"):
        quantised_base({"quantization_config": OTHERS[said]}, "config.json")


def test_scales_may_be_exponents_of_two(folder, tmp_path):
    values = []
    for kind in (torch.float32, torch.uint8, torch.float8_e8m0fnu):
        tensors = load_file(folder / "model.safetensors")
        for name in (name for name in tensors if name.endswith("_scale_inv")):
            exponents = torch.arange(tensors[name].numel()).view_as(tensors[name]) % 8 + 118
            scales = exponents if kind == torch.uint8 else torch.exp2(exponents - 127)
            tensors[name] = scales.to(kind)
        copied = Path(shutil.copytree(folder, tmp_path / str(kind)))
        write(copied, tensors, FP8)
        values.append(masters(make_engine(copied)))
    assert same(values[0], values[1]) and same(values[0], values[2])


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
