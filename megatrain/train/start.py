"""Training as one call: a run file, a run's folder or a mapping in, a run out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain import config
from megatrain.errors import InputError
from megatrain.run_folder.layout import CONFIG

if TYPE_CHECKING:
    from megatrain.train.loop import Outcome


def run(
    what: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    callbacks: Sequence[Any] = (),
    resume: bool = False,
) -> "Outcome":
    """Train as `megatrain train` does.

    Args:
        what: a run file, its content, or (with `resume`) the folder of a run.
        overrides: `path.to.key=value`.
        callbacks: transformers' TrainerCallbacks; their `model` is the engine. What
            those keep that are an `ExportableState` is saved; the others begin anew on resume.
        resume: go on with the run where there is one.

    Raises:
        InputError, DoesNotFit, RunFailed: as `megatrain.train.loop.train`.
    """
    if isinstance(what, Mapping):
        loaded, name = config.validate(what, "the run"), "run"
        if overrides:
            raise InputError("overrides are for run files; change the mapping")
    else:
        loaded, name = load_run(Path(what), overrides, resume=resume), Path(what).stem
    from megatrain.train.loop import train

    return train(loaded, name, resume=resume, callbacks=callbacks)


def load_run(run: Path, overrides: Sequence[str], *, resume: bool) -> config.Config:
    """The configuration of a run file, or with `resume` of a run's folder.

    Raises:
        InputError: there is none, or it cannot be used.
    """
    if not run.is_dir():
        return config.load(run, overrides)
    if not resume:
        raise InputError(f"{run}: a folder; give its run file, or --resume to go on with it")
    if not (run / CONFIG).is_file():
        raise InputError(f"{run}: no run there (no {CONFIG}); give the folder of a run")
    loaded = config.load(run / CONFIG, overrides)
    output = loaded.output.model_copy(update={"folder": str(run)})
    return loaded.model_copy(update={"output": output})
