"""Files and folders that are either whole, and on the disk, or not there."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain.errors import InputError


def flush(path: Path) -> None:
    """Put a file or the names in a folder on the disk.

    A rename must not get there before what it names.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def partial_name(name: str) -> str:
    """The name of a file or folder until it is whole."""
    return f".{name}.partial"


def write_file(path: Path, text: str) -> None:
    """Write a file that is whole or not there; an earlier one is replaced."""
    partial = path.with_name(partial_name(path.name))
    try:
        partial.write_text(text, encoding="utf-8")
        flush(partial)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def link_file(source: str, target: str) -> None:
    """Give a file that nobody changes another name, which takes no room; else copy it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target, follow_symlinks=False)


@contextmanager
def whole_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write into that takes the name `target` only when the body has succeeded.

    A folder that has the name already must be empty; with `replace` readers see it or the new one.
    After a crash between two renames the old one is still beside it under a hidden name, and the
    next call puts it back.

    Raises:
        InputError: the name is of a folder that cannot go away.
    """
    target = target.resolve()
    if not replace and (target == Path.cwd() or target.is_mount()):
        raise InputError(f"{target}: cannot be replaced as a whole; name a new folder inside of it")
    partial = target.with_name(partial_name(target.name))
    retired = target.with_name(f".{target.name}.replaced")
    if retired.exists() and not target.exists():
        retired.rename(target)
    for leftover in (retired, partial):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in [*partial.rglob("*"), partial]:
            if path.is_file() or path.is_dir():  # a link may be to nothing
                flush(path)
        if target.exists() and not replace:
            target.rmdir()  # only an empty one: never somebody's files
        elif target.exists():
            target.rename(retired)
        try:
            partial.rename(target)
        except OSError:
            if retired.exists():
                retired.rename(target)
            raise
        flush(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if retired.exists():
        shutil.rmtree(retired)
