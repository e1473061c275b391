"""A run's model as a Hugging Face folder, in another dtype if wanted, with a model card."""

import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from megatrain import __version__
from megatrain.base.json_yaml import read_json
from megatrain.base.whole_files import whole_folder
from megatrain.checkpoint import Checkpoint
from megatrain.compat.peft import CONFIG_FILE, write_config
from megatrain.config import load
from megatrain.errors import InputError, first_line
from megatrain.model.companions import companions, write_companions
from megatrain.model.export import REPLACED
from megatrain.run_folder.layout import (
    CONFIG,
    ENVIRONMENT,
    METRICS,
    MODEL,
    holds_model,
    model_state,
    require_empty,
)
from megatrain.source.source import adapter_folder, folder_adapter
from megatrain.source.state_io import no_adapter, with_base
from megatrain.source.write_model import write_saved
from megatrain.telemetry.metrics import read_metrics
from megatrain.telemetry.pictures import draw_loss
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
    cast = None if dtype is None else DTYPES[dtype]
    if isinstance(model, Checkpoint):
        model = with_base(model, base)
        require_empty(out)
        with whole_folder(out) as folder:
            write_saved(model, folder, cast, merged=merged)
            write_card(folder, model.folder.absolute().parent.parent, model.extra.get("step"))
            return
    source = Path(model)
    if not holds_model(source):
        raise InputError(f"{run}: no finished model there (neither model/ nor config.json)")
    adapter = adapter_folder(source)
    if merged and adapter is None:
        raise InputError(f"{source}: has no adapter that could be merged; leave --merged out")
    if base is not None and adapter is None:
        raise no_adapter(run)
    require_empty(out)
    if not any(source.glob("*.safetensors")):
        raise InputError(
            f"{source}: a configuration without weights (no .safetensors); not a model"
        )
    with whole_folder(out) as folder:
        if merged or cast is not None:
            write_saved(source, folder, cast, merged=merged, base_model=base)
        else:
            for path in source.iterdir():
                if path.suffix == ".safetensors" or REPLACED.fullmatch(path.name):
                    shutil.copyfile(path, folder / path.name)
            write_companions(folder, companions(source))
            if base is not None:
                write_config(folder_adapter(source, base)[0], folder)
        _tell_run(folder, source)


def _tell_run(folder: Path, source: Path) -> None:
    if source.name == MODEL:
        run = source.absolute().parent
        write_card(folder, run, model_state(run))


CARD, CURVE = "README.md", "loss.png"
_SETTINGS = ("adapter", "data", "training", "optimizer", "schedule", "loss", "rollout")
_RESULTS = {
    "loss": "Training loss",
    "eval_loss": "Evaluation loss",
    "eval_accuracy": "Evaluation accuracy",
    "eval_rewards/accuracies": "Preferred replies of the evaluation",
    "reward": "Mean reward",
    "eval_reward": "Mean reward of the evaluation",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

log = logging.getLogger(__name__)


def write_card(folder: Path, run: Path, step: int | None = None) -> None:
    """Write README.md and loss.png beside a model, if `run` is the folder of the run that made it.

    Args:
        folder: of the model, with its tokenizer.
        step: the model is of this one; None: of the last.
    """
    try:
        config = load(run / CONFIG).model_dump(mode="json")
    except InputError:
        return
    try:
        kind = read_json(run / ENVIRONMENT).get("data")
    except InputError:
        kind = None
    logged = read_metrics(run / METRICS) if (run / METRICS).is_file() else ()
    records = [r for r in logged if step is None or r.get("step", 0) <= step]
    is_adapter, scores = (folder / CONFIG_FILE).is_file(), config["loss"]["name"] == "reward"
    is_chat = kind not in (None, "text") and any(folder.glob("chat_template*"))
    base, paths = config["model"]["path"], config["data"]["path"]
    paths = [paths] if isinstance(paths, str) else paths
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if scores else "text-generation",
        tags=["megatrain"],
        base_model=base if base is not None and _is_hub_id(base) else None,
        datasets=[path for path in paths if _is_hub_id(path)] or None,
        license=_license(base),
    )
    parts = [
        f"# {run.name}",
        _origin(config, records, "reward" if scores else "chat" if is_chat else "language"),
        "## Data\n\n" + "\n".join(f"- {path}" for path in _short(paths)),
        _results(records),
        "## Settings\n\n```yaml\n" + _settings(config) + "```",
    ]
    try:
        draw_loss(records, folder / CURVE)
        parts.insert(4, f"![Loss over the steps]({CURVE})")
    except Exception as error:  # the model matters more than its card
        log.warning("no loss curve: %s", error)
    text = "\n\n".join(part for part in parts if part)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n").save(folder / CARD)


def _is_hub_id(path: str) -> bool:
    return bool(_HUB_ID.fullmatch(path)) and not Path(path).exists()


def _short(paths: Any) -> Any:
    """A value in which each path is cut to its last part."""
    if isinstance(paths, Mapping):
        return {name: _short(path) for name, path in paths.items()}
    if isinstance(paths, list):
        return [_short(path) for path in paths]
    return paths if paths is None or _is_hub_id(paths) else Path(paths).name


def _license(source: str | None) -> str | None:
    """The licence that the card of the model's source names, if it lies on this machine."""
    if source is None:
        return None
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


def _origin(config: Mapping[str, Any], records: list[Mapping[str, Any]], kind: str) -> str:
    path, steps = config["model"]["path"], max((r.get("step", 0) for r in records), default=0)
    start = "random weights" if path is None else f"`{_short(path)}`"
    chosen = config["model"]["freeze"] or config["model"]["train_only"]
    trained = "some of its parameters" if chosen else "all parameters"
    if config["adapter"]["method"]:
        trained = f"LoRA of rank {config['adapter']['r']}"
    return (
        f"This is a {kind} model, trained from {start} with MegaTrain {__version__}: {trained}, "
        f"{steps} steps of {config['training']['batch_size']} rows of at most "
        f"{config['data']['sequence_length']} tokens."
    )


def _results(records: list[Mapping[str, Any]]) -> str:
    lines = []
    for key, name in _RESULTS.items():
        values = [(r["step"], r[key]) for r in records if isinstance(r.get(key), float)]
        if values:
            (first, begin), (last, end) = values[0], values[-1]
            lines.append(f"- {name}: {begin:.4f} (step {first}) to {end:.4f} (step {last})")
    return "## Results\n\n" + "\n".join(lines) if lines else ""


def _settings(config: Mapping[str, Any]) -> str:
    """The settings that decide what is learnt, without paths of this machine."""
    chosen = {name: dict(config[name]) for name in _SETTINGS}
    if not config["adapter"]["method"]:
        del chosen["adapter"]
    if not config["rollout"]["rewards"]:
        del chosen["rollout"]
    else:
        chosen["rollout"]["rewards"] = _short(chosen["rollout"]["rewards"])
    del chosen["data"]["cache_dir"]
    for name in ("path", "eval_path"):
        chosen["data"][name] = _short(chosen["data"][name])
    chosen["engine"] = {"precision": config["engine"]["precision"]}
    stated = {
        section: {name: value for name, value in keys.items() if value not in (None, [], {})}
        for section, keys in chosen.items()
    }
    return yaml.safe_dump(stated, sort_keys=False, allow_unicode=True)
