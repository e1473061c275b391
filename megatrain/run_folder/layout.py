"""A run's folder: its name, its files, its lock, and the note that the run has ended."""

import errno
import fcntl
import json
import logging
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from megatrain import config as run_files
from megatrain.base.json_yaml import read_json
from megatrain.base.whole_files import hidden, write_file
from megatrain.config import Config
from megatrain.errors import InputError

MODEL = "model"
METRICS = "metrics.jsonl"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
SAMPLES = "samples.json"
REFERENCES = "references.json"
CHECKPOINTS = "checkpoints"
FINISHED = "finished.json"
TRACKING = "tracking"
TIMELINE = "timeline.json"
LOCK = ".lock"

_CHECKPOINT = re.compile(r"step-(\d{8,})")
_STAMP = "%Y%m%d-%H%M%S"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

log = logging.getLogger(__name__)


def load_run(run: Path, overrides: Sequence[str], *, resume: bool) -> Config:
    """The configuration of a run file, or with `resume` of a run's folder.

    Raises InputError: there is none, or it cannot be used.
    """
    if not run.is_dir():
        return run_files.load(run, overrides)
    if not resume:
        raise InputError(f"{run}: a folder; give its run file, or --resume to go on with it")
    if not (run / CONFIG).is_file():
        raise InputError(f"{run}: no run there (no {CONFIG}); give the folder of a run")
    loaded = run_files.load(run / CONFIG, overrides)
    folder, recorded = loaded.output.folder, run_files.load(run / CONFIG).output.folder
    if folder not in (None, recorded) and Path(folder).expanduser().resolve() != run.resolve():
        raise InputError(f"output.folder: the run goes on in {run}; for another: cp -r {run} NEW")
    output = loaded.output.model_copy(update={"folder": str(run)})
    return loaded.model_copy(update={"output": output})


def new_run_folder(folder: str | None, name: str) -> Path:
    """The folder for a new run, which is not created: `folder`, or a new name under `runs/`."""
    path = _free_folder(name) if folder is None else Path(folder).expanduser()
    require_folder(path)
    require_empty(path, of_run=True)
    parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"output.folder: {parent} cannot be written into; choose another folder")
    return path


def _free_folder(name: str) -> Path:
    """A new folder that sorts after all runs of this name, even if the clock was set back."""
    moment = datetime.now()
    if earlier := _runs_of(name):
        stamp = earlier[-1].name.removeprefix(f"{name}-")
        with suppress(ValueError, OverflowError):  # no date, or the end of the year 9999
            moment = max(moment, datetime.strptime(stamp, _STAMP) + timedelta(seconds=1))
    while os.path.lexists(path := Path("runs") / f"{name}-{moment:{_STAMP}}"):
        moment += timedelta(seconds=1)
    return path


def make_run_folder(folder: str | None, name: str) -> Path:
    """Create the folder of `new_run_folder`; no other run can get the same new name."""
    while True:
        path = new_run_folder(folder, name)
        try:
            path.mkdir(parents=True, exist_ok=folder is not None)
        except FileExistsError:  # another run has just taken the name
            continue
        return path


def run_to_resume(folder: str | None, name: str) -> Path | None:
    """The folder of an earlier run: `folder`, or the newest one under `runs/` of this name.

    The newest has the latest time in its name. None: there is no run.
    """
    runs = _runs_of(name) if folder is None else [Path(folder).expanduser()]
    return next((path for path in reversed(runs) if (path / CONFIG).is_file()), None)


def _runs_of(name: str) -> list[Path]:
    """The folders under `runs/` of this name and a time, in order."""
    pattern, parent = re.compile(re.escape(name) + r"-\d{8}-\d{6}"), Path("runs")
    paths = parent.iterdir() if parent.is_dir() else ()
    return sorted(path for path in paths if pattern.fullmatch(path.name))


def checkpoint_folder(run: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def checkpoints(run: Path) -> list[int]:
    """The steps of a run's checkpoints, in order; only complete ones have such names."""
    folder = run / CHECKPOINTS
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in map(_CHECKPOINT.fullmatch, names) if match)


