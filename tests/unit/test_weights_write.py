"""Weights go out as transformers would write them, whole or not at all."""

import json
import resource
import shutil

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from megatrain.errors import RunFailed
from megatrain.model.export import write_weights
from megatrain.model.safetensors_io import stored_tensors
from megatrain.model.weights import read_weights, source_dtype
from tests.unit.weights_cases import FAMILIES, blank, kept_tensors, saved_model, values_of


def write(folder, model, dtype, most=2**30):
    values = values_of(kept_tensors(model))
    write_weights(folder, blank(model), values, dtype=dtype, max_shard_bytes=most)


def layout(folder):
    return {name: (each.dtype, each.shape) for name, each in stored_tensors(folder).items()}


@pytest.mark.parametrize("max_shard_bytes", [2**30, 60_000])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_save_pretrained(family, max_shard_bytes, tmp_path):
    model = saved_model(family, tmp_path / "wanted")
    write(tmp_path / "a", model, torch.float32, max_shard_bytes)
    assert layout(tmp_path / "a") == layout(tmp_path / "wanted")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "wanted" / name).read_text()
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", output_loading_info=True, dtype="auto"
    )
    assert not any(report.values())
    wanted = model.state_dict()
    assert loaded.dtype == torch.float32 and loaded.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_equals_what_transformers_loads_from_the_source(family, tmp_path):
    saved_model(family, tmp_path / "old", torch.bfloat16)
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "old", dtype="auto")
    source.save_pretrained(tmp_path / "source")
    masters = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in kept_tensors(source).items()
    }
    write_weights(tmp_path / "a", blank(source.float()), values_of(masters), dtype=torch.bfloat16)
    assert layout(tmp_path / "a") == layout(tmp_path / "source")
    assert source_dtype(tmp_path / "a") == torch.bfloat16
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto").state_dict()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype="auto").state_dict()
    for name, tensor in again.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name


def test_parameters_of_float32_classes_keep_their_precision(tmp_path):
    model = saved_model("zamba", tmp_path / "wanted")  # its decay rates are float32 in any model
    name = next(name for name in kept_tensors(model) if name.endswith("A_log"))
    write(tmp_path / "a", model, torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto").state_dict()
    assert torch.equal(loaded[name], model.state_dict()[name])
    assert loaded["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_gives_back_the_layout_that_was_read(tmp_path):
    model = saved_model("mixtral", tmp_path / "hub")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    for source in ("hub", "fused"):
        empty = blank(model)
        read_weights(tmp_path / source, empty, lambda name, tensor: None, threads=1)
        write_weights(tmp_path / "a", empty, values_of(kept_tensors(model)), dtype=torch.float32)
        assert layout(tmp_path / "a") == layout(tmp_path / source)
    assert layout(tmp_path / "hub") != layout(tmp_path / "fused")


def test_shards_are_aligned_and_indexed(tmp_path):
    config = LlamaConfig(
        hidden_size=16, intermediate_size=33, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=500, mlp_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    # Float32 behind odd numbers of bf16 elements, were they in the model's order.
    model._keep_in_fp32_modules_strict = {"post_attention_layernorm", "model.norm"}
    values = values_of(kept_tensors(model))
    write_weights(tmp_path, blank(model), values, dtype=torch.bfloat16, max_shard_bytes=9_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    stored = stored_tensors(tmp_path)
    assert {name: each.file.name for name, each in stored.items()} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(each.num_bytes for each in stored.values())
    assert index["metadata"]["total_parameters"] == model.num_parameters()
    assert {each.dtype for each in stored.values()} == {torch.bfloat16, torch.float32}
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    for name, each in stored.items():
        assert each.start % each.dtype.itemsize == 0
        with safe_open(each.file, "pt") as shard:  # the library itself finds the same
            assert torch.equal(shard.get_tensor(name), each.read())


def test_the_configuration_is_not_touched_and_never_in_the_way(tmp_path):
    model = saved_model("llama", tmp_path / "wanted")
    model.config.dtype = torch.float32
    model.generation_config = GenerationConfig(do_sample=False, temperature=0.5)  # refused on save
    values = values_of(kept_tensors(model))
    empty = blank(model)
    write_weights(tmp_path / "a", empty, values, dtype=torch.bfloat16)
    assert empty.config.dtype == torch.float32
    assert json.loads((tmp_path / "a/config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "a/generation_config.json").read_text())["temperature"] == 0.5


def test_replaces_an_export_and_keeps_other_files(tmp_path):
    model = saved_model("llama", tmp_path / "wanted")
    folder = tmp_path / "a"
    (folder / "notes").mkdir(parents=True)
    (folder / "notes/readme.txt").write_text("mine")
    (folder / "tokenizer.json").write_text("{}")
    write(folder, model, torch.float32, 50_000)
    write(folder, model, torch.bfloat16)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert names == {
        "notes", "notes/readme.txt", "tokenizer.json",
        "config.json", "generation_config.json", "model.safetensors",
    }  # fmt: skip
    assert (folder / "notes/readme.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "wanted"]


@pytest.fixture
def short_files():
    """No file may grow beyond 20 kB: a real failing write, in the middle of a shard."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("existing", [False, True])
def test_a_write_that_fails_leaves_nothing(existing, tmp_path, request):
    model = saved_model("llama", tmp_path / "wanted")
    if existing:
        shutil.copytree(tmp_path / "wanted", tmp_path / "a")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    request.getfixturevalue("short_files")
    with pytest.raises(RunFailed, match=r"a: cannot export the model: File too large; nothing"):
        write(tmp_path / "a", model, torch.float32)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not list(tmp_path.glob(".*"))
