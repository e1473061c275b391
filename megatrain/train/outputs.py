"""What a run leaves in its folder besides metrics and checkpoints."""

import json
import logging
from pathlib import Path

from megatrain.checkpoint import open_checkpoint
from megatrain.config import Config
from megatrain.disk import whole_folder, write_file
from megatrain.source.exported import write_saved
from megatrain.telemetry.environment import environment
from megatrain.telemetry.metrics import read_metrics
from megatrain.telemetry.pictures import draw_loss
from megatrain.train.folders import (
    CONFIG,
    ENVIRONMENT,
    METRICS,
    MODEL,
    checkpoint_folder,
)
from megatrain.train.setup import Job

log = logging.getLogger(__name__)


def describe_run(folder: Path, config: Config, job: Job) -> None:
    """Write the resolved configuration, which makes the folder a run's, and where it is done."""
    write_file(folder / CONFIG, config.as_yaml())
    record = environment(str(job.engine.device.torch_device)) | {
        "parameters": job.engine.num_parameters,
        "trained_parameters": job.engine.num_trained,
        "computing": job.engine.computing,
        "placement": job.engine.placement.as_dict(),
        "disk_bytes": job.engine.memory()["disk_bytes"],
        "data": job.kind,
    }
    write_file(folder / ENVIRONMENT, json.dumps(record, indent=2) + "\n")
    if job.references is not None:
        job.references.write(folder)


def write_model(job: Job, run: Path) -> None:
    """Write the model and its tokenizer, whole or not at all; an earlier one is replaced."""
    if job.ranks.rank:
        job.engine.save_pretrained(run / MODEL)  # which rank 0 writes
        return
    with whole_folder(run / MODEL, replace=True) as partial:
        job.engine.save_pretrained(partial)
        job.write_tokenizer(partial)


def write_saved_model(job: Job, run: Path, step: int) -> None:
    """Write the model of an earlier step, from its checkpoint."""
    with whole_folder(run / MODEL, replace=True) as partial:
        write_saved(open_checkpoint(checkpoint_folder(run, step)), partial)
        job.write_tokenizer(partial)


def draw_curve(run: Path) -> None:
    """Draw the loss over the steps."""
    try:
        draw_loss(list(read_metrics(run / METRICS)), run / "loss.png")
    except Exception as error:  # it can be drawn again from the metrics; the run goes before
        log.warning("no loss curve: %s", error)
