"""Opens a run in its folder: one that begins, goes on, or branches from another."""

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatrain.base.json_yaml import read_yaml
from megatrain.base.whole_files import link_file, whole_folder
from megatrain.checkpoint import is_checkpoint, newest_whole, open_checkpoint, put_right
from megatrain.checkpoint.manifest import KEEP
from megatrain.config import Config, overridden
from megatrain.errors import InputError
from megatrain.parallel.distributed import ALONE, Ranks
from megatrain.run_folder.layout import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    METRICS,
    MODEL,
    REFERENCES,
    checkpoint_folder,
    checkpoints,
    finished_steps,
    locked,
    make_run_folder,
    new_run_folder,
    require_empty,
    require_folder,
    run_to_resume,
)
from megatrain.train.evaluations import Watch
from megatrain.train.resume import (
    Damaged,
    RunState,
    check_config,
    cut_metrics,
    find_starts,
    say_differences,
)
from megatrain.train.setup import Job, prepare
from megatrain.train.sharing import check_folder, from_first

# Settings that the tokenizer saved in the checkpoint already includes.
_WITH_WEIGHTS = ("tokenizer", "chat_template", "eos_token")

log = logging.getLogger(__name__)


def open_run(
    config: Config, name: str, stack: ExitStack, *, resume: bool, ranks: Ranks = ALONE
) -> Job | Path:
    """A run in its folder, which is locked, ready for the next step; `stack` gives both back.

    Returns only the folder if the run has finished. The first rank makes and locks the folder.

    Raises:
        InputError: configuration, data, model, folder or checkpoint cannot be used.
        DoesNotFit: more memory is needed than there is.
    """
    wanted = config.output.folder
    earlier = from_first(ranks, lambda: run_to_resume(wanted, name) if resume else None)
    if earlier is not None:
        return _open_earlier(earlier, config, stack, ranks)
    from_first(ranks, lambda: new_run_folder(wanted, name))  # a mistake in it is known at once
    if resume:
        log.info("no earlier run of that name: this one begins")
    job = prepare(config, ranks=ranks)
    stack.callback(job.close)
    job.folder = from_first(ranks, lambda: _made_folder(config, name, stack))
    check_folder(ranks, job.folder)
    return job


def _made_folder(config: Config, name: str, stack: ExitStack) -> Path:
    folder = make_run_folder(config.output.folder, name)
    stack.enter_context(locked(folder))
    require_empty(folder, "output.folder: ")  # another run may have taken it meanwhile
    return folder


def _open_earlier(folder: Path, config: Config, stack: ExitStack, ranks: Ranks) -> Job | Path:
    from_first(ranks, lambda: stack.enter_context(locked(folder)))
    check_folder(ranks, folder)
    if finished_steps(folder, config) is not None:
        check_config(config, read_yaml(folder / CONFIG), folder / CONFIG)
        return folder
    require_folder(folder / CHECKPOINTS)
    from_first(ranks, lambda: put_right(folder / CHECKPOINTS))
    job = _go_on(folder, config, ranks)
    job.folder = folder
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
    """Open the newest whole checkpoint: damaged tiles show only when all tiles are read."""
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


@contextmanager
def branched(run: Path, new: Path, overrides: Sequence[str], *, fresh: bool) -> Iterator[Config]:
    """Prepare the folder `new` of a run that goes on from `run`, and give its configuration.

    The new run has the newest whole checkpoint of `run` as its own (as links where the file system
    has them), with `checkpoint.best` also the best one before it, and its log up to there, so it is
    resumed like any other. Its folder goes away again where the body fails before it has begun.

    Args:
        run: the folder of a run, or one of its checkpoints.
        overrides: `path.to.key=value`.
        fresh: take the weights alone, and begin at the first step; all settings may change.

    Raises InputError: there is no whole checkpoint, `new` is taken, or a setting cannot change.
    """
    newest = run if is_checkpoint(run) else newest_whole(run / CHECKPOINTS)
    if newest is None:
        raise InputError(
            f"{run}: no run with a whole checkpoint; name a run, or set model.path of a new run "
            "file to the model"
        )
    checkpoint = open_checkpoint(newest)
    state = RunState.of(checkpoint.extra, checkpoint.folder)
    kept = [f"model.{name}=null" for name in _WITH_WEIGHTS] if fresh else []
    fixed = [f"output.folder={json.dumps(str(new))}"]
    if fresh:
        fixed += [f"model.path={json.dumps(str(checkpoint.folder))}", "model.config=null"]
    where = f"the configuration in {checkpoint.folder}"
    config = overridden(state.config, where, [*kept, *overrides, *fixed])
    new_run_folder(config.output.folder, new.name)
    if fresh:
        yield config
        return
    try:
        check_config(config, state.config, checkpoint.folder)
    except InputError as error:
        raise InputError(f"{error}; or begin anew from these weights with --fresh") from error
    with whole_folder(new) as folder:
        _take(checkpoint.folder, checkpoint_folder(folder, state.step))
        source = checkpoint.folder.absolute().parent.parent
        if (log := source / METRICS).is_file():
            logged = cut_metrics(Path(shutil.copyfile(log, folder / METRICS)), state.step)
            watch = Watch(config, logged)
            if (why := watch.stop) is not None:
                raise InputError(
                    f"{run}: ended early ({why}), and so would this run at once; give "
                    "--set training.early_stopping=null, or more patience"
                )
            best = watch.best_of(checkpoints(source))
            if config.checkpoint.best and best is not None and best != state.step:
                _take(checkpoint_folder(source, best), checkpoint_folder(folder, best))
        if (source / REFERENCES).is_file():
            link_file(str(source / REFERENCES), str(folder / REFERENCES))
        (folder / CONFIG).write_text(config.as_yaml(), encoding="utf-8")
    try:
        yield config
    except BaseException:
        if not (new / ENVIRONMENT).exists():
            shutil.rmtree(new)
        raise


def _take(checkpoint: Path, to: Path) -> None:
    shutil.copytree(checkpoint, to, copy_function=link_file, ignore=shutil.ignore_patterns(KEEP))
