"""Tiny random models of every causal-LM family that transformers knows.

The shrinker takes a family's default configuration, makes every size small and keeps every choice
(activation, norm, tying, rotary kind, attention pattern) as the family ships it, so that the tiny
model runs the same code as the real one. What the general rule gets wrong stands in OVERRIDES.
"""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatrain.compat.transformers import MULTIMODAL_CLASSES, recorded_routers
from tests.families.sizes import (
    CHOICES,
    CONFIG_CLASS,
    CONSTRUCTOR,
    HEADS,
    LAYER_COUNTS,
    MAX_LAYERS,
    MIN_LAYERS,
    OVERRIDES,
    POSITIONS,
    SIZES,
    SPECIAL_TOKENS,
    TOWERS,
    VOCAB,
)

NOISE = 0.15  # about 1/sqrt(hidden size): no part of a layer is too weak to show a wrong gradient

# Families that plain PyTorch cannot train as a text-only causal language model on this machine.
NOT_TRAINABLE: dict[str, str] = {
    "gemma3n": "its vision tower needs the optional package timm, which is not installed",
    "gemma4_assistant": "a draft head: forward demands another model's key-value states",
    "gemma4_unified_assistant": "a draft head: forward demands another model's key-value states",
}


# Versions of transformers from which on a family is as the tests expect it. Before, cpmant's head
# was tied to a table of another size, jamba changed its configuration in the first forward, emu3's
# and qwen3_5_moe's text model were given the configuration around their own, and apertus loaded
# buffers of bf16 as fp32.
SINCE = {"cpmant": "5.17", "jamba": "5.15", "emu3": "5.8", "qwen3_5_moe": "5.8", "apertus": "5.13"}


def decoder_sizes(
    vocab: int, width: int, inner: int, layers: int, heads: int, keys: int | None = None
) -> dict[str, Any]:
    """Sizes as configurations of most decoders name them; `keys`: heads of keys, if fewer."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads")  # fmt: skip
    return dict(zip(names, (vocab, width, inner, layers, heads, keys or heads), strict=True))


def families() -> list[str]:
    """Model types of the 189 causal-LM families, in the order of transformers' own mapping."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_multimodal(family: str) -> PreTrainedModel:
    """A float32 model of a family's class that takes images or sound, with its encoders.

    A test is skipped if the installed transformers does not have the family.
    """
    if family not in MULTIMODAL_CLASSES:
        pytest.skip(f"transformers {transformers.__version__} has no such {family}")
    torch.manual_seed(0)
    cls = getattr(transformers, MULTIMODAL_CLASSES[family])
    kwargs = _shrunk(cls.config_class, CONSTRUCTOR.get(family, {}), towers=True)
    tokens = ("_token_id", "_token_index")
    names = [f.name for f in dataclasses.fields(cls.config_class) if f.name.endswith(tokens)]
    places = [name for name in names if name not in SPECIAL_TOKENS]
    kwargs |= {name: VOCAB - 1 - number for number, name in enumerate(places)}
    for part in (kwargs, kwargs.get("text_config", {})):  # images take many tokens
        if "max_position_embeddings" in part:
            part["max_position_embeddings"] = 4 * POSITIONS
    for table in (OVERRIDES.get(family, {}), TOWERS.get(family, {})):
        _merge(kwargs, copy.deepcopy(table))
    config = cls.config_class(**kwargs)
    config.use_cache = config.get_text_config(decoder=True).use_cache = False
    return _noisy(cls._from_config(config, dtype=torch.float32), 0)


def tiny_config(family: str, changes: dict[str, Any] | None = None) -> PreTrainedConfig:
    """The family's default configuration with every size made small, then `changes` applied.

    A test is skipped if the installed transformers does not have the family, or not like this.

    Several families have switches that are off by default but on in released checkpoints;
    sizes.VARIANTS holds those that change how layers depend on each other.
    """
    installed = transformers.__version__
    if family not in CONFIG_MAPPING or Version(installed) < Version(SINCE.get(family, "0")):
        pytest.skip(f"transformers {installed} has no such {family}")
    cls = CONFIG_CLASS.get(family) or CONFIG_MAPPING[family]
    kwargs = _shrunk(cls, CONSTRUCTOR.get(family, {}))
    for table in (OVERRIDES.get(family, {}), changes or {}):
        _merge(kwargs, copy.deepcopy(table))
    config = cls(**kwargs)
    config.use_cache = False
    return config


