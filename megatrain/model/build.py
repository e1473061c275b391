"""Builds transformers' models without their weights: structure, buffers and forward."""

import copy
import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from megatrain.base.json_yaml import read_json
from megatrain.compat import transformers as hf
from megatrain.compat.gguf import is_gguf, read_header
from megatrain.errors import InputError, explained, in_one_line
from megatrain.loss import ClassHead
from megatrain.model.adapters import adapted

MAX_COUNT = 10_000  # of layers and of experts; known models have up to some hundreds
_COUNTED = re.compile(r"(layers?|experts)$")  # ends of the settings that MAX_COUNT limits
_LARGE = 1 << 28  # values: far more than any buffer of a known model has
_SAME_CLASSES = {"kimi_k2": "deepseek_v3"}  # by model_type, that of the same model here

_loaded: WeakKeyDictionary[nn.Module, dict[torch.dtype, dict[str, torch.dtype]]]
_loaded = WeakKeyDictionary()  # by model: opening an engine asks three times


def load_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model configuration in a folder.

    Raises InputError: there is none, or transformers does not know it.
    """
    remedy = ""
    if (path := folder / "config.json").exists():
        values = read_json(path)  # refuses too large or deep values, and double keys
        _refuse_nan(values, path)
        if "auto_map" in values and not trust_remote_code:
            remedy = "if you trust it: model.trust_remote_code: true, or --trust-remote-code"
        elif "auto_map" in values and hf.mixes_code(folder.resolve()):
            raise InputError(
                f"{folder} brings other code than an earlier folder named {folder.resolve().name}, "
                f"and transformers {transformers.__version__} would mix both; rename the folder, "
                "install a newer one, or open it in another process"
            )
    with explained(f"cannot read the model configuration in {folder}", remedy):
        return read_config(folder, trust_remote_code=trust_remote_code)


def read_config(place: Path | str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """transformers' configuration of a folder, file or hub id. Raises as `AutoConfig`.

    A model_type that only code on the hub knows is replaced by that of the same configuration.
    """
    if is_gguf(place):
        return read_header(Path(place))[0]
    values, _ = PreTrainedConfig.get_config_dict(place)
    if (kind := _SAME_CLASSES.get(str(values.get("model_type")))) is None:
        return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    values.pop("auto_map", None)
    return CONFIG_MAPPING[kind].from_dict({**values, "model_type": kind})


def _refuse_nan(value: Any, path: Path, name: str = "") -> None:
    """Raises InputError: a number is NaN. Infinite ones are limits in some families."""
    if isinstance(value, float) and math.isnan(value):
        raise InputError(f"{path}: {name} is NaN; correct it, or download the file again")
    as_list = enumerate(value) if isinstance(value, list) else ()
    items = value.items() if isinstance(value, dict) else as_list
    for key, item in items:
        _refuse_nan(item, path, f"{name}.{key}" if name else str(key))


def empty_model(
    config: PreTrainedConfig,
    *,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The causal-LM class of `config` with meta parameters and real buffers, in training mode.

    It is built in float32, whatever `config.dtype`: stored buffers are then read without rounding.

    Raises InputError: transformers has no causal language model for this configuration, or the
    configuration asks for code from the hub. `attn_implementation` may ask for such code.
    """
    for part in (config, config.get_text_config(decoder=True)):
        for name, value in vars(part).items():
            # Modules of all layers and experts would be built before memory is checked.
            if _COUNTED.search(name) and isinstance(value, int) and value > MAX_COUNT:
                raise InputError(
                    f"{name} is above {MAX_COUNT:,} in the model's configuration, and so many "
                    "are not built; correct it"
                )
    _refuse_code_of_others(config, attention_is_chosen=attn_implementation is not None)
    options: dict[str, Any] = {"dtype": torch.float32}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    config = copy.deepcopy(config)
    for _, part in hf.configs(config):  # transformers 5.17 chooses sdpa, which ignores soft caps
        if getattr(part, "attn_logit_softcapping", None) and hf.attention_of(part) is None:
            hf.set_attention(part, "eager")
    return build(config, model_class(config, trust_remote_code=trust_remote_code), **options)


