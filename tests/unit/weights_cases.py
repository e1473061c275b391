"""Tiny checkpoints for the weight tests, and hand-made safetensors files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.model.rebuilt import emptied
from megatrain.model.weights import read_weights
from tests.families.tiny import tiny_model

# Plain; tied; experts fused both ways; a persistent buffer; parameters made in float32 whatever
# the model's dtype; parameters declared so.
FAMILIES = ["llama", "gemma", "mixtral", "qwen3_moe", "deepseek_v3", "zamba", "ernie4_5_moe"]


def saved_model(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny random model, saved by transformers itself in the layout of the hub."""
    model = tiny_model(family).to(dtype)
    model.save_pretrained(folder)
    return model


def blank(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its weights, as if it had never been loaded or saved."""
    empty = emptied(model)
    empty._weight_conversions = None
    return empty


def kept_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What `read_weights` has to deliver: distinct parameters and persistent buffers."""
    persistent = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return {name: p.detach() for name, p in model.named_parameters()} | buffers


def read_all(folder: Path, model: PreTrainedModel, threads: int = 2) -> dict[str, Tensor]:
    """Everything `read_weights` delivers; fails when a name comes twice."""
    got: dict[str, Tensor] = {}

    def write(name: str, tensor: Tensor) -> None:
        assert name not in got, f"{name} was written twice"
        got[name] = tensor

    assert read_weights(folder, model, write, threads=threads) == ()
    return got


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def values_of(tensors: dict[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    return {name: (lambda tensor=tensor: tensor) for name, tensor in tensors.items()}


def write_raw(path: Path, header: Any, data: bytes, header_bytes: int | None = None) -> Path:
    """A safetensors file with any header: a text or an object; `header_bytes` may lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_bytes is None else header_bytes
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path


def entry(first: int, last: int, shape: list[int] | None = None, dtype: str = "F32") -> Any:
    return {
        "dtype": dtype,
        "shape": [(last - first) // 4] if shape is None else shape,
        "data_offsets": [first, last],
    }
