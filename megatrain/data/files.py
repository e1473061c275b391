"""The bytes of a file, unpacked; or one line that says what it is instead of what its name says."""

import bz2
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from megatrain.data.sources import SourceFile
from megatrain.errors import InputError

# What a file begins with that is neither rows nor text, whatever its name says.
_BEGINNINGS = {
    b"version https://git-lfs.github.com/spec/": (
        "a pointer of Git LFS, not the file: run git lfs pull"
    ),
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "UTF-16: convert it: iconv -f UTF-16 -t UTF-8"),
    **dict.fromkeys(
        (b"\xff\xd8\xff", b"\x89PNG", b"GIF87a", b"GIF89a"), "a picture: only text is trained"
    ),
    b"%PDF-": "a PDF: give its text",
    b"PK\x03\x04": "a zip archive (or a spreadsheet): unpack it, or save its rows as .csv",
    b"\x1f\x8b": "packed by gzip: add .gz to its name",
    b"\x28\xb5\x2f\xfd": "packed by zstd: add .zst to its name",
    b"BZh91AY": "packed by bzip2: add .bz2 to its name",
    b"\xfd7zXZ\x00": "packed by xz: add .xz to its name",
    b"PAR1\x15": "Parquet: name it .parquet",
    b"ARROW1\x00\x00": "Arrow: name it .arrow",
    b"SQLite format 3\x00": "a database of SQLite: save its rows as .csv",
}
_TABLES = {"parquet": b"PAR1\x15", "arrow": b"ARROW1\x00\x00"}
_PAGES = (b"<!doctype", b"<html")
_UNPACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def open_file(file: SourceFile) -> IO[bytes]:
    """A file's bytes, unpacked.

    Raises:
        InputError: what unpacks it is not installed.
    """
    packed = file.path.suffix.lower()
    if packed in _UNPACKED:
        unpacked: IO[bytes] = _UNPACKED[packed](file.path, "rb")
        return unpacked
    if packed == ".zst":
        try:
            arrow = importlib.import_module("pyarrow")
        except ImportError as error:
            raise InputError(f"{file.name}: reading it needs pyarrow: install datasets") from error
        return io.BufferedReader(arrow.input_stream(str(file.path), compression="zstd"))
    return file.path.open("rb")


@contextmanager
def reading(file: SourceFile) -> Iterator[None]:
    """What reading a file can raise, and what its bytes are instead, as one line that names it.

    Raises:
        InputError: it cannot be read, or is plainly something else.
    """
    try:
        _refuse_other(file)
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{file.name}: cannot be read: {reason.lower()}") from error


def _refuse_other(file: SourceFile) -> None:
    """Raises InputError: the file begins as no file of its name does."""
    with file.path.open("rb") as stream:
        begins = stream.read(64)
    packed = file.path.suffix.lower() in (*_UNPACKED, ".zst")
    for beginning, what in _BEGINNINGS.items():
        of_its_name = beginning == _TABLES.get(file.format) or (packed and "packed by" in what)
        if begins.startswith(beginning) and not of_its_name:
            raise InputError(f"{file.name}: {what}")
    if file.format != "text" and begins.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_PAGES):
        raise InputError(f"{file.name}: a page of HTML, not rows: download the file itself")