def model_class(
    config: PreTrainedConfig, *, trust_remote_code: bool = False
) -> Callable[..., PreTrainedModel]:
    """The function that builds the model of `config`: the class that it names, or a causal LM.

    Raises InputError: it names a class of another kind, or transformers has no causal LM for it.
    """
    names, multimodal = config.architectures or [], hf.MULTIMODAL_CLASSES.get(config.model_type)
    if multimodal and not names and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        names = [multimodal]
    for name in names:  # AutoModelForCausalLM does not know the text model of a multimodal one
        if name in hf.TASKS:
            named_class = getattr(transformers, name)
            if type(config) is named_class.config_class or name == multimodal:
                return partial(hf.model_of, named_class)
    if AutoModelForCausalLM.__name__ not in getattr(config, "auto_map", ()):
        usable = [name for name in names if hasattr(transformers, name)]
        if usable and hf.TASKS.keys().isdisjoint(names):
            raise InputError(
                f"the model's configuration names {usable[0]} (architectures); give a language "
                "model (...ForCausalLM, ...ForConditionalGeneration without an encoder of text) or "
                "a classifier (...ForSequenceClassification, ...ForTokenClassification)"
            )
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise InputError(
                f"a {config.model_type} is no causal language model; give a language model"
            )
    return partial(AutoModelForCausalLM.from_config, trust_remote_code=trust_remote_code)


def with_head(config: PreTrainedConfig, head: ClassHead) -> PreTrainedConfig:
    """The configuration of the same model with this head, or without any.

    A row's score is that of its last token before padding, so a model without a padding token gets
    the token that ends texts as one.

    Raises InputError: transformers has no such head for the model, the model has another head, or
    no token ends texts.
    """
    labels, example = head.labels, "Gemma 3"
    kind, by_type = "token classification", hf.auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
    if not labels:
        example, kind = "Qwen3", "embeddings"
        by_type = {} if config.is_encoder_decoder else hf.BASE_CLASSES
    elif not head.of_tokens:
        kind = "sequence classification"
        by_type = hf.auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if labels and (config.architectures or [""])[0] in by_type.values():
        old_labels = tuple(config.id2label.values())
        unnamed = tuple(f"LABEL_{number}" for number in range(len(old_labels)))
        if labels == unnamed and head.problem_type != "multi_label_classification":
            return config
        if old_labels not in (labels, unnamed) or len(old_labels) != len(labels):
            raise InputError(
                f"the model's head has the labels {', '.join(old_labels[:8])}, and loss.labels "
                f"(one for a reward) are {', '.join(labels[:8])}: give those, in their order"
            )
    result, name = copy.deepcopy(config), by_type.get(config.model_type)
    if name is None:
        raise InputError(
            f"loss.name needs a class for {kind}, and none of a {config.model_type} can be "
            f"trained; take a model that has one, such as {example}"
        )
    result.architectures = [name]
    if not labels:
        return result
    result.num_labels = len(labels)
    result.id2label = dict(enumerate(labels))
    result.label2id = {label: number for number, label in result.id2label.items()}
    result.problem_type = head.problem_type
    if head.of_tokens:
        return result
    text = result.get_text_config(decoder=True)
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    if text.pad_token_id is None:
        text.pad_token_id = ends[0]
    if text.pad_token_id is None:
        raise InputError(f"the {result.model_type} has no pad_token_id, which tells where rows end")
    return result


def build(
    config: PreTrainedConfig, make: Callable[..., PreTrainedModel], **options: Any
) -> PreTrainedModel:
    """The model of `config`, built by `make`: meta parameters and real buffers, in training mode.

    Raises InputError: the model's class fails on this configuration.
    """
    try:
        with weightless():
            model = make(copy.deepcopy(config), **options)
    except Exception as error:  # impossible sizes raise errors of any type
        beginning = "there is no " if isinstance(error, KeyError) else ""
        reason = beginning + in_one_line(error, 400)
        text = config.get_text_config(decoder=True)
        if "padding_idx" in reason.lower():  # torch's word for a token that no user has named so
            last = getattr(text, "vocab_size", 0) - 1
            raise InputError(
                f"pad_token_id is {text.pad_token_id}, and the {config.model_type} has the tokens "
                f"0 to {last}; set pad_token_id in config.json to one of them, or to null"
            ) from error
        raise InputError(f"cannot build a {config.model_type} causal model: {reason}") from error
    model.tie_weights()
    hf.without_checkpointing(model)
    return model.train()


