"""Copies models without their weights, and compares a model with that of its configuration.

A checkpoint or an export is loaded by building the model from config.json. Weights, their
requires_grad and buffers are saved; other changes of the object would be lost.
"""

import copy
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from megatrain.compat import transformers as hf
from megatrain.errors import InputError, explained, in_one_line
from megatrain.model.adapters import adapted, with_adapter
from megatrain.model.build import build, loaded_types, model_class
from megatrain.model.export import saved_config
from megatrain.model.fingerprint import Reader
from megatrain.model.unsupported import refuse_hooks, refuse_weights

# Attributes that do not affect a forward's numbers, or are compared elsewhere.
_LEFT_OUT = {
    "forward", "generation_config", "gradient_checkpointing", "name_or_path", "peft_config",
    "_hf_peft_config_loaded", "warnings_issued", "_gradient_checkpointing_func",
    "_require_grads_hook", "_require_grads_hooks", "_use_kernels", "_weight_conversions",
    "_ep_plan",
}  # fmt: skip
_OF_CONFIG_LEFT_OUT = {
    "_name_or_path", "architectures", "dtype", "transformers_version", "use_cache",
}  # fmt: skip
# Attributes that a forward leaves in modules of transformers, and the next forward replaces.
_LEFT_BY_RUNS = ("rope_deltas", "recurrent_states", "conv1d_state")
_BUILT_IN = torch.float32  # the dtype of a model that is built to be compared
_UNDO = (
    "set it in the model's configuration, or undo it (of a model that was cast, `.to(dtype)` has "
    "rounded buffers: make or load it with `dtype=`; with PEFT's modules, give the PeftModel)"
)


def difference(
    model: PreTrainedModel, dtype: torch.dtype, computed: torch.dtype, *, with_code: bool
) -> str | None:
    """The first difference of `model` from that of its saved configuration, and a remedy; or None.

    Args:
        model: without weights; buffers are real. Leftovers of an earlier forward are set to None.
        dtype: the source's, in which exports are written.
        computed: dtype in which the model's class has computed its buffers.
        with_code: True if the code of the model's class is saved with the model.
    """
    adapters, peft_model = adapted(model), model
    if adapters is not None:
        model = adapters.base
    try:
        rebuilt = _rebuilt(model, dtype, with_code)
    except Exception as error:  # each configuration class has its own checks and error types
        reason = in_one_line(error, 200)
        return (
            f"a {type(model).__name__} cannot be built from its configuration ({reason}), so "
            "neither a checkpoint nor an export of it could be loaded; give a causal language "
            "model of transformers, or the folder that has its code"
        )

    for module in model.modules():
        vars(module).update((name, None) for name in _LEFT_BY_RUNS if name in vars(module))
    dtypes = loaded_types(model, computed, rebuilt if computed == _BUILT_IN else None)
    differences = [_differences(model, rebuilt), _buffer_differences(model, rebuilt, dtypes)]
    if adapters is not None:
        adapted_again = with_adapter(model, adapters.config, adapters.name)
        differences.append(_differences(peft_model, adapted_again))
    first = next(chain.from_iterable(differences), None)
    return first and (
        f"{first} by the model's configuration, from which a checkpoint or an export would be "
        f"loaded; {_UNDO}"
    )


def _rebuilt(model: PreTrainedModel, dtype: torch.dtype, with_code: bool) -> PreTrainedModel:
    """A model made of the saved configuration."""
    of_folder = with_code and type(model).__module__.startswith("transformers_modules.")
    config_class: Any = type(model.config) if of_folder else CONFIG_MAPPING[model.config.model_type]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        saved_config(model, dtype).to_json_file(path, use_diff=True)
        config = config_class.from_json_file(path)
    # config.json does not name implementations.
    for (_, part), (_, original) in zip(hf.configs(config), hf.configs(model.config), strict=True):
        hf.set_attention(part, hf.attention_of(original))
        hf.set_experts(part, hf.experts_of(original))
    make = partial(hf.model_of, type(model)) if of_folder else model_class(config)
    return build(config, make, dtype=_BUILT_IN)


def _differences(model: nn.Module, rebuilt: nn.Module) -> Iterator[str]:
    """Describe each difference in a sentence: modules and tensors first, then attributes."""
    for describe in (_parts, _attributes):
        described, described_again = describe(model), describe(rebuilt)
        for name in {**described, **described_again}:
            value, words = described.get(name, _ABSENT)
            new_value, new_words = described_again.get(name, _ABSENT)
            if value != new_value:
                yield f"{name or 'the model'} is {words()} in the model given, and {new_words()}"


Described = Mapping[str, tuple[Any, Callable[[], str]]]  # by name: value, its words
_ABSENT = None, partial(str, "not there")


