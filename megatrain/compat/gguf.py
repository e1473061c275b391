"""Models in llama.cpp's GGUF files, which transformers dequantises into cached folders."""

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatrain.base.whole_files import file_fingerprint, user_cache, whole_folder
from megatrain.errors import InputError, explained

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_PLAIN = {"F32": torch.float32, "F16": torch.float16}


def is_gguf(path: str | Path) -> bool:
    """True if a model's path is a GGUF file."""
    path = Path(os.path.expanduser(path))
    return path.suffix == ".gguf" and path.is_file()


def unpacked(path: Path) -> Path:
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
    config, tokenizer = read_gguf(path, AutoConfig), read_gguf(path, AutoTokenizer)
    from gguf import GGUFReader

    reader = GGUFReader(path)
    parts = reader.fields.get("split.count")
    if parts is not None and int(parts.contents()) > 1:
        raise InputError(
            f"{path}: is one part of {int(parts.contents())}; merge them first: llama-gguf-split "
            "--merge FIRST_PART WHOLE.gguf"
        )
    _refuse_scaled_positions(path, reader, config)
    for token, name in _SPECIAL.items():  # some versions of transformers set other tokens
        number = reader.fields.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            setattr(tokenizer, token, tokenizer.convert_ids_to_tokens(int(number.contents())))
    largest = max(reader.tensors, key=lambda tensor: int(tensor.n_bytes))
    dtype = _PLAIN.get(largest.tensor_type.name, torch.bfloat16)
    packed = getattr(transformers, "GgufConfig", None)  # older versions always dequantise
    quantisation = {} if packed is None else {"quantization_config": packed(dequantize=True)}
    options = {"config": config, "dtype": dtype, "output_loading_info": True, **quantisation}
    model, report = read_gguf(path, AutoModelForCausalLM, **options)
    if missing := sorted(map(str, report["missing_keys"])):
        raise InputError(f"{path}: lacks the tensor of {missing[0]!r}; fetch or convert it again")
    sizes = {value.data_ptr(): value.numel() for value in model.state_dict().values()}
    dropped = sum(int(tensor.n_elements) for tensor in reader.tensors) - sum(sizes.values())
    if dropped > 0:
        raise InputError(
            f"{path}: {dropped:,} of its numbers have no place in transformers' "
            f"{type(model).__name__}; take the model's safetensors folder"
        )
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _refuse_scaled_positions(path: Path, reader: Any, config: Any) -> None:
    """Raise InputError if the file scales positions, and its `config` does not."""
    found = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    architecture = reader.fields["general.architecture"].contents()
    scaling = reader.fields.get(f"{architecture}.rope.scaling.type")
    kind = "none" if scaling is None else scaling.contents()
    if kind != "none" and f'"{kind}"' not in config.to_json_string(use_diff=False):
        found.append(f"positions of type {kind}")
    if found:
        raise InputError(
            f"{path}: holds {found[0]}, scaled positions that transformers does not read; take "
            "the model's safetensors folder"
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
