"""What a run leaves in its folder besides metrics and checkpoints."""

import json
import logging
from pathlib import Path
from typing import NamedTuple, Self

from megatrain.base.whole_files import whole_folder, write_file
from megatrain.checkpoint import open_checkpoint
from megatrain.config import Config
from megatrain.parallel.distributed import local_rank
from megatrain.report import write_report
from megatrain.run_folder.layout import (
    CONFIG,
    ENVIRONMENT,
    METRICS,
    MODEL,
    checkpoint_folder,
)
from megatrain.source.write_model import write_saved
from megatrain.telemetry.environment import environment
from megatrain.telemetry.metrics import read_metrics
from megatrain.telemetry.pictures import draw_loss
from megatrain.train.setup import Job

log = logging.getLogger(__name__)


class Devices(NamedTuple):
    """The device of each rank, and how many hosts they are on."""

    names: list[str]
    hosts: int

    @classmethod
    def of(cls, job: Job) -> Self:
        """All ranks call this."""
        first = not local_rank(job.ranks.host)
        told = job.ranks.all_gather_object((str(job.engine.device.torch_device), first))
        return cls([name for name, _ in told], sum(first for _, first in told))


def describe_run(folder: Path, config: Config, job: Job, devices: Devices) -> None:
    """Write the resolved configuration, which makes the folder a run's, and where it is done."""
    write_file(folder / CONFIG, config.as_yaml())
    record = environment(devices.names[0]) | {
        "devices": devices.names,
        "ranks": len(devices.names),
        "hosts": devices.hosts,
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


def show_run(run: Path) -> None:
    """Write the run as one page."""
    try:
        write_report(run)
    except Exception as error:  # `megatrain report` writes it at any time; the run goes before
        log.warning("no report.html: %s", error)