def require_plain(path: Path) -> None:
    """Raises InputError if the path exists and is no plain file: reading a pipe would wait."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: not a plain file; remove it")


def require_folder(path: Path) -> None:
    """Raises InputError if the path exists and is no folder, or is a broken link."""
    if os.path.lexists(path) and not path.is_dir():
        raise InputError(f"{path}: no folder, or a link to none; mount the disk that it is on")


def require_empty(path: Path, *, of_run: bool = False) -> None:
    """Raises InputError unless `path` is a free name or an empty folder.

    Files of a run that was killed before it wrote its configuration do not count.

    Args: `of_run`: the folder is for a new run; the message then suggests --resume.
    """
    early_names = (LOCK, hidden(Path(CONFIG)).name)
    is_empty = path.is_dir() and all(file.name in early_names for file in path.iterdir())
    if path.exists() and not is_empty:
        key = "output.folder: " if of_run else ""
        has_run = of_run and (path / CONFIG).is_file()
        more = ", or go on with the run there by --resume" if has_run else ""
        raise InputError(f"{key}{path} is not empty; choose another folder{more}")


def holds_model(folder: Path) -> bool:
    """True if a folder has the configuration of a model or of an adapter."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within this context the process holds the lock of an existing run folder.

    The kernel releases the lock when the process ends in any way: it is never stale. The file
    stays: if it were deleted, a third process could lock another file of the same name.
    """
    path = folder / LOCK
    require_plain(path)
    with path.open("a+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = " ".join(file.read(200).split()) or "another process"
            raise InputError(
                f"{folder}: {holder} is writing there; wait until it ends or choose another folder"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("%s: no locks there (%s); start no second run in it", folder, error)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def note_finished(run: Path, config: Config, steps: int, *, best: Any, early: str | None) -> None:
    """Write the note of a finished run, whose model is in `model/`.

    Args:
        best: step and metric of the state in `model/`, if it is the best one and not the last.
        early: the reason why the run has ended before its last step.
    """
    note = _length(config) | {"done": steps, "best": best, "early": early}
    write_file(run / FINISHED, json.dumps(note) + "\n")


def finished_steps(run: Path, config: Config) -> int | None:
    """The number of steps of a finished run; None: it can be resumed.

    A model does not show that its run has finished: a run that was made longer has the model of the
    shorter one, and a run that should write its best state may have its last.
    """
    note = _note(run)
    done, best, _ = (note.pop(name, None) for name in ("done", "best", "early"))
    best_metric = config.watched if config.checkpoint.load_best else None
    keys = best if isinstance(best, dict) else ()
    metric = next((key for key in keys if key != "step"), None)
    return done if note == _length(config) and metric == best_metric else None


class Ending(NamedTuple):
    """The end of the run that wrote `model/`; each value may be None, for unknown."""

    done: int | None  # the number of steps taken
    state: int | None  # the step of the model, the best or the last one
    early: str | None  # the reason why the run ended before its last step


def ending(run: Path) -> Ending:
    """The end of a run, as its note says."""
    done, best, early = map(_note(run).get, ("done", "best", "early"))
    step = best.get("step") if isinstance(best, dict) else None
    return Ending(
        done, step if type(step) is int else done, early if isinstance(early, str) else None
    )


def _note(run: Path) -> dict[str, Any]:
    """The note of a run; empty without one, or without a number of steps `done`."""
    note: dict[str, Any] = {}
    if (run / MODEL).is_dir():
        with suppress(InputError):
            note = read_json(run / FINISHED)
    return note if type(note.get("done")) is int else {}


def _length(config: Config) -> dict[str, Any]:
    """The settings that decide a run's number of steps."""
    length: dict[str, Any] = {"steps": config.training.steps, "epochs": config.training.epochs}
    if (rule := config.training.early_stopping) is not None:
        length["early_stopping"] = rule.model_dump()
    return length
