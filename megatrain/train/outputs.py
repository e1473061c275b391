"""What a run leaves in its folder besides metrics and checkpoints."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.disk import flush
from megatrain.json_yaml import parse_json
from megatrain.telemetry.environment import environment
from megatrain.telemetry.metrics import read_metrics
from megatrain.telemetry.pictures import draw_loss
from megatrain.train.folders import (
    CONFIG,
    FINISHED,
    METRICS,
    MODEL,
    partial_name,
    whole_folder,
)
from megatrain.train.setup import Job

_MOST_BYTES = 1 << 16

log = logging.getLogger(__name__)


def describe_run(folder: Path, config: Config, job: Job) -> None:
    """Write the resolved configuration, which makes the folder a run's, and where it is done."""
    _replace(folder / CONFIG, config.as_yaml())
    record = environment(str(job.engine.device.torch_device)) | {
        "parameters": job.engine.num_parameters,
        "placement": job.engine.placement.as_dict(),
    }
    _replace(folder / "environment.json", json.dumps(record, indent=2) + "\n")


def write_model(job: Job, run: Path) -> None:
    """Write the model and its tokenizer, whole or not at all; an earlier one is replaced."""
    with whole_folder(run / MODEL, replace=True) as partial:
        job.engine.save_pretrained(partial)
        job.write_tokenizer(partial)


def note_finished(run: Path, config: Config, steps: int) -> None:
    """Write of what length the run is that `model/` is of."""
    _replace(run / FINISHED, json.dumps(_length(config) | {"done": steps}) + "\n")


def finished_steps(run: Path, config: Config) -> int | None:
    """How many steps a run has done that is as long as it is to be; None: it goes on.

    The model alone says nothing: a run that was made longer still has that of the shorter one.
    """
    noted = _noted(run)
    done = noted.pop("done", None)
    return done if noted == _length(config) else None


def model_steps(run: Path) -> int | None:
    """After how many steps `model/` was written; None: there is none, or nobody knows."""
    return _noted(run).get("done")


def _noted(run: Path) -> dict[str, Any]:
    """Empty where nothing is noted, or no number of steps `done`."""
    path = run / FINISHED
    if not (run / MODEL).is_dir() or not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            noted = parse_json(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) and type(noted.get("done")) is int else {}


def _length(config: Config) -> dict[str, Any]:
    return {"steps": config.training.steps, "epochs": config.training.epochs}


def draw_curve(run: Path) -> None:
    """Draw the loss over the steps."""
    try:
        draw_loss(list(read_metrics(run / METRICS)), run / "loss.png")
    except Exception as error:  # it can be drawn again from the metrics; the run goes before
        log.warning("no loss curve: %s", error)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(partial_name(path.name))
    partial.write_text(text, encoding="utf-8")
    flush(partial)
    os.replace(partial, path)