def tiny_model(
    family: str, seed: int = 0, changes: dict[str, Any] | None = None
) -> PreTrainedModel:
    """A float32 model of `tiny_config(family)`; every layer has its own parameters and buffers."""
    torch.manual_seed(seed)
    config = tiny_config(family, changes)
    if family in CONFIG_CLASS:
        cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
        model = cls._from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return _noisy(model, seed)


def routing(family: str, **options: Any) -> PreTrainedModel:
    """A tiny model whose class records its routers, as that of older transformers may not."""
    model = tiny_model(family, **options)
    if not recorded_routers(model):
        pytest.skip(f"transformers {transformers.__version__} records no routers of {family}")
    return model


def _noisy(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The model itself, its parameters and stored buffers moved at random."""
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict().keys()
    buffers = [b for name, b in model.named_buffers() if name in saved and b.is_floating_point()]
    with torch.no_grad():
        for tensor in [*model.parameters(), *buffers]:
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=NOISE)
    return model


def _shrunk(
    cls: type[PreTrainedConfig], needed: dict[str, Any], *, towers: bool = False
) -> dict[str, Any]:
    """Arguments for `cls` that make it tiny; `needed` are arguments it cannot do without.

    `towers`: also those that a text model does not need, and that are left out by default.
    """
    default = cls(**needed)
    default.allow_global_per_layer_attribute_access = True
    kwargs: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        value = getattr(default, field.name, None)
        if isinstance(value, PreTrainedConfig):
            kwargs[field.name] = _shrunk(type(value), {}, towers=towers)
        elif field.name in cls.sub_configs:
            if towers and cls.sub_configs[field.name] is not AutoConfig:
                kwargs[field.name] = _shrunk(cls.sub_configs[field.name], {})
        elif field.default is not None and value is not None:
            kwargs |= _small(field.name, value)
    _keep_head_groups(default, kwargs)
    _shrink_layers(cls, default, kwargs)
    return kwargs


def _small(name: str, value: Any) -> dict[str, Any]:
    if name in CHOICES:
        return {name: CHOICES[name]}
    if name in SPECIAL_TOKENS:
        return {name: SPECIAL_TOKENS[name]}
    if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
        return {name: VOCAB - 1 - sum(map(ord, name)) % 8}
    if ("drop" in name or "jitter" in name) and isinstance(value, float):
        return {name: 0.0}
    if name in SIZES and not isinstance(value, (list, tuple, dict)):
        return {name: min(value, SIZES[name])}
    return {}


def _keep_head_groups(default: Any, kwargs: dict[str, Any]) -> None:
    """A family whose keys and values have as many heads as its queries keeps that."""
    for name in ("num_key_value_heads", "num_kv_heads"):
        heads = getattr(default, "num_attention_heads", None)
        if name in kwargs and heads is not None and getattr(default, name) >= heads:
            kwargs[name] = HEADS


def _shrink_layers(cls: type[PreTrainedConfig], default: Any, kwargs: dict[str, Any]) -> None:
    """Cut the stack to a few layers, and every per-layer list to the same layers."""
    names = [n for n in LAYER_COUNTS if n in {f.name for f in dataclasses.fields(cls)}]
    for name in names:
        kwargs[name] = MIN_LAYERS
    if not names:
        return
    depth = getattr(default, names[0])
    per_layer = {
        field.name: list(value)
        for field in dataclasses.fields(cls)
        if isinstance(value := getattr(default, field.name, None), (list, tuple))
        and len(value) == depth > 1
    }
    if not per_layer:
        return
    kept = _one_of_each_kind(list(zip(*per_layer.values(), strict=True)))
    for name in names:
        kwargs[name] = len(kept)
    for name, values in per_layer.items():
        kwargs[name] = [values[i] for i in kept]


def _one_of_each_kind(kinds: list[Any]) -> list[int]:
    """Indices of a short stack with each kind of layer (a row of `kinds`), and the last layer."""
    first = {str(kind): i for i, kind in reversed(list(enumerate(kinds)))}
    kept = sorted({*sorted(first.values())[: MAX_LAYERS - 1], len(kinds) - 1})
    spare = [i for i in range(len(kinds)) if i not in kept]
    return sorted(kept + spare[: max(0, MIN_LAYERS - len(kept))])


def _merge(into: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value
