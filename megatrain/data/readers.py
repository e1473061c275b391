"""Streaming readers: every row of a file with its line number, or one error that names the line.

Memory stays bounded whatever a file holds: text comes in pieces, a JSONL line has a longest length.
"""

import codecs
import gzip
import importlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

from megatrain.data.sources import HubSplit, Source, SourceFile
from megatrain.data.unheeded import says_training
from megatrain.errors import InputError, first_line
from megatrain.json_yaml import parse_json
from megatrain.units import MIB

PIECE_BYTES = 256 * 1024  # long documents are tokenised in pieces of about this size
_BOM = "\ufeff"
MAX_LINE_BYTES = 32 * MIB  # parsed JSON can take 20 times its text

Row = Mapping[str, Any]


class Piece(NamedTuple):
    """A part of a document that starts at `line`; a short document is one piece."""

    line: int
    text: str
    first: bool
    last: bool


def read_text(file: SourceFile) -> Iterator[Piece]:
    """The pieces of a UTF-8 text file, which is one document; cut at line ends where there are any.

    Raises:
        InputError: unreadable, not UTF-8, or with NUL bytes; with the offset in the file.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, first, text = 1, True, ""
    with _reading(file), file.path.open("rb") as stream:
        for block in iter(lambda: _block(stream), b""):
            if text:
                yield Piece(line, text, first, last=False)
                line, first = line + text.count("\n"), False
            begins = stream.tell() == len(block)
            text = _decode(decoder, block, stream.tell() - len(block), file, final=False)
            text = text.removeprefix(_BOM) if first else text
            if begins and _looks_like_rows(text):
                raise InputError(f"{file.name}: rows of JSON are no text: name the file .jsonl")
        text += _decode(decoder, b"", stream.tell(), file, final=True)
    if text:
        yield Piece(line, text, first, last=True)


def split_text(text: str, line: int) -> Iterator[Piece]:
    """A document that came as one string, in pieces of at most `PIECE_BYTES` characters."""
    start = 0
    if not text:
        yield Piece(line, text, first=True, last=True)
    while start < len(text):
        stop = start + PIECE_BYTES
        if stop < len(text):
            stop = (text.rfind("\n", start, stop) + 1) or stop
        yield Piece(line, text[start:stop], first=start == 0, last=stop >= len(text))
        start = stop


def read_rows(source: Source, needed: str, others: Sequence[str] = ()) -> Iterator[tuple[int, Row]]:
    """The rows of a JSONL file, Parquet file or hub data set with their number, counted from 1.

    Tables must have the column `needed`, and give only that, `others` and what says how a row is
    to be trained; JSONL rows come whole.

    Raises:
        InputError: unreadable, malformed, or without the column; with the line.
    """
    number = 0
    for number, row in _READERS[source.format](source, [needed, *others]):
        yield number, row
    if number == 0 and source.named:
        raise InputError(f"{source.name}: no rows in it: give data that has some")


def listed(names: Iterable[str]) -> str:
    """The first names, on one line whatever is in them."""
    return ", ".join(f"{name!r:.40}" for name in itertools.islice(names, 12)) or "none"


def _present(name: str, names: list[str], columns: list[str]) -> list[str]:
    if columns[0] not in names:
        raise InputError(f"{name}: no column {columns[0]!r}: its columns are {listed(names)}")
    return [n for n in names if n in columns or says_training(n)]


def _looks_like_rows(text: str) -> bool:
    """Whether the first two lines (or the only one) are JSON objects."""
    lines = [line for line in text.split("\n", 16) if line.strip()][:2]
    try:
        return bool(lines) and all(isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return len(text) >= PIECE_BYTES and len(lines) == 1 and text.lstrip().startswith('{"')


def _block(stream: IO[bytes]) -> bytes:
    # To the end of its line, so that pieces rarely cut a word; a line may be endless, though.
    block = stream.read(PIECE_BYTES)
    return block + stream.readline(PIECE_BYTES) if len(block) == PIECE_BYTES else block


def _decode(
    decoder: codecs.IncrementalDecoder, block: bytes, offset: int, file: SourceFile, *, final: bool
) -> str:
    nul = block.find(b"\0")
    if nul >= 0:
        raise InputError(
            f"{file.name}: not text: NUL at byte offset {offset + nul} (UTF-16 or binary?): "
            "convert it to UTF-8 or leave it out"
        )
    pending = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise _not_utf8(file.name, offset - pending, error) from error


def _not_utf8(where: str, offset: int, error: UnicodeDecodeError) -> InputError:
    byte = error.object[error.start]
    return InputError(
        f"{where}: not UTF-8: byte 0x{byte:02x} at byte offset {offset + error.start}: "
        "convert it to UTF-8 or leave it out"
    )


def _read_hub(source: HubSplit, columns: list[str]) -> Iterator[tuple[int, Row]]:
    present = _present(source.name, source.rows.column_names, columns)
    yield from enumerate(source.rows.select_columns(present), start=1)


def _read_jsonl(file: SourceFile, _columns: list[str]) -> Iterator[tuple[int, Row]]:
    number, offset = 0, 0
    with _reading(file), _open(file) as stream:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{file.name}:{number}"
            if len(line) > MAX_LINE_BYTES:
                limit = MAX_LINE_BYTES // MIB
                raise InputError(f"{where}: the line is longer than {limit} MiB: split the row")
            if line.strip():
                yield number, _parse(line, where, offset)
            offset += len(line)


def _parse(line: bytes, where: str, offset: int) -> Row:
    try:
        text = line.decode("utf-8")
        text = text.removeprefix(_BOM) if offset == 0 else text
        row = parse_json(text)
    except UnicodeDecodeError as error:
        raise _not_utf8(where, offset, error) from error
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error.msg} (column {error.colno})") from error
    except ValueError as error:  # nested too deeply, an integer of thousands of digits, a key twice
        raise InputError(f"{where}: not usable JSON: {str(error).split(';')[0]}") from error
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise InputError(f"{where}: a row must be a JSON object, this is a {kind}")
    return row


def _open(file: SourceFile) -> IO[bytes]:
    if file.path.suffix.lower() == ".gz":
        return gzip.open(file.path, "rb")  # type: ignore[return-value]
    return file.path.open("rb")


def _read_parquet(file: SourceFile, columns: list[str]) -> Iterator[tuple[int, Row]]:
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError(f"{file.name}: reading Parquet needs pyarrow: install datasets") from error
    try:
        with _reading(file), parquet.ParquetFile(file.path) as table:
            present = _present(file.name, table.schema_arrow.names, columns)
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=present):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        reason = first_line(error)
        raise InputError(f"{file.name}: not a readable Parquet file: {reason}") from error


@contextmanager
def _reading(file: SourceFile) -> Iterator[None]:
    """Turns what reading a file can raise into one line that names it."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{file.name}: cannot be read: {reason.lower()}") from error


_READERS: dict[str, Callable[..., Iterator[tuple[int, Row]]]] = {
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "hub": _read_hub,
}
