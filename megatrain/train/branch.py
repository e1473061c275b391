"""Another run from where a run is: in a folder of its own, with other settings."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatrain.base.whole_files import link_file, whole_folder
from megatrain.checkpoint import is_checkpoint, newest_whole, open_checkpoint
from megatrain.checkpoint.manifest import KEEP
from megatrain.config import Config, overridden
from megatrain.errors import InputError
from megatrain.run_folder.layout import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    METRICS,
    REFERENCES,
    checkpoint_folder,
    checkpoints,
    new_run_folder,
)
from megatrain.train.evaluations import Watch
from megatrain.train.resume import RunState, check_config, cut_metrics

# Keys that say what the checkpoint's own tokenizer has already.
_WITH_WEIGHTS = ("tokenizer", "chat_template", "eos_token")


@contextmanager
def branched(run: Path, new: Path, overrides: Sequence[str], *, fresh: bool) -> Iterator[Config]:
    """Prepare the folder `new` of a run that goes on from `run`, and give its configuration.

    The folder goes away again where the body fails before the run has begun.

    The new run has the newest whole checkpoint of `run` as its own (as links where the file system
    has them), with `checkpoint.best` also the best one before it, and its log up to there, so it is
    resumed like any other: weights, optimizer state, steps and place in the data are those of
    `run`, and the settings may change that may change on resume (`resume.FREE_KEYS`).

    Args:
        run: the folder of a run, or one of its checkpoints.
        overrides: `path.to.key=value`.
        fresh: take the weights alone. The run begins at its first step, nothing is prepared, and
            everything but the model may change.

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
