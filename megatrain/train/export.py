"""A run's model as a Hugging Face folder, in another dtype if wanted."""

import shutil
from pathlib import Path

import torch

from megatrain.base.whole_files import whole_folder
from megatrain.checkpoint import Checkpoint
from megatrain.errors import InputError
from megatrain.model.companions import companions, write_companions
from megatrain.model.export import REPLACED
from megatrain.run_folder.layout import holds_model, require_empty
from megatrain.source.source import adapter_folder
from megatrain.source.write_model import write_saved
from megatrain.train.resolve_model import trained_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(run: str, out: Path, dtype: str | None = None, *, merged: bool = False) -> None:
    """Write the model of `run` to `out`, whole or not at all.

    Args:
        run: a checkpoint, a model folder, or a run's folder: its finished model, or its newest
            whole checkpoint. Of a checkpoint, float32 gives the exact masters.
        dtype: float32, bfloat16 or float16 for all floating tensors; None keeps each as it is, and
            those of a checkpoint in the dtype of the model that the run began with.
        merged: write a model with an adapter as one model, not the adapter alone.

    Raises:
        InputError: `run` holds no model or no adapter, or `out` is not empty.
        RunFailed: the disk is full.
    """
    model = trained_model(run)
    cast = None if dtype is None else DTYPES[dtype]
    if isinstance(model, Checkpoint):
        require_empty(out)
        with whole_folder(out) as folder:
            write_saved(model, folder, cast, merged=merged)
            return
    source = Path(model)
    if not holds_model(source):
        raise InputError(f"{run}: no finished model there (neither model/ nor config.json)")
    if merged and adapter_folder(source) is None:
        raise InputError(f"{source}: has no adapter that could be merged; leave --merged out")
    require_empty(out)
    if not any(source.glob("*.safetensors")):
        raise InputError(
            f"{source}: a configuration without weights (no .safetensors); not a model"
        )
    with whole_folder(out) as folder:
        if merged or cast is not None:
            write_saved(source, folder, cast, merged=merged)
        else:
            for path in source.iterdir():
                if path.suffix == ".safetensors" or REPLACED.fullmatch(path.name):
                    shutil.copyfile(path, folder / path.name)
            write_companions(folder, companions(source))
