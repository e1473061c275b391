"""From a run file to a job that can take its next step, in a folder that is the run's own."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megatrain.base.json_yaml import read_yaml
from megatrain.checkpoint import put_right
from megatrain.config import Config
from megatrain.errors import InputError
from megatrain.parallel.distributed import ALONE, Ranks
from megatrain.run_folder.finished import early_end, finished_steps
from megatrain.run_folder.layout import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    MODEL,
    checkpoints,
    make_run_folder,
    new_run_folder,
    require_empty,
    require_folder,
    run_to_resume,
)
from megatrain.run_folder.lock import locked
from megatrain.train.resume import Damaged, check_config, find_starts, say_differences
from megatrain.train.setup import Job, prepare
from megatrain.train.sharing import check_folder, from_first
from megatrain.train.trackers import check_trackers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """A run that is as long as its configuration asks."""

    folder: Path
    steps: int
    early: str | None


def open_run(
    config: Config, name: str, held: ExitStack, *, resume: bool, ranks: Ranks = ALONE
) -> tuple[Path, Job] | Finished:
    """The folder of a run, locked, and its job, ready for the next step; `held` gives both back.

    Of several `ranks` the first one makes and locks the folder.

    Raises:
        InputError: configuration, data, model, folder or checkpoint cannot be used.
        DoesNotFit: more memory is needed than there is.
    """
    check_trackers(config)
    wanted = config.output.folder
    folder = from_first(ranks, lambda: run_to_resume(wanted, name) if resume else None)
    if folder is None:
        # What is wrong with the folder is known at once.
        from_first(ranks, lambda: new_run_folder(wanted, name))
        if resume:
            log.info("no earlier run of that name: this one begins")
        job = prepare(config, ranks=ranks)
        held.callback(job.close)
        folder = from_first(ranks, lambda: _made(config, name, held))
        check_folder(ranks, folder)
        return folder, job
    there = folder
    from_first(ranks, lambda: held.enter_context(locked(there)))
    check_folder(ranks, folder)
    if (done := finished_steps(folder, config)) is not None:
        check_config(config, read_yaml(folder / CONFIG), folder / CONFIG)
        return Finished(folder, done, early_end(folder))
    require_folder(folder / CHECKPOINTS)
    from_first(ranks, lambda: put_right(there / CHECKPOINTS))
    job = _go_on(folder, config, ranks)
    held.callback(job.close)
    begun = from_first(ranks, lambda: (there / ENVIRONMENT).exists())
    if job.resumed is not None and job.resumed.step == job.total_steps and not begun:
        raise InputError(
            f"{folder}: the run that this one branches from has done all of its {job.total_steps} "
            "steps; ask for more with --set training.steps (or training.epochs, whichever the run "
            "has), or begin at step 1 from its weights with --fresh"
        )
    return folder, job


def _made(config: Config, name: str, held: ExitStack) -> Path:
    folder = make_run_folder(config.output.folder, name)
    held.enter_context(locked(folder))
    require_empty(folder, "output.folder: ")  # another run may have been faster
    return folder


def _go_on(folder: Path, config: Config, ranks: Ranks) -> Job:
    """From the newest checkpoint that is whole: damage inside of tiles shows when they are read."""
    for start in find_starts(folder, config):
        say_differences(config, start.state)
        try:
            return prepare(config, start, ranks)
        except Damaged as error:
            log.warning("not resumed from: %s", error)
    if checkpoints(folder):
        raise InputError(f"{folder}: none of its checkpoints is whole; start a new run")
    if (folder / MODEL).exists():
        raise InputError(f"{folder}: a finished run without checkpoints; start a new run")
    log.info("%s has no checkpoint yet: the run begins anew", folder)
    return prepare(config, ranks=ranks)
