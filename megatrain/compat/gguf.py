"""Models in llama.cpp's GGUF files, dequantised by transformers into folders that are kept."""

import hashlib
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from megatrain.base.whole_files import user_cache, whole_folder
from megatrain.errors import InputError, in_one_line

_PLAIN = {"F32": torch.float32, "F16": torch.float16}
_SAMPLE_BYTES = 1 << 20


def is_gguf(path: str | Path) -> bool:
    """True if a model's path is a GGUF file."""
    path = Path(os.path.expanduser(path))
    return path.suffix == ".gguf" and path.is_file()


def gguf_config(path: Path) -> PreTrainedConfig:
    """The configuration in a GGUF file; weights are not read. Raises InputError."""
    return _read(path, AutoConfig)


def unpacked(path: Path) -> Path:
    """The folder of a GGUF file's model, made once: weights, tokenizer, chat template.

    Weights are bfloat16, or float32 or float16 if most of the file is. The folder lies in
    ~/.cache/megatrain/gguf, and is made anew where it was removed; its files have the GGUF's time.

    Raises InputError: transformers cannot read the file, or the package `gguf` is missing.
    """
    path = Path(os.path.expanduser(path)).resolve()
    status, digest = path.stat(), hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        for part in range(16):
            file.seek(status.st_size * part // 16)
            digest.update(file.read(_SAMPLE_BYTES))
    digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    kept = user_cache("gguf") / f"{path.stem}-{digest.hexdigest()}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            with whole_folder(kept) as folder:
                _unpack(path, folder)
                for written in folder.iterdir():
                    os.utime(written, ns=(status.st_atime_ns, status.st_mtime_ns))
    return kept


def _unpack(path: Path, folder: Path) -> None:
    config, tokenizer = gguf_config(path), _read(path, AutoTokenizer)
    packed = getattr(transformers, "GgufConfig", None)  # older versions always dequantise
    how = {} if packed is None else {"quantization_config": packed(dequantize=True)}
    model = _read(path, AutoModelForCausalLM, config=config, dtype=_dtype(path), **how)
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _read(path: Path, kind: Any, **options: Any) -> Any:
    if find_spec("gguf") is None:
        raise InputError(f"{path}: a GGUF file needs the package gguf: pip install gguf")
    try:
        return kind.from_pretrained(path.parent, gguf_file=path.name, **options)
    except Exception as error:  # of the reader, of transformers, of the architecture's class
        raise InputError(
            f"{path}: transformers cannot read it ({in_one_line(error, 200)}); fetch it again, or "
            "take the model's safetensors folder"
        ) from error


def _dtype(path: Path) -> torch.dtype:
    """The dtype that most of a file's bytes are in; bfloat16 of one that is quantised."""
    from gguf import GGUFReader

    sizes = Counter[str]()
    for tensor in GGUFReader(path).tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
    return _PLAIN.get(max(sizes, key=lambda name: sizes[name], default=""), torch.bfloat16)
