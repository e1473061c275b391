"""A run's model as a Hugging Face folder, in another dtype if wanted, with a model card."""

import logging
import re
import shutil
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from megatrain import __version__
from megatrain.base.whole_files import whole_folder
from megatrain.checkpoint import Checkpoint
from megatrain.compat.peft import CONFIG_FILE
from megatrain.config import load
from megatrain.errors import InputError, first_line
from megatrain.model.companions import companions, write_companions
from megatrain.model.export import REPLACED
from megatrain.run_folder.layout import (
    CONFIG,
    MODEL,
    holds_model,
    model_state,
    require_empty,
)
from megatrain.source.source import adapter_folder
from megatrain.source.write_model import write_saved
from megatrain.train.resolve_model import trained_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    run: str,
    out: Path,
    dtype: str | None = None,
    *,
    merged: bool = False,
) -> None:
    """Write the model of `run` to `out`, whole or not at all; a run's model gets a model card.

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
            write_card(folder, model.folder.absolute().parent.parent, model.extra.get("step"))
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
        _tell_run(folder, source)


def _tell_run(folder: Path, source: Path) -> None:
    if source.name == MODEL:
        run = source.absolute().parent
        write_card(folder, run, model_state(run))


CARD = "README.md"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

log = logging.getLogger(__name__)


def write_card(folder: Path, run: Path, step: int | None) -> None:
    """Write README.md beside a model, if `run` is the folder of the run that made it by `step`."""
    try:
        config = load(run / CONFIG)
    except InputError:
        return
    is_adapter, scores = (folder / CONFIG_FILE).is_file(), config.loss.name == "reward"
    base, paths = config.model.path, config.data.path
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if scores else "text-generation",
        tags=["megatrain"],
        base_model=base if base is not None and _is_hub_id(base) else None,
        datasets=[p for p in ([paths] if isinstance(paths, str) else paths) if _is_hub_id(p)],
        license=None if base is None else _license(base),
    )
    trained = "all parameters"
    if config.model.freeze or config.model.train_only:
        trained = "some of its parameters"
    if config.adapter.method:
        trained = f"LoRA of rank {config.adapter.r}"
    start = "random weights" if base is None else base if _is_hub_id(base) else Path(base).name
    text = (
        f"# {run.name}\n\nTrained from {start} with MegaTrain {__version__}: {trained}, {step} "
        f"steps of {config.training.batch_size} rows of {config.data.sequence_length} tokens."
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n").save(folder / CARD)


def _is_hub_id(path: str) -> bool:
    return bool(_HUB_ID.fullmatch(path)) and not Path(path).exists()


def _license(source: str) -> str | None:
    """The licence that the card of the model's source names, if it lies on this machine."""
    card = Path(source).expanduser() / CARD
    if _is_hub_id(source):
        cached = try_to_load_from_cache(source, CARD)
        card = Path(cached) if isinstance(cached, str) else card
    try:
        name = ModelCard.load(card).data.get("license") if card.is_file() else None
    except Exception as error:  # people write it by hand
        log.warning("%s: not read: %s", card, first_line(error))
        return None
    return name if isinstance(name, str) else None
