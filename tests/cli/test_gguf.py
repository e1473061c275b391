"""Models that come as GGUF files, and leave as such by llama.cpp's converter."""

import json
import shutil
import stat
import sys
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Gemma2Config

from megatrain import AdamW, Engine, InputError
from megatrain.compat.gguf import refuse_unread
from tests.cli.cases import TALK, TEMPLATE, sets, write_run_file
from tests.families.tiny import tiny_model

WIDTH, MLP, LAYERS, TOKENS = 32, 64, 2, 300
SHAPES = {
    "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH, WIDTH), "attn_v": (WIDTH, WIDTH),
    "attn_output": (WIDTH, WIDTH), "ffn_gate": (MLP, WIDTH), "ffn_up": (MLP, WIDTH),
    "ffn_down": (WIDTH, MLP),
}  # fmt: skip
NAMES = {"ffn_down": "mlp.down_proj", "attn_v": "self_attn.v_proj"}
LORA = {"r": 4, "target_modules": "all-linear"}
F32, F16, Q8 = (getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "F16", "Q8_0"))


def write_gguf(path, tokenizer_folder, kind=Q8, seed=0, positions=64, without=None, change=None):
    """A tiny Qwen2 with a tokenizer and a chat template; returns its matrices as they are read."""
    draw = torch.Generator().manual_seed(seed)
    tree = json.loads((tokenizer_folder / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(positions)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    tokens = sorted(tree["vocab"], key=tree["vocab"].get)
    tokens += [f"<unused{number}>" for number in range(TOKENS - len(tokens) - 1)] + ["<|turn|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (TOKENS - 1) + [3])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tree["merges"]])
    writer.add_eos_token_id(TOKENS - 1)
    writer.add_chat_template(TEMPLATE)
    read = {}

    def add(name, shape, kind):
        values = torch.randn(shape, generator=draw).mul(0.2).numpy()
        data = gguf.quantize(values, kind)
        if name != without:
            writer.add_tensor(name, data, raw_dtype=kind)
        read[name] = torch.from_numpy(gguf.dequantize(data, kind).reshape(shape).copy())

    add("token_embd.weight", (TOKENS, WIDTH), kind)
    add("output_norm.weight", (WIDTH,), F32)
    for layer in range(LAYERS):
        for name in ("attn_norm.weight", "ffn_norm.weight", *(f"attn_{n}.bias" for n in "qkv")):
            add(f"blk.{layer}.{name}", (WIDTH,), F32)
        for name, shape in SHAPES.items():
            add(f"blk.{layer}.{name}.weight", shape, kind)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


@pytest.fixture
def model(megatrain, tmp_path, tokenizer_folder):
    write_gguf(tmp_path / "tiny.gguf", tokenizer_folder)
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize(("kind", "dtype"), [(F32, "float32"), (F16, "float16"), (Q8, "bfloat16")])
def test_weights_tokenizer_and_template_are_those_of_the_file(
    kind, dtype, megatrain, tmp_path, tokenizer_folder
):
    read = write_gguf(tmp_path / "tiny.gguf", tokenizer_folder, kind)
    shutil.copytree(tokenizer_folder, tmp_path, dirs_exist_ok=True)  # another's files beside it
    (tmp_path / "chat_template.jinja").write_text("another")
    megatrain.done("export", "tiny.gguf", "whole")
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    for name, theirs in NAMES.items():
        values = stored[f"model.layers.1.{theirs}.weight"]
        assert values.dtype == getattr(torch, dtype)
        assert torch.equal(values, read[f"blk.1.{name}.weight"].to(values.dtype))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    assert tokenizer.eos_token == "<|turn|>"
    told = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert told == "<user>the cat sat<|turn|>\n<assistant>on the mat<|turn|>\n"
    text = "the cat sat on the mat"
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(tokenizer_folder).encode(text)
    ids, logits = torch.arange(8)[None], []
    for place in ("tiny.gguf", "whole"):
        with Engine(tmp_path / place, device="cpu", precision="fp32") as engine:
            logits.append(engine.logits({"input_ids": ids}))
    assert torch.equal(*logits)


def test_a_run_from_a_file_goes_on_to_the_bit(megatrain, model, user_cache, tmp_path, caplog):
    run_file = write_run_file(tmp_path, tmp_path)
    chosen = sets(
        model={"path": str(model)}, adapter={"method": "lora", **LORA}, engine__precision="bf16"
    )

    megatrain.resumed(run_file, 4, 2, *chosen, name="adapter_model.safetensors")
    assert f"{model}: dequantised to bfloat16, in " in caplog.text
    shutil.rmtree(user_cache / "gguf")
    config = json.loads((tmp_path / "whole" / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model)
    megatrain.done("export", "whole", "merged", "--merged")
    asked = ["--prompt", "cat", "--max-new-tokens", "2", "--device", "cpu"]
    said = [megatrain.done("generate", place, *asked).stdout for place in ("whole", model)]
    assert all(text for text in said)


def test_a_checkpoint_refuses_another_file(megatrain, model, tmp_path, tokenizer_folder):
    with Engine(model, optimizer=AdamW(lr=1e-3), adapter=LORA, device="cpu") as engine:
        engine.save(tmp_path / "saved")
    write_gguf(model, tokenizer_folder, seed=1)
    with pytest.raises(InputError, match=rf"{model}: its weights are not those that .*saved was"):
        Engine.load(tmp_path / "saved", device="cpu")


def test_a_plan_reads_no_weights(megatrain, model, user_cache, tmp_path, tokenizer_folder):
    here = ["--gpu", "4090", "--host-memory", "64GiB", "--sequence-length", 64, "--tokens", 256]
    assert "fits" in megatrain.done("plan", "--model", model, *here).output
    scaled = PARTIAL["holds positions scaled by yarn, which transformers"]
    write_gguf(tmp_path / "scaled.gguf", tokenizer_folder, **scaled)
    megatrain.refused("positions scaled by yarn", "plan", "--model", "scaled.gguf", *here)
    assert not (user_cache / "gguf").exists()


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_may_repeat_the_table_or_differ_from_it(tied, user_cache, tmp_path):
    """Files of Falcon have both; transformers says that these are tied."""
    model = tiny_model("falcon", changes={"tie_word_embeddings": tied})
    config = model.config
    writer = gguf.GGUFWriter(tmp_path / "falcon.gguf", "falcon")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "h", "th", *(f"<{n}>" for n in range(3, config.vocab_size))])
    writer.add_token_merges(["t h"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.FALCON, config.num_hidden_layers)
    for name, values in model.state_dict().items():
        stem, _, part = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{part}", values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ids = torch.arange(8)[None]
    with Engine(tmp_path / "falcon.gguf", device="cpu", precision="fp32") as engine:
        logits = engine.logits({"input_ids": ids})
    with torch.no_grad():
        assert torch.equal(logits, model.eval()(input_ids=ids).logits)


def test_what_cannot_be_read_is_refused_in_a_line(megatrain, model, tmp_path, monkeypatch):
    (tmp_path / "cut.gguf").write_bytes(model.read_bytes()[:5000])
    (tmp_path / "text.gguf").write_text("no model")
    for name in ("cut.gguf", "text.gguf"):
        megatrain.refused(f"{name}: transformers cannot read it", "export", name, "out")
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    told = "needs the package gguf: pip install gguf"
    megatrain.refused(told, "generate", model, "--prompt", "a")
    assert not (tmp_path / "out").exists()


SCALED = np.ones(4, np.float32)
PARTIAL = {
    "lacks the tensor of 'model.layers.1.mlp.up_proj.weight'": {"without": "blk.1.ffn_up.weight"},
    "is one part of 2; merge them": {"change": lambda writer: writer.add_uint16("split.count", 2)},
    "holds rope_freqs.weight (scaled positions), which transformers": {
        "change": lambda writer: writer.add_tensor("rope_freqs.weight", SCALED)
    },
    "holds positions scaled by yarn, which transformers": {
        "change": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    },
    "holds attention.sliding_window 8, which transformers does not read": {
        "change": lambda writer: writer.add_sliding_window(8)
    },
    "holds rope.dimension_count 8, which transformers does not read": {
        "change": lambda writer: writer.add_rope_dimension_count(8)
    },
    "holds logit_scale 0.5, which": {"change": lambda writer: writer.add_logit_scale(0.5)},
    "holds attention.key_length 32, which": {"change": lambda writer: writer.add_key_length(32)},
    "holds attention.clamp_kqv 4, which": {"change": lambda writer: writer.add_clamp_kqv(4.0)},
    "holds attention to later tokens, which": {
        "change": lambda writer: writer.add_causal_attention(False)
    },
    "holds expert_gating_func 2, which": {
        "change": lambda writer: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    },
    "holds attention.sliding_window_pattern [True, False], which": {
        "change": lambda writer: writer.add_sliding_window_pattern([True, False])
    },
    "holds rope.scaling.factor 4, which": {
        "change": lambda writer: writer.add_rope_scaling_factor(4.0)
    },
    "4 of its numbers have no place in transformers' Qwen2ForCausalLM": {
        "change": lambda writer: writer.add_tensor("blk.0.attn_output.bias", SCALED)
    },
}


@pytest.mark.parametrize("reason", PARTIAL)
def test_a_file_of_which_a_part_would_not_be_read_is_refused(
    reason, megatrain, tmp_path, tokenizer_folder
):
    write_gguf(tmp_path / "part.gguf", tokenizer_folder, **PARTIAL[reason])
    for _ in range(2):  # nothing is kept
        megatrain.refused(reason, "export", "part.gguf", "out")


def test_settings_that_transformers_reads_are_no_reason_to_refuse(
    megatrain, tmp_path, tokenizer_folder, caplog
):
    def change(writer):
        writer.add_rope_dimension_count(WIDTH // 2)
        writer.add_key_length(WIDTH // 2)
        writer.add_sliding_window(0)
        writer.add_logit_scale(1.0)
        writer.add_causal_attention(True)
        writer.add_sliding_window_pattern([False] * LAYERS)

    write_gguf(tmp_path / "whole.gguf", tokenizer_folder, change=change)
    megatrain.done("export", "whole.gguf", "out")
    assert "splitting words" not in caplog.text


def test_a_file_whose_words_are_split_otherwise_is_said(
    megatrain, tmp_path, tokenizer_folder, caplog, monkeypatch
):
    add = gguf.GGUFWriter.add_tokenizer_pre
    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_pre", lambda w, _: add(w, "deepseek-llm"))
    write_gguf(tmp_path / "other.gguf", tokenizer_folder)
    megatrain.done("export", "other.gguf", "out")
    assert "does not know its way of splitting words, deepseek-llm" in caplog.text


def test_queries_of_gemma_27b_are_scaled_otherwise(tmp_path):
    """By llama.cpp, which goes by the number of layers; transformers does not know of it."""
    architecture = SimpleNamespace(contents=lambda: "gemma2")
    reader = SimpleNamespace(tensors=[], fields={"general.architecture": architecture})
    refuse_unread(tmp_path, reader, Gemma2Config(num_hidden_layers=42))
    of_27b = Gemma2Config(num_hidden_layers=46, hidden_size=4608, num_attention_heads=32)
    with pytest.raises(InputError, match=r"queries that are scaled by 144\^-0.5, which transf"):
        refuse_unread(tmp_path, reader, of_27b)


def converter(folder, body):
    """A stand-in for llama.cpp's converter, on PATH."""
    path = folder / "bin" / "convert_hf_to_gguf.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport sys, pathlib\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path.parent)


def test_a_gguf_file_is_written_by_the_converter(megatrain, model, tmp_path, monkeypatch):
    asked = ["export", model, "out", "--gguf", "q8_0"]
    monkeypatch.setenv("PATH", "/nowhere")
    megatrain.refused("convert_hf_to_gguf.py; put a checkout of it on PATH", *asked)
    monkeypatch.setenv("PATH", converter(tmp_path, "raise ValueError('no such architecture')"))
    megatrain.refused("fails on this model: ValueError: no such architecture", *asked)
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv(
        "PATH", converter(tmp_path, "pathlib.Path(sys.argv[5]).write_text(str(sys.argv[1:4]))")
    )
    megatrain.done(*asked)
    said = (tmp_path / "out" / "out-q8_0.gguf").read_text()
    assert "'--outtype', 'q8_0'" in said
    assert (tmp_path / "out" / "model.safetensors").is_file()
    with Engine(model, optimizer=AdamW(lr=1e-3), adapter=LORA, device="cpu") as engine:
        engine.save_pretrained(tmp_path / "adapter")
    megatrain.refused("add --merged", "export", "adapter", "new", "--gguf", "f16")
