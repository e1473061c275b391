"""A finished run's model as a Hugging Face folder, in another dtype if wanted."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatrain.errors import InputError
from megatrain.train.folders import model_folder, require_empty, whole_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(run: str, out: Path, dtype: str | None = None) -> None:
    """Write the model of `run` (a run folder or a model folder) to `out`, whole or not at all.

    Args:
        dtype: float32, bfloat16 or float16 for all floating tensors; None keeps each as it is.

    Raises:
        InputError: `run` holds no model, or `out` is not empty.
    """
    source = Path(model_folder(run))
    if not (source / "config.json").is_file():
        raise InputError(f"{run}: no finished model there (neither model/ nor config.json)")
    require_empty(out)
    with whole_folder(out) as folder:
        total_bytes = 0
        for path in sorted(source.iterdir()):
            if path.suffix == ".safetensors" and dtype is not None:
                total_bytes += _cast_shard(path, folder / path.name, DTYPES[dtype])
            elif path.is_file():
                shutil.copyfile(path, folder / path.name)
        if dtype is not None:
            _name_dtype(folder / "config.json", dtype)
            _name_size(folder / "model.safetensors.index.json", total_bytes)


def _cast_shard(source: Path, target: Path, dtype: torch.dtype) -> int:
    """One shard in memory at a time, never the model; returns its bytes."""
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata()
            names = file.keys()
            tensors = {name: _cast(file.get_tensor(name), dtype) for name in names}
    except SafetensorError as error:
        raise InputError(f"{source}: unreadable: {error}") from error
    save_file(tensors, target, metadata=metadata)
    return sum(tensor.nbytes for tensor in tensors.values())


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _name_dtype(path: Path, dtype: str) -> None:
    """`config.json` names the dtype once, and once more in each nested configuration."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for part in [config, *(value for value in config.values() if isinstance(value, dict))]:
        if part is config or "dtype" in part or "torch_dtype" in part:
            part.pop("torch_dtype", None)
            part["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _name_size(path: Path, total_bytes: int) -> None:
    """The index of a model of several shards names their total."""
    if path.is_file():
        index = json.loads(path.read_text(encoding="utf-8"))
        index.setdefault("metadata", {})["total_size"] = total_bytes
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