def _parts(model: nn.Module) -> Described:
    """Modules and tensors by name: class, or kind and shape, and tie if there is one."""
    parts: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parts[path] = f"a {type(module).__module__}.{type(module).__qualname__}"
    saved, first = model.state_dict(keep_vars=True).keys(), dict[int, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied = first.setdefault(id(parameter), name)
        parts[name] = f"a parameter of shape {list(parameter.shape)}"
        parts[name] += "" if tied == name else f" tied to {tied}"
    for name, buffer in model.named_buffers():
        kind = "a buffer" if name in saved else "a buffer that is not saved"
        parts[name] = f"{kind} of shape {list(buffer.shape)}"
    return {name: (words, partial(str, words)) for name, words in parts.items()}


def _attributes(model: nn.Module) -> Described:
    """The plain attributes of all modules by name."""
    reader, attributes = _Compared(model, left_out=_LEFT_OUT), {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in reader.attributes(module):
            if name == "vocab_size" and isinstance(module, PreTrainedModel):
                continue  # `resize_token_embeddings` changes it
            shown = vars(module).get(name, "kept by its class")
            attributes[f"{path}.{name}".lstrip(".")] = value, partial(_short_text, shown)
    return attributes


def _short_text(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"another {type(value).__name__}"


def _buffer_differences(
    model: nn.Module, rebuilt: nn.Module, dtypes: dict[str, torch.dtype]
) -> Iterator[str]:
    """Describe computed buffers that differ; no file of weights has these buffers."""
    saved, buffers = model.state_dict(keep_vars=True).keys(), dict(model.named_buffers())
    for name, made in rebuilt.named_buffers():
        if name not in saved and not _equal(buffers[name], made.to(dtypes.get(name, made.dtype))):
            yield f"{name} has other values than those made"


@dataclass(frozen=True, eq=False)
class _Values:
    """Compares tensors by value; one without values is equal to any."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Values) and _equal(self.tensor, other.tensor)


class _Compared(Reader):
    """Describes attributes by values that are equal for two models of one configuration."""

    def __init__(self, root: nn.Module, *, left_out: Collection[str]) -> None:
        super().__init__(root, left_out=left_out)
        self._configs: dict[int, Any] = {}  # by id: most modules have the model's

    def of(self, value: Any) -> Any:
        if isinstance(value, PreTrainedConfig):
            if id(value) not in self._configs:
                kinds = [(hf.attention_of(c), hf.experts_of(c)) for _, c in hf.configs(value)]
                self._configs[id(value)] = read_by_forward(value), kinds
            return self._configs[id(value)]
        if isinstance(value, list | tuple):  # a configuration read from JSON has lists alone
            return "list", tuple(map(self.of, value))
        if type(value) is dict:
            return {key: self.of(item) for key, item in value.items()}
        return _Values(value) if isinstance(value, Tensor) else super().of(value)


def _equal(a: Tensor, b: Tensor) -> bool:
    """True if tensors have the same shape, and values where both have data; dtypes may differ."""
    if a.is_meta or b.is_meta or a.shape != b.shape:
        return a.shape == b.shape
    wide = torch.promote_types(a.dtype, b.dtype)
    a, b = (x.detach().cpu().to(wide) for x in (a, b))
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def read_by_forward(config: PreTrainedConfig) -> dict[str, Any]:
    """All fields of a configuration and of inner ones on which a forward's numbers depend."""

    def kept(fields: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in fields.items() if key not in _OF_CONFIG_LEFT_OUT}

    return json.loads(config.to_json_string(use_diff=False), object_hook=kept)


def emptied(model: PreTrainedModel, *, attn_implementation: str | None = None) -> PreTrainedModel:
    """A copy of `model` with meta parameters and copied buffers.

    Raises InputError: only some weights are on the meta device, or the attention is unknown.
    """
    refuse_hooks(model)
    parameters = dict(model.named_parameters())
    on_meta = [name for name, parameter in parameters.items() if parameter.is_meta]
    if 0 < len(on_meta) < len(parameters):
        raise InputError(
            f"{on_meta[0]} of the model given is on the meta device, but others are not; load all "
            "of the model, or give the model's folder"
        )
    if any(buffer.is_meta for buffer in model.buffers()):
        raise InputError(
            "buffers of the model given are on the meta device, and have no values; give its "
            "configuration (model.config), from which the same model is made, or its folder"
        )
    refuse_weights(model)
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    for value in (v for module in model.modules() for v in vars(module).values()):
        if isinstance(value, Tensor) and not value.is_leaf:
            memo[id(value)] = value.detach().clone()
    with explained("the model given cannot be copied"):  # a user's attributes may fail
        copied = copy.deepcopy(model, memo)
    hf.without_checkpointing(copied)
    if attn_implementation is not None:
        with explained("attn_implementation", of=(ValueError, ImportError, KeyError)):
            copied.set_attn_implementation(attn_implementation)
    return copied.train()
