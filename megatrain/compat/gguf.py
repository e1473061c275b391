"""Models in llama.cpp's GGUF files, which transformers dequantises into cached folders."""

import hashlib
import logging
import os
from collections import defaultdict
from importlib.util import find_spec
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatrain.base.whole_files import file_fingerprint, user_cache, whole_folder
from megatrain.compat.torch import pytree
from megatrain.errors import InputError, explained

log = logging.getLogger(__name__)

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_UNQUANTISED = {"F32": torch.float32, "F16": torch.float16}
_UNLESS_1 = ("scale", "scaling.factor", "scale_linear", "group_count", "group_used_count")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_OF_27B = (46, 62)  # numbers of layers of Gemma 2 and 3 27B, whose queries have another scale
# Settings of a file that change results, and their names in transformers' configurations.
_NAMES_IN_CONFIG = {
    "rope.freq_base": ("rope_theta",),
    "rope.dimension_count": ("rotary_dim", "rotated"),
    "attention.key_length": ("head_dim", "global_head_dim"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "attention.sliding_window": ("sliding_window",),
    "attention.layer_norm_epsilon": _EPSILONS,
    "attention.layer_norm_rms_epsilon": _EPSILONS,
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.scale": ("attention_multiplier",),
    "attention.key_length_swa": ("head_dim",),
    "attention.value_length_swa": ("head_dim",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "expert_gating_func": ("gating",),
    "expert_weights_norm": ("norm_topk_prob",),
    "rope.freq_base_swa": ("rope_theta", "rope_local_base_freq"),
    "logit_scale": ("logit_scale",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
}
# Settings that tensors' shapes show, that transformers reads for each architecture that has them,
# or that are checked as others are.
_SHOWN = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "tensor_data_layout", "pooling_type", "attention.head_count", "attention.head_count_kv",
    "attention.value_length", "attention.causal", "expert_count", "expert_used_count",
    "use_parallel_residual", "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size",
    "ssm.time_step_rank", "ssm.group_count", "shortconv.l_cache", "full_attention_interval",
    "nextn_predict_layers", "rope.dimension_sections", "rope.scaling.type",
}  # fmt: skip
# Ways of splitting words, by llama.cpp's names, whose tokens GPT-2's splitting makes, too.
_SPLIT_AS_GPT2 = {"gpt-2", "mpt", "olmo", "jais", "phi-2", "smollm", "starcoder", "refact"}


def is_gguf(path: str | Path) -> bool:
    """True if a model's path is a GGUF file."""
    path = Path(os.path.expanduser(path))
    return path.suffix == ".gguf" and path.is_file()


def unpacked_folder(path: Path) -> Path:
    """The folder of a GGUF file's model (weights, tokenizer, chat template), made at first use.

    Weights are bfloat16, or float32 or float16 if the file's largest tensor is. The folder is in
    ~/.cache/megatrain/gguf; its files have the GGUF's time. Raises InputError as `read_gguf` does.
    """
    path = Path(os.path.expanduser(path)).resolve()
    time = path.stat().st_mtime_ns
    key = hashlib.blake2b(str(file_fingerprint(path)).encode(), digest_size=8)
    cached = user_cache("gguf") / f"{path.stem}-{key.hexdigest()}"
    cached.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{cached}.lock"):
        if not cached.exists():
            with whole_folder(cached) as folder:
                _unpack(path, folder)
                for written in folder.iterdir():
                    os.utime(written, ns=(time, time))
    return cached


def _unpack(path: Path, folder: Path) -> None:
    """Write the file's model and tokenizer. Raises InputError: transformers would lose a part."""
    config, reader = read_header(path)
    tokenizer = read_gguf(path, AutoTokenizer)
    for token, name in _SPECIAL.items():  # some versions of transformers set other tokens
        number = reader.fields.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            setattr(tokenizer, token, tokenizer.convert_ids_to_tokens(int(number.contents())))
    _warn_of_splitting(path, reader)
    largest = max(reader.tensors, key=lambda tensor: int(tensor.n_bytes))
    dtype = _UNQUANTISED.get(largest.tensor_type.name, torch.bfloat16)
    make_config = getattr(transformers, "GgufConfig", None)  # older versions always dequantise
    quantisation = {"quantization_config": make_config(dequantize=True)} if make_config else {}
    options = {"config": config, "dtype": dtype, "output_loading_info": True, **quantisation}
    model, report = read_gguf(path, AutoModelForCausalLM, **options)
    if missing := sorted(map(str, report["missing_keys"])):
        raise InputError(f"{path}: lacks the tensor of {missing[0]!r}; fetch or convert it again")
    values = [*model.state_dict().values()]
    distinct = {value.data_ptr(): value for value in values}
    if not any(tensor.name == "output.weight" for tensor in reader.tensors):
        values = [*distinct.values()]
    elif len(distinct) == len(values):  # Falcon: transformers says tied in any case
        model.config.tie_word_embeddings = False
    held = sum(value.numel() for value in values)
    dropped = sum(int(tensor.n_elements) for tensor in reader.tensors) - held
    if dropped > 0:
        raise InputError(
            f"{path}: {dropped:,} of its numbers have no place in transformers' "
            f"{type(model).__name__}; take the model's safetensors folder"
        )
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_header(path: Path) -> tuple[Any, Any]:
    """The configuration of a GGUF file's model, and the reader of the file.

    Raises InputError: as `read_gguf` and `refuse_unread`, or the file is a part of several.
    """
    config = read_gguf(path, AutoConfig)
    from gguf import GGUFReader

    reader = GGUFReader(path)
    parts = reader.fields.get("split.count")
    if parts is not None and int(parts.contents()) > 1:
        raise InputError(
            f"{path}: is one part of {int(parts.contents())}; merge them first: llama-gguf-split "
            "--merge FIRST_PART WHOLE.gguf"
        )
    refuse_unread(path, reader, config)
    return config, reader


def _warn_of_splitting(path: Path, reader: Any) -> None:
    """Warn if transformers splits words otherwise than the file says, before it joins bytes."""
    kind, splitting = (reader.fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind is None or splitting is None or kind.contents() != "gpt2":
        return
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping
    except ImportError:  # older versions
        known = {"qwen2"}
    else:
        known = {*mapping.GGUF_PRE_TOKENIZER_SPLITS}
    if splitting.contents() not in _SPLIT_AS_GPT2 | known:
        log.warning(
            "%s: transformers does not know its way of splitting words, %s, and takes GPT-2's: "
            "some texts may become other tokens; give the tokenizer of the model's safetensors "
            "folder as model.tokenizer", path, splitting.contents(),
        )  # fmt: skip


def refuse_unread(path: Path, reader: Any, config: Any) -> None:
    """Raises InputError: a setting of the file is not known to be in its `config`."""
    architecture = reader.fields["general.architecture"].contents()
    prefix = f"{architecture}."
    settings = {n.removeprefix(prefix): f for n, f in reader.fields.items() if n.startswith(prefix)}
    names = (tensor.name for tensor in reader.tensors)
    unread = [f"{name} (scaled positions)" for name in names if name.startswith("rope_")]
    kind = settings["rope.scaling.type"].contents() if "rope.scaling.type" in settings else "none"
    if kind != "none" and f'"{kind}"' not in config.to_json_string(use_diff=False):
        unread.append(f"positions scaled by {kind}")
    numbers: dict[Any, list[Any]] = defaultdict(list)  # all of the configuration, by name
    for place, number in pytree.tree_leaves_with_path(config.get_text_config().to_dict()):
        if isinstance(number, int | float):
            numbers[getattr(place[-1], "key", None)].append(number)
    heads = getattr(config, "num_attention_heads", None)
    numbers["head_dim"] = numbers["head_dim"] or [config.hidden_size / (heads or 1)]
    head_dim = numbers["head_dim"][0]
    numbers["rotated"] = [share * head_dim for share in numbers["partial_rotary_factor"] or [1]]
    if numbers["query_pre_attn_scalar"]:
        scale = config.hidden_size / heads if config.num_hidden_layers in _OF_27B else head_dim
        if numbers["query_pre_attn_scalar"] != [scale]:
            unread.append(f"queries that are scaled by {scale:g}^-0.5")
    layers = getattr(config.get_text_config(), "layer_types", None) or ()
    slides = [layer == "sliding_attention" for layer in layers]
    numbers["gating"] = [2 if architecture == "minimax-m2" else 1]  # sigmoid, or softmax
    if "attention.causal" in settings and not settings["attention.causal"].contents():
        unread.append("attention to later tokens")
    for name, setting in settings.items():
        value = setting.contents()
        in_config = _NAMES_IN_CONFIG.get(name, ())
        known = [number for own_name in in_config for number in numbers[own_name] if number]
        known += [1] if name.endswith(_UNLESS_1) else []
        is_shown = name in _SHOWN or (kind != "none" and name.startswith("rope.scaling."))
        is_number = isinstance(value, int | float)
        is_read = is_number and any(isclose(value, number, rel_tol=1e-6) for number in known)
        is_read |= name.endswith("_pattern") and value == slides
        if value and not is_shown and not is_read:
            unread.append(f"{name} {value:g}" if is_number else f"{name} {str(value)[:80]}")
    if unread:
        raise InputError(
            f"{path}: holds {unread[0]}, which transformers does not read; take the model's "
            "safetensors folder"
        )


def read_gguf(path: Path, kind: Any, **options: Any) -> Any:
    """Read a GGUF file by an Auto class of transformers.

    Raises InputError: it cannot read the file, or the package `gguf` is missing.
    """
    if find_spec("gguf") is None:
        raise InputError(f"{path}: a GGUF file needs the package gguf: pip install gguf")
    remedy = "fetch it again, or take the model's safetensors folder"
    with explained(f"{path}: transformers cannot read it", remedy), TemporaryDirectory() as alone:
        os.symlink(path.resolve(), os.path.join(alone, path.name))  # other files would be mixed in
        return kind.from_pretrained(alone, gguf_file=path.name, **options)
