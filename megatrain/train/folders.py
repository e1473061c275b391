"""Folders that are either whole or not there, and the layout of a run's folder."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from megatrain.errors import InputError

MODEL = "model"
METRICS = "metrics.jsonl"


def new_run_folder(folder: str | None, name: str) -> Path:
    """Where a run will be written, not created yet: `folder`, or a new one under `runs/`.

    Raises:
        InputError: there is something already, which is never overwritten.
    """
    path = Path(folder) if folder else Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if path.exists() and not path.is_dir():
        raise InputError(f"output.folder: {path} is a file")
    if (path / MODEL).exists():
        raise InputError(f"output.folder: {path} holds a finished run; choose another folder")
    require_empty(path, "output.folder: ")
    return path


def require_empty(path: Path, what: str = "") -> None:
    """Raises InputError unless `path` is a free name or an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{what}{path} is not empty; choose another folder")


def model_folder(path: str) -> str:
    """The model of a finished run, when `path` is one; else `path` itself (folder or hub id)."""
    inside = Path(path) / MODEL
    return str(inside) if (inside / "config.json").is_file() else path


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write into that takes the name `target` only when the body has succeeded."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _flush(partial)
        if target.is_dir():
            target.rmdir()  # only an empty one: never somebody's files
        os.replace(partial, target)
        _flush_entry(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _flush_entry(path)


def _flush_entry(path: Path) -> None:
    """The rename must not reach the disk before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
