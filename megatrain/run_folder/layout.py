"""The layout of a run's folder, and which folder a run has."""

import os
import re
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from megatrain.base.whole_files import partial_name
from megatrain.errors import InputError

MODEL = "model"
METRICS = "metrics.jsonl"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
REFERENCES = "references.json"
CHECKPOINTS = "checkpoints"
FINISHED = "finished.json"
TRACKING = "tracking"
TIMELINE = "timeline.json"
LOCK = ".lock"

_CHECKPOINT = re.compile(r"step-(\d{8,})")


def new_run_folder(folder: str | None, name: str) -> Path:
    """Where a run will be written, not created yet: `folder`, or a new one under `runs/`.

    Raises:
        InputError: there is something already, which is never overwritten, or no writable folder.
    """
    path = _free_name(name) if folder is None else Path(folder).expanduser()
    if path.exists() and not path.is_dir():
        raise InputError(f"output.folder: {path} is a file")
    require_folder(path)
    if (path / MODEL).exists():
        raise InputError(f"output.folder: {path} holds a finished run; choose another folder")
    require_empty(path, "output.folder: ")
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"output.folder: {there} cannot be written into; choose another folder")
    return path


def _free_name(name: str) -> Path:
    """Later by its name than all runs of this name, even where the clock has been set back."""
    moment = datetime.now()
    for path in _runs_of(name)[-1:]:
        with suppress(ValueError, OverflowError):  # no time, or the last one that there is
            last = datetime.strptime(path.name[len(name) + 1 :], "%Y%m%d-%H%M%S")
            moment = max(moment, last + timedelta(seconds=1))
    while os.path.lexists(path := Path("runs") / f"{name}-{moment:%Y%m%d-%H%M%S}"):
        moment += timedelta(seconds=1)
    return path


def make_run_folder(folder: str | None, name: str) -> Path:
    """Make the folder of `new_run_folder`; a new one is no other run's.

    Raises:
        InputError: as `new_run_folder` does.
    """
    while True:
        path = new_run_folder(folder, name)
        try:
            path.mkdir(parents=True, exist_ok=folder is not None)
        except FileExistsError:  # another run was faster
            continue
        return path


def run_to_resume(folder: str | None, name: str) -> Path | None:
    """The folder of an earlier run: `folder`, or the newest one under `runs/` of this name.

    None if there is none, or nothing of a run in it. Newest by the time in its name, which is
    always later than those of the runs before it.
    """
    runs = _runs_of(name) if folder is None else [Path(folder).expanduser()]
    return next((path for path in reversed(runs) if (path / CONFIG).is_file()), None)


def _runs_of(name: str) -> list[Path]:
    """The folders under `runs/` of this name and a time, in order."""
    pattern, parent = re.compile(re.escape(name) + r"-\d{8}-\d{6}"), Path("runs")
    paths = parent.iterdir() if parent.is_dir() else ()
    return sorted(path for path in paths if pattern.fullmatch(path.name))


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where a run keeps its state after `step` steps."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def checkpoints(run: Path) -> list[int]:
    """The steps after which the run was saved, in order; a checkpoint has its name when whole."""
    folder = run / CHECKPOINTS
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in map(_CHECKPOINT.fullmatch, names) if match)


def require_plain(path: Path) -> None:
    """Raises InputError if there is something else than a file: a pipe would be waited for."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: not a plain file; remove it")


def require_folder(path: Path) -> None:
    """Raises InputError if there is something else than a folder, such as a link to nothing."""
    if os.path.lexists(path) and not path.is_dir():
        raise InputError(f"{path}: no folder, or a link to none; is the disk there that it was on?")


def require_empty(path: Path, what: str = "") -> None:
    """Raises InputError unless `path` is a free name or an empty folder.

    What a run leaves that was killed before it had its configuration there does not count.
    """
    own = (LOCK, partial_name(CONFIG))
    if path.exists() and (not path.is_dir() or any(p.name not in own for p in path.iterdir())):
        raise InputError(f"{what}{path} is not empty; choose another folder")


def model_folder(path: str) -> str:
    """The model of a finished run, when `path` is one; else `path` itself (folder or hub id)."""
    inside = Path(path) / MODEL
    return str(inside) if holds_model(inside) else path


def holds_model(folder: Path) -> bool:
    """Whether a folder has a model's configuration, or that of an adapter alone."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
