"""A run's model as a Hugging Face folder, in another dtype if wanted."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatrain.base.whole_files import whole_folder
from megatrain.checkpoint import Checkpoint
from megatrain.compat.peft import write_config
from megatrain.errors import InputError, RunFailed
from megatrain.model.companions import companions, write_companions
from megatrain.model.export import REPLACED
from megatrain.run_folder.layout import MODEL, holds_model, model_state, require_empty
from megatrain.source.source import adapter_folder, folder_adapter
from megatrain.source.state_io import no_adapter, with_base
from megatrain.source.write_model import write_saved
from megatrain.train.card import write_card
from megatrain.train.resolve_model import moved_base, trained_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    run: str,
    out: Path,
    dtype: str | None = None,
    *,
    merged: bool = False,
    base_model: str | None = None,
) -> None:
    """Write the model of `run` to `out`, whole or not at all; a run's model gets a model card.

    Args:
        run: a checkpoint, a model folder, or a run's folder: its finished model, or its newest
            whole checkpoint. Of a checkpoint, float32 gives the exact masters.
        dtype: float32, bfloat16 or float16 for all floating tensors; None keeps each as it is, and
            those of a checkpoint in the dtype of the model that the run began with.
        merged: write a model with an adapter as one model, not the adapter alone.
        base_model: where the adapter's base is now; an adapter alone names it.

    Raises:
        InputError: `run` holds no model or no adapter, or `out` is not empty.
        RunFailed: the disk is full.
    """
    model, base = trained_model(run), moved_base(base_model)
    if isinstance(model, Checkpoint):
        model = with_base(model, base)
        require_empty(out)
        with whole_folder(out) as folder:
            write_saved(model, folder, None if dtype is None else DTYPES[dtype], merged=merged)
            write_card(folder, model.folder.absolute().parent.parent, model.extra.get("step"))
            return
    source = Path(model)
    if not holds_model(source):
        raise InputError(f"{run}: no finished model there (neither model/ nor config.json)")
    if merged:
        _export_merged(source, out, None if dtype is None else DTYPES[dtype], base)
        return
    if base is not None and adapter_folder(source) is None:
        raise no_adapter(run)
    require_empty(out)
    if not any(source.glob("*.safetensors")):
        raise InputError(
            f"{source}: a configuration without weights (no .safetensors); not a model"
        )
    with whole_folder(out) as folder:
        total_bytes = 0
        for path in sorted(source.iterdir()):
            if path.suffix == ".safetensors" and dtype is not None:
                total_bytes += _cast_shard(path, folder / path.name, DTYPES[dtype])
            elif path.suffix == ".safetensors" or REPLACED.fullmatch(path.name):
                shutil.copyfile(path, folder / path.name)
        write_companions(folder, companions(source))
        if dtype is not None and (folder / "config.json").is_file():
            _name_dtype(folder / "config.json", dtype)
            if (path := folder / "model.safetensors.index.json").is_file():  # of several shards
                index = json.loads(path.read_text(encoding="utf-8"))
                index.setdefault("metadata", {})["total_size"] = total_bytes
                text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                path.write_text(text, encoding="utf-8")
        if base is not None:
            write_config(folder_adapter(source, base)[0], folder)
        _tell_run(folder, source)


def _export_merged(source: Path, out: Path, dtype: torch.dtype | None, base: str | None) -> None:
    """An adapter's folder and its base as one model."""
    if adapter_folder(source) is None:
        raise InputError(f"{source}: has no adapter that could be merged; leave --merged out")
    require_empty(out)
    with whole_folder(out) as folder:
        write_saved(source, folder, dtype, merged=True, base_model=base)
        _tell_run(folder, source)


def _tell_run(folder: Path, source: Path) -> None:
    if source.name == MODEL:
        run = source.absolute().parent
        write_card(folder, run, model_state(run))


def _cast_shard(source: Path, target: Path, dtype: torch.dtype) -> int:
    """Write a shard in another dtype; returns its bytes. One shard is in memory at a time."""
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata()
            names = file.keys()
            read = {name: file.get_tensor(name) for name in names}
            tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in read.items()}
    except SafetensorError as error:
        raise InputError(f"{source}: unreadable: {error}") from error
    try:
        save_file(tensors, target, metadata=metadata)
    except SafetensorError as error:  # it stands for errors of the disk, too
        raise RunFailed(f"{target}: cannot be written: {error}") from error
    return sum(tensor.nbytes for tensor in tensors.values())


def _name_dtype(path: Path, dtype: str) -> None:
    """Set the dtype in `config.json`, also in each nested configuration."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for part in [config, *(value for value in config.values() if isinstance(value, dict))]:
        if part is config or "dtype" in part or "torch_dtype" in part:
            part.pop("torch_dtype", None)
            part["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
