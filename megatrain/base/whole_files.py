"""Writes files and folders atomically: each is whole on the disk, or it is not there."""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain.errors import InputError, explained


def flush(path: Path) -> None:
    """Flush a file to the disk, or a folder's list of names, to call after that of its files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def user_cache(name: str) -> Path:
    """A cache folder of this user: files that are removed there are made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatrain" / name


_HEAD_BYTES, _PAGE_BYTES, _PAGES = 1 << 20, 4096, 64  # the parts of a file that are hashed


def file_fingerprint(path: Path) -> tuple[int, int, str]:
    """A file's size, time of change, and a hash of samples of its bytes."""
    digest = hashlib.blake2b(digest_size=12)
    with explained(f"{path}: cannot be read", of=OSError), path.open("rb") as file:
        status = path.stat()
        digest.update(file.read(_HEAD_BYTES))
        middle_bytes = max(0, status.st_size - _HEAD_BYTES - _PAGE_BYTES)
        for number in range(_PAGES if status.st_size > _HEAD_BYTES else 0):
            file.seek(_HEAD_BYTES + middle_bytes * number // (_PAGES - 1))
            digest.update(file.read(_PAGE_BYTES))
    return status.st_size, status.st_mtime_ns, digest.hexdigest()


def fill(buffer: memoryview, descriptor: int, offset: int) -> None:
    """Fill `buffer` with a file's bytes from `offset` on. Raises EOFError: the file is shorter."""
    while len(buffer) > 0:  # one call reads 2 GiB at most
        if (count := os.preadv(descriptor, [buffer], offset)) == 0:
            raise EOFError(f"it ends at byte {offset}")
        buffer, offset = buffer[count:], offset + count


def forget_pages(descriptor: int, offset: int = 0, num_bytes: int = 0) -> None:
    """Free a file's range in the page cache (0 bytes: to its end); start to write dirty pages.

    If GPU and host share memory, the GPU's driver counts the page cache as used.
    """
    if hasattr(os, "posix_fadvise"):  # not on a Mac
        os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)


BLOCK = 4096
"""With O_DIRECT, offsets, lengths and addresses are multiples of this many bytes."""


def pass_cache_by(descriptor: int) -> bool:
    """Let reads and writes bypass the page cache (O_DIRECT).

    Returns False if that is impossible: on some file systems (tmpfs), and on a Mac.
    """
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except AttributeError:  # a Mac has no O_DIRECT
        return False
    except OSError as error:
        if error.errno != errno.EINVAL:  # which the file system answers if it has no O_DIRECT
            raise
        return False
    return True


PARTIAL = ".partial"


def hidden(path: Path, ending: str = PARTIAL) -> Path:
    """The hidden name beside a file or folder that is being written, replaced or removed."""
    return path.with_name(f".{path.name}{ending}")


def publish(partial: Path, folder: Path, retired: Path) -> None:
    """Rename `partial`, which is whole on the disk, to `folder`, and an old `folder` to `retired`.

    After a crash between the two renames the caller brings the old folder back.
    """
    replacing = os.path.lexists(folder)
    if replacing:
        os.rename(folder, retired)
    try:
        os.rename(partial, folder)
    except OSError:
        if replacing:
            os.rename(retired, folder)
        raise


def write_file(path: Path, text: str) -> None:
    """Write a file atomically; replaces an earlier one."""
    partial = hidden(path)
    try:
        partial.write_text(text, encoding="utf-8")
        flush(partial)
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):  # an error of a full disk names no file
            error.filename = error.filename or str(path)
        raise


def link_file(source: str, target: str) -> None:
    """Make a hard link to a file that will not change, or a copy if links are impossible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target, follow_symlinks=False)


@contextmanager
def whole_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a folder to write into, which gets the name `target` only if the block succeeds.

    An existing `target` must be empty. With `replace` it need not be: readers see the old or the
    new folder. After a crash between the two renames the next call brings the old one back.
    """
    target = target.resolve()
    if not replace and (target == Path.cwd() or target.is_mount()):
        raise InputError(f"{target}: cannot be replaced as a whole; name a new folder inside of it")
    partial, retired = hidden(target), hidden(target, ".replaced")
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
            target.rmdir()  # fails if there are files of others
        publish(partial, target, retired)
        flush(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if retired.exists():
        shutil.rmtree(retired)
