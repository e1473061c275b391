"""Weights come in once, exactly, and without a second copy of the model."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from megatrain.model import weights
from megatrain.model.build import empty_model
from megatrain.model.export import write_weights
from megatrain.model.weights import read_weights, source_dtype
from tests.inside import sized
from tests.unit.weights_cases import (
    FAMILIES,
    assert_same,
    blank,
    kept_tensors,
    read_all,
    saved_model,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_what_transformers_wrote(family, tmp_path):
    model = saved_model(family, tmp_path)
    assert_same(read_all(tmp_path, blank(model)), kept_tensors(model))


@pytest.mark.parametrize("family", ["mixtral", "laguna"])  # laguna's renaming must not apply
def test_reads_experts_already_fused(family, tmp_path):
    model = saved_model(family, tmp_path)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    assert_same(read_all(tmp_path, blank(model)), kept_tensors(model))


def test_reads_shards(tmp_path):
    model = saved_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same(read_all(tmp_path, blank(model)), kept_tensors(model))


def test_reads_a_checkpoint_of_the_base_model(tmp_path):
    model = saved_model("gemma", tmp_path)  # tied, so the base model is all there is
    model.model.save_pretrained(tmp_path)
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    assert_same(read_all(tmp_path, blank(model)), kept_tensors(model))


@pytest.mark.parametrize("stored_as", ["both", "alias only"])
def test_tied_weights_may_be_stored_under_either_name(stored_as, tmp_path):
    model = saved_model("gemma", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if stored_as == "alias only":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert_same(read_all(tmp_path, blank(model)), kept_tensors(model))


def test_tensors_the_class_ignores_are_no_mistake(tmp_path):
    model = saved_model("deepseek_v3", tmp_path)
    file = tmp_path / "model.safetensors"
    extra = {
        "model.layers.61.eh_proj.weight": torch.zeros(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
    }
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    assert_same(read_all(tmp_path, blank(model)), kept_tensors(model))


def test_says_which_tensors_may_be_left_out(tmp_path):
    model = saved_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    empty = blank(model)
    empty._keys_to_ignore_on_load_missing = {r"model\.norm"}
    names: list[str] = []
    left_out = read_weights(tmp_path, empty, lambda name, _: names.append(name), threads=2)
    assert left_out == ("model.norm.weight",)
    assert "model.norm.weight" not in names and len(names) == len(kept_tensors(model)) - 1


def test_a_failing_write_ends_the_load(tmp_path):
    model = saved_model("llama", tmp_path)
    calls: list[str] = []

    def write(name, tensor):
        calls.append(name)
        raise MemoryError("no room for it")

    with pytest.raises(MemoryError, match="no room"):
        read_weights(tmp_path, blank(model), write, threads=1)
    assert len(calls) == 1, "what was still to be read must be dropped"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_stays_far_below_the_checkpoint(tmp_path, monkeypatch):
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, vocab_size=8000
    )
    model = empty_model(config)
    values = {
        name: (lambda shape=p.shape: torch.ones(shape, dtype=torch.bfloat16))
        for name, p in model.named_parameters()
    }
    checkpoint = 2 * model.num_parameters()
    assert checkpoint > 200e6
    with _PeakMemory() as writing:
        write_weights(tmp_path / "a", model, values, dtype=torch.bfloat16, max_shard_bytes=10**8)
    sized(monkeypatch, weights, IN_FLIGHT_BYTES=2**25)
    with _PeakMemory() as reading:
        read_weights(tmp_path / "a", model, lambda name, tensor: None, threads=4)
    assert writing.extra_bytes < checkpoint / 2
    assert reading.extra_bytes < checkpoint / 2


class _PeakMemory:
    """Growth of the resident set at its peak, mapped files included."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before = self._kib("VmRSS")
        return self

    def __exit__(self, *_):
        self.extra_bytes = 1024 * (self._kib("VmHWM") - self._before)

    def _kib(self, key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key))


@pytest.mark.parametrize(
    "config",
    [{"dtype": "float16"}, {"torch_dtype": "float16"}, {"text_config": {"dtype": "float16"}}],
)
def test_source_dtype_is_what_the_config_says(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert source_dtype(tmp_path) == torch.float16
