"""From a run file to a job that can take its next step, in a folder that is the run's own."""

import logging
from contextlib import ExitStack
from pathlib import Path

from megatrain.base.json_yaml import read_yaml
from megatrain.checkpoint import put_right
from megatrain.config import Config
from megatrain.errors import InputError
from megatrain.parallel.distributed import ALONE, Ranks
from megatrain.run_folder.layout import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    MODEL,
    checkpoints,
    finished_steps,
    locked,
    make_run_folder,
    new_run_folder,
    require_empty,
    require_folder,
    run_to_resume,
)
from megatrain.train.resume import Damaged, check_config, find_starts, say_differences
from megatrain.train.setup import Job, prepare
from megatrain.train.sharing import check_folder, from_first

log = logging.getLogger(__name__)


def open_run(
    config: Config, name: str, stack: ExitStack, *, resume: bool, ranks: Ranks = ALONE
) -> tuple[Path, Job | int]:
    """The folder of a run, locked, and its job, ready for the next step; `stack` gives both back.

    Of a run that has ended the number of its steps takes the place of the job. Of several `ranks`
    the first one makes and locks the folder.

    Raises:
        InputError: configuration, data, model, folder or checkpoint cannot be used.
        DoesNotFit: more memory is needed than there is.
    """
    wanted = config.output.folder
    earlier = from_first(ranks, lambda: run_to_resume(wanted, name) if resume else None)
    if earlier is not None:
        return earlier, _open_earlier(earlier, config, stack, ranks)
    from_first(ranks, lambda: new_run_folder(wanted, name))  # a mistake in it is known at once
    if resume:
        log.info("no earlier run of that name: this one begins")
    job = prepare(config, ranks=ranks)
    stack.callback(job.close)
    folder = from_first(ranks, lambda: _made_folder(config, name, stack))
    check_folder(ranks, folder)
    return folder, job


def _made_folder(config: Config, name: str, stack: ExitStack) -> Path:
    folder = make_run_folder(config.output.folder, name)
    stack.enter_context(locked(folder))
    require_empty(folder, "output.folder: ")  # another run may have been faster
    return folder


def _open_earlier(folder: Path, config: Config, stack: ExitStack, ranks: Ranks) -> Job | int:
    from_first(ranks, lambda: stack.enter_context(locked(folder)))
    check_folder(ranks, folder)
    if (done := finished_steps(folder, config)) is not None:
        check_config(config, read_yaml(folder / CONFIG), folder / CONFIG)
        return done
    require_folder(folder / CHECKPOINTS)
    from_first(ranks, lambda: put_right(folder / CHECKPOINTS))
    job = _go_on(folder, config, ranks)
    stack.callback(job.close)
    begun = from_first(ranks, lambda: (folder / ENVIRONMENT).exists())
    if job.resumed is not None and job.resumed.step == job.total_steps and not begun:
        raise InputError(
            f"{folder}: the run that this one branches from has done all of its {job.total_steps} "
            "steps; ask for more with --set training.steps (or training.epochs, whichever the run "
            "has), or begin at step 1 from its weights with --fresh"
        )
    return job


def _go_on(folder: Path, config: Config, ranks: Ranks) -> Job:
    """Open the newest checkpoint that is whole: damaged tiles are found only when all are read."""
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
