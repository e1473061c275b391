"""Finds, verifies and removes the checkpoints in a run's folder."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import dropwhile, islice
from pathlib import Path

from megatrain.checkpoint import files
from megatrain.checkpoint.manifest import (
    BUFFERS,
    CARRIED,
    COMPUTED,
    EXTRA,
    KEEP,
    MANIFEST,
    MODEL,
    TILES,
    Checkpoint,
    read_checkpoint,
)
from megatrain.errors import InputError

_OWN = {MANIFEST, EXTRA, BUFFERS, COMPUTED, CARRIED, MODEL, TILES, KEEP}


def is_checkpoint(folder: str | Path) -> bool:
    """True if a folder has a checkpoint's manifest; the checkpoint may be damaged."""
    return (Path(folder) / MANIFEST).is_file()


def require_replaceable(folder: Path) -> None:
    """Refuse to save over anything but a checkpoint.

    Raises InputError: a file has it, or a folder that holds more than a checkpoint, damaged or not.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder}: is a file; give a folder to save to")
    foreign = sorted({path.name for path in folder.iterdir()} - _OWN)
    if foreign:
        raise InputError(
            f"{folder}: holds {foreign[0]}, which is no part of a checkpoint and would be lost; "
            "give another folder to save to"
        )


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """A checkpoint after a check of its manifest, small files and file sizes, not of its tiles.

    Raises:
        InputError: names the file, what is wrong, and the newest whole checkpoint beside it.
    """
    with offering_another(Path(folder)):
        return read_checkpoint(Path(folder))


def verify(folder: str | Path) -> Checkpoint:
    """`open_checkpoint`, and compare every byte of every file with its checksum.

    Raises InputError: as `open_checkpoint` does.
    """
    checkpoint = open_checkpoint(folder)
    with offering_another(checkpoint.folder):
        for name in checkpoint.manifest.files:
            checkpoint.check_file(name)
    return checkpoint


def whole_checkpoints(parent: str | Path) -> list[Path]:
    """The checkpoints in a folder that `open_checkpoint` accepts, the one with most steps first.

    With equally many steps (a run may skip some) the last name comes first.
    """
    whole: list[Checkpoint] = []
    parent = Path(parent)
    for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
        if not folder.name.startswith(".") and is_checkpoint(folder):
            with suppress(InputError):
                whole.append(read_checkpoint(folder))
    return [c.folder for c in sorted(whole, key=lambda c: (c.step, c.folder.name), reverse=True)]


def newest_whole(parent: str | Path) -> Path | None:
    """The first of `whole_checkpoints`."""
    return next(iter(whole_checkpoints(parent)), None)


def mark(folder: str | Path) -> None:
    """Mark a checkpoint, so that `rotate` never removes it."""
    (Path(folder) / KEEP).touch()


def rotate(
    parent: str | Path,
    keep_last: int,
    *,
    newest: Path | None = None,
    spared: Collection[Path] = (),
) -> list[Path]:
    """Remove whole checkpoints except the newest `keep_last`, marked and `spared` ones.

    Returns the removed ones. Damaged checkpoints and other folders are left alone. Checkpoints
    after `newest` are left alone, too, and do not count: their tiles may be damaged.

    Raises:
        ValueError: `keep_last` is below 1.
        OSError: one cannot be removed; the others are.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; the newest checkpoint always stays")
    known = dropwhile(lambda path: newest not in (None, path), whole_checkpoints(parent))
    later = [path for path in islice(known, keep_last, None) if path not in spared]
    old = [path for path in later if not (path / KEEP).exists()]
    failures = []
    for folder in old:
        try:
            files.remove(folder)
        except OSError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return old


@contextmanager
def offering_another(folder: Path) -> Iterator[None]:
    """Add the newest whole checkpoint, in or beside the folder, to the message of an InputError."""
    try:
        yield
    except InputError as error:
        inside = [*whole_checkpoints(folder), *whole_checkpoints(folder / "checkpoints")]
        beside = [path for path in whole_checkpoints(folder.parent) if path != folder]
        others = inside or beside
        hint = f"the newest whole one there is {others[0]}" if others else "no whole one is there"
        raise InputError(f"{error}; {hint}") from error