def _refuse_code_of_others(config: PreTrainedConfig, *, attention_is_chosen: bool) -> None:
    """Raises InputError: the configuration names implementations that are code from a hub.

    Args: `attention_is_chosen`: the caller names the attention, and trusts it.
    """
    # If the package `kernels` is installed, transformers downloads these through it, and flash
    # attention if flash_attn is not installed.
    downloaded = {"deepgemm", "sonicmoe"} if importlib.util.find_spec("kernels") else set()
    fetches_flash = bool(downloaded) and importlib.util.find_spec("flash_attn") is None
    attention = () if attention_is_chosen else ("attn_implementation",)
    for _, part in hf.configs(config):
        for name in (*attention, "experts_implementation"):
            value = getattr(part, f"_{name}", None)
            is_fetched = "/" in str(value) or str(value) in downloaded
            if is_fetched or (fetches_flash and str(value).startswith("flash_attention")):
                trust = f"give {name}={value!r} yourself if you trust it, or "
                hint = trust if name in attention else ""
                raise InputError(
                    f"the model's configuration asks for {name} {value!r}, code that would be "
                    f"downloaded and run; {hint}take it out of config.json"
                )


def loaded_types(
    model: PreTrainedModel, dtype: torch.dtype, built: PreTrainedModel | None = None
) -> dict[str, torch.dtype]:
    """The dtype of each parameter and buffer that `from_pretrained(folder, dtype=dtype)` makes.

    Most have `dtype`; classes create some in fp32 (rotary tables, decay rates), and transformers
    loads others in fp32 (`_keep_in_fp32_modules_strict`: routers and their biases).

    Args: `built`: a model of this configuration in `dtype`, if it is built already.
    """
    by_dtype = _loaded.setdefault(model, {})
    if dtype in by_dtype:
        return by_dtype[dtype]
    if (adapters := adapted(model)) is not None:
        base_types = loaded_types(adapters.base, dtype)
        base_names = {**adapters.base_names, **adapters.copies}
        named_tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
        types = {name: base_types.get(base_names.get(name, ""), dtype) for name, _ in named_tensors}
        return by_dtype.setdefault(dtype, types)
    if built is None:
        with weightless():
            built = hf.model_of(type(model), copy.deepcopy(model.config), dtype=dtype)
    in_fp32 = [re.compile(pattern.replace("*", ".*")) for pattern in hf.in_fp32(model, dtype)]
    stored = built.state_dict().keys()
    tensors = chain(built.named_parameters(remove_duplicate=False), built.named_buffers())
    types = {name: tensor.dtype for name, tensor in tensors}
    for name in stored & types.keys():
        if types[name].is_floating_point and any(pattern.search(name) for pattern in in_fp32):
            types[name] = torch.float32
    return by_dtype.setdefault(dtype, types)


@contextmanager
def weightless() -> Iterator[None]:
    """Within this context new modules have parameters without memory; buffers are real."""
    with init_empty_weights(include_buffers=False), _NothingLarge():
        yield


# Initialisers of torch or transformers, which take milliseconds even for a meta parameter.
_INITIALISERS = ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_")


class _NothingLarge(TorchFunctionMode):
    """Makes large new tensors on the meta device; skips initialisers of meta parameters.

    A layer's experts can be one tensor that is larger than this machine's memory.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if getattr(func, "__name__", None) in _INITIALISERS:
            tensor = args[0] if args else options["tensor"]
            if tensor.is_meta:
                return tensor
        if func in (torch.empty, torch.zeros, torch.ones) and options.get("device") is None:
            sizes = args[0] if args and isinstance(args[0], (tuple, list)) else args
            if all(isinstance(size, int) for size in sizes) and prod(sizes) > _LARGE:
                options["device"] = "meta"
        if func is torch.arange and any(isinstance(n, int) and n > _LARGE for n in args):
            raise ValueError(f"a size of {max(args):,} is more than any known model has")
        return func(*args, **options)
