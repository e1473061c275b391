"""Streaming readers: each row of a file with its number, or with an error that names the row.

Memory stays bounded whatever a file holds: text is read in pieces, a row of JSON has a limit.
"""

import bz2
import codecs
import csv
import gzip
import importlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import IO, Any, NamedTuple

from megatrain.base.json_yaml import each_key_once, parse_json
from megatrain.base.units import MIB
from megatrain.data.sources import DataSource
from megatrain.errors import InputError, explained

DataRow = Mapping[str, Any]
Wanted = Callable[[str], bool]
Rows = Iterator[tuple[int, DataRow | InputError]]  # each with its number
UNREAD: Any = ...  # stands for the value of a column that is not wanted; rows still have its name
_BATCH_ROWS = 256

# First bytes of files that are neither rows nor text, whatever their name says.
_BEGINNINGS = {
    b"version https://git-lfs": "a pointer of Git LFS, not the file: run git lfs pull",
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


def open_file(file: DataSource) -> IO[bytes]:
    """A file's bytes, unpacked. Raises InputError: the library that unpacks it is missing."""
    suffix = file.path.suffix.lower()
    if suffix in _UNPACKED:
        unpacked: IO[bytes] = _UNPACKED[suffix](file.path, "rb")
        return unpacked
    if suffix == ".zst":
        with _pyarrow(file, "zstd") as arrow:
            return io.BufferedReader(arrow.input_stream(str(file.path), compression="zstd"))
    return file.path.open("rb")


@contextmanager
def reading(file: DataSource) -> Iterator[None]:
    """Within this context errors of reading, and of a wrong format, are one line with the file.

    Raises InputError: the file cannot be read, or has another format than its name says.
    """
    errors = (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError)
    remedy = "give the whole file, text in UTF-8"
    with explained(f"{file.name}: cannot be read", remedy, of=errors):
        _refuse_other_format(file)
        yield


def _refuse_other_format(file: DataSource) -> None:
    """Raises InputError: the file's first bytes are those of another format."""
    with file.path.open("rb") as stream:
        head = stream.read(64)
    is_packed = file.path.suffix.lower() in (*_UNPACKED, ".zst")
    for beginning, kind in _BEGINNINGS.items():
        fits_name = beginning == _TABLES.get(file.format) or (is_packed and "packed by" in kind)
        if head.startswith(beginning) and not fits_name:
            raise InputError(f"{file.name}: {kind}")
    if file.format != "text" and head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_PAGES):
        raise InputError(f"{file.name}: a page of HTML, not rows: download the file itself")


PIECE_BYTES = 256 * 1024  # long documents are tokenised in pieces of about this size
_BOM = codecs.BOM_UTF8
MAX_LINE_BYTES = 32 * MIB  # parsed JSON can take 20 times its text
# Rows of JSON begin with an object, in a list or not, with one of these fields soon in it.
_FIELDS = (
    "messages|conversations?|instruction|prompt|completion|text|question|answer|input|output|"
    "response|problem|solution|query|chosen|rejected"
)
_ROWS = re.compile(rf'\s*\[?\s*\{{\s*"(?:[\s\S]{{0,4000}}?[,{{]\s*")?(?:{_FIELDS})"\s*:')
_BLANK = re.compile(r"[ \t\r\n,]*")


class TextPiece(NamedTuple):
    """A part of a document, which starts at `line` of its file; a short document is one piece."""

    line: int
    text: str
    first: bool
    last: bool


def read_text(file: DataSource) -> Iterator[TextPiece]:
    """The pieces of a UTF-8 text file, which is one document; cut at line ends if possible.

    Raises InputError: unreadable, not UTF-8, or with NUL bytes; with the offset in the file.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, first, offset = 1, True, 0
    text = ""  # the piece to yield next, once another block shows that it is not the last
    with reading(file), open_file(file) as stream:
        while block := stream.read(PIECE_BYTES):
            # Read on to the end of the line, so that pieces rarely cut a word; a line may be long.
            if len(block) == PIECE_BYTES:
                block += stream.readline(PIECE_BYTES)
            if text:
                yield TextPiece(line, text, first, last=False)
                line, first = line + text.count("\n"), False
            text = _decode(decoder, block, offset, file, final=False)
            text = text.removeprefix(_BOM.decode()) if first else text
            if offset == 0 and _ROWS.match(text):
                remedy = "name the file .jsonl (one a line) or .json"
                raise InputError(f"{file.name}: rows of JSON are no text: {remedy}")
            offset += len(block)
        text += _decode(decoder, b"", offset, file, final=True)
    if text:
        yield TextPiece(line, text, first, last=True)


def split_text(text: str, line: int) -> Iterator[TextPiece]:
    """The pieces, of at most `PIECE_BYTES` characters, of a document given as one string."""
    start = 0
    if not text:
        yield TextPiece(line, text, first=True, last=True)
    while start < len(text):
        stop = start + PIECE_BYTES
        if stop < len(text):
            stop = (text.rfind("\n", start, stop) + 1) or stop
        yield TextPiece(line, text[start:stop], first=start == 0, last=stop >= len(text))
        start = stop


def read_rows(source: DataSource, wanted: Wanted) -> Rows:
    """The rows of a source, numbered from 1; a table's only with the values of `wanted` columns.

    A malformed row is yielded as an error, and reading continues after it.
    """
    read = read_hub if source.format == "hub" else _read_file
    number = 0
    for number, row in read(source, wanted):
        yield number, row
    if number == 0 and source.named:
        raise InputError(f"{source.name}: no rows in it: give data that has some")


def _read_file(file: DataSource, wanted: Wanted) -> Rows:
    with reading(file):
        if file.format == "parquet":
            yield from read_parquet(file, wanted)
        elif file.format == "arrow":
            yield from read_arrow(file, wanted)
        else:
            with open_file(file) as stream:
                head: bytes = stream.peek(64)  # type: ignore[attr-defined]  # all streams here have it
                is_list = head.removeprefix(_BOM).lstrip().startswith(b"[")
                read: Callable[..., Rows] = _read_jsonl
                if file.format == "csv":
                    read = read_csv
                elif file.format == "json" or is_list:
                    read = _read_json
                yield from read(file, stream)


def _decode(
    decoder: codecs.IncrementalDecoder, block: bytes, offset: int, file: DataSource, *, final: bool
) -> str:
    """The text of a block of a file. Raises InputError: it is not UTF-8, or has NUL bytes."""
    nul = block.find(b"\0")
    if nul >= 0:
        raise InputError(
            f"{file.name}: not text: NUL at byte offset {offset + nul} (UTF-16 or binary?): "
            "convert it to UTF-8 or leave it out"
        )
    num_pending = len(decoder.getstate()[0])  # bytes of a character that began in the last block
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise _not_utf8(file.name, offset - num_pending, error) from error


def _not_utf8(where: str, offset: int, error: UnicodeDecodeError) -> InputError:
    byte = error.object[error.start]
    return InputError(
        f"{where}: not UTF-8: byte 0x{byte:02x} at byte offset {offset + error.start}: "
        "convert it to UTF-8 or leave it out"
    )


def _read_jsonl(file: DataSource, stream: IO[bytes]) -> Rows:
    """The object of each line."""
    lines = iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b"")
    for number, line in enumerate(lines, 1):
        where = f"{file.name}:{number}"
        if len(line) > MAX_LINE_BYTES:
            raise _too_long(f"{where}: the line")
        if line.strip():
            try:
                yield number, _parse(line.removeprefix(_BOM) if number == 1 else line, where)
            except InputError as error:
                yield number, error


def _read_json(file: DataSource, stream: IO[bytes]) -> Rows:
    """The objects of a list, or consecutive objects; memory holds one, and `text` that follows."""
    decode = json.JSONDecoder(object_pairs_hook=each_key_once).raw_decode
    reader = codecs.getreader("utf-8-sig")(stream)
    text, number, at_end = reader.read(PIECE_BYTES), 0, False
    place = len(text) - len(text.lstrip())
    is_list = text[place : place + 1] == "["
    place += is_list
    while True:
        place = _BLANK.match(text, place).end()  # type: ignore[union-attr]
        next_char = text[place : place + 1]
        if next_char == "]" and is_list:
            if (text[place + 1 :] + reader.read(PIECE_BYTES)).strip():
                raise InputError(f"{file.name}: more after the list of rows: correct the file")
            return
        where = f"{file.name}:{number + 1}"
        row, end = _decoded(decode, text, place, where, at_end) if next_char else (None, place)
        if row is not None and (end < len(text) or at_end):
            number, place = number + 1, end
            yield number, row
            continue
        if at_end and not next_char:
            if is_list:
                raise InputError(f"{where}: the list of rows is cut off: give the whole file")
            return
        if len(text) - place > MAX_LINE_BYTES:
            raise _too_long(f"{where}: the row")
        piece = reader.read(max(PIECE_BYTES, len(text) - place))
        text = text[place:] + piece
        place = 0
        at_end = not piece


def _decoded(
    decode: Callable[..., tuple[object, int]], text: str, place: int, where: str, at_end: bool
) -> tuple[DataRow | None, int]:
    """The row at `place` and its end in the text; None while the text has only a part of it."""
    try:
        row, end = decode(text, place)
    except (RecursionError, ValueError) as error:
        if isinstance(error, json.JSONDecodeError) and not at_end:
            return None, place
        raise _unusable(where, error) from error
    return _checked(row, where), end


def _too_long(what: str) -> InputError:
    return InputError(f"{what} is longer than {MAX_LINE_BYTES // MIB} MiB: split the row")


def _parse(line: bytes, where: str) -> DataRow:
    try:
        return _checked(parse_json(line), where)
    except UnicodeDecodeError as error:
        raise _not_utf8(where, 0, error) from error
    except ValueError as error:  # nested too deeply, an integer of thousands of digits, a key twice
        raise _unusable(where, error) from error


def _unusable(where: str, error: Exception) -> InputError:
    if isinstance(error, json.JSONDecodeError):
        remedy = "correct the row (one that takes several lines needs a file named .json)"
        return InputError(f"{where}: not JSON: {error.msg} (column {error.colno}): {remedy}")
    reason = str(error).split(";")[0]  # without the remedy that `parse_json` names
    reason = "nested too deeply" if isinstance(error, RecursionError) else reason
    return InputError(f"{where}: not usable JSON: {reason}: correct the row")


def _checked(row: object, where: str) -> DataRow:
    if not isinstance(row, dict):
        raise InputError(f"{where}: a row must be a JSON object, this is a {type(row).__name__}")
    return row


def read_hub(source: DataSource, wanted: Wanted) -> Rows:
    """The rows of a hub data set."""
    encoded = source.rows.with_format("arrow")  # without decoding images
    names = encoded.column_names
    yield from _table_rows(
        source, names, wanted, lambda present: encoded.select_columns(present).iter(_BATCH_ROWS)
    )


def read_parquet(file: DataSource, wanted: Wanted) -> Rows:
    """The rows of a Parquet file."""
    with _pyarrow(file, "Parquet") as arrow, arrow.parquet.ParquetFile(file.path) as table:
        batches = partial(table.iter_batches, _BATCH_ROWS, None)  # None: all row groups
        yield from _table_rows(file, table.schema_arrow.names, wanted, batches)


def read_arrow(file: DataSource, wanted: Wanted) -> Rows:
    """The rows of an Arrow file: a stream (as `datasets` saves), or a file with random access."""
    with _pyarrow(file, "Arrow") as arrow, arrow.memory_map(str(file.path)) as stream:
        try:
            table: Any = arrow.ipc.open_stream(stream)
            batches: Iterable[Any] = table
        except arrow.ArrowInvalid:
            stream.seek(0)
            table = arrow.ipc.open_file(stream)
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        parts = (
            batch.slice(start, _BATCH_ROWS)
            for batch in batches
            for start in range(0, batch.num_rows, _BATCH_ROWS)
        )
        yield from _table_rows(
            file, table.schema.names, wanted, lambda present: (p.select(present) for p in parts)
        )


def read_csv(file: DataSource, stream: IO[bytes]) -> Rows:
    """The rows of a CSV or TSV file with a header; every value is a string."""
    text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    csv.field_size_limit(MAX_LINE_BYTES)
    number = 0
    try:
        header = text.readline(MAX_LINE_BYTES)
        if "\0" in header:
            raise InputError(f"{file.name}: NUL in its header (UTF-16?): convert it to UTF-8")
        default = "\t" if ".tsv" in file.path.suffixes else ","
        delimiter = next((d for d in (default, "\t", ";", "|", ",") if d in header), default)
        lines = csv.reader(chain([header], text), delimiter=delimiter, strict=True)
        names = next(lines, [])
        _refuse_twice(names, file)
        for number, values in enumerate(filter(None, lines), 1):
            if len(values) != len(names):
                raise InputError(
                    f"{file.name}:{number}: {len(values)} values for {len(names)} columns: "
                    "correct the row (values with commas need quotes)"
                )
            yield number, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise InputError(f"{file.name}:{number + 1}: not CSV: {error}: correct the row") from error


def _without_nulls(value: Any) -> Any:
    """A value without the nulls with which tables fill absent keys of nested objects."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _refuse_twice(names: list[str], file: DataSource) -> None:
    """Raises InputError: two columns have the same name."""
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise InputError(f"{file.name}: column {twice!r:.40} is there twice: rename one")


def _table_rows(
    file: DataSource, names: list[str], wanted: Wanted, read: Callable[[list[str]], Iterable[Any]]
) -> Rows:
    """The rows of a table with columns `names`; `read` returns batches with the columns it gets."""
    _refuse_twice(names, file)
    unread = {name: UNREAD for name in names if not wanted(name)}
    present = [name for name in names if name not in unread] or names[:1]  # rows need a column
    rows = (row for batch in read(present) for row in batch.to_pylist())
    for number, row in enumerate(rows, 1):
        yield number, {**_without_nulls(row), **unread}


@contextmanager
def _pyarrow(file: DataSource, what: str) -> Iterator[Any]:
    """The module pyarrow, whose errors become one line that names the file."""
    arrow = importlib.import_module("pyarrow")
    importlib.import_module("pyarrow.parquet")
    problem = f"{file.name}: not a readable {what} file"
    with explained(problem, of=(arrow.ArrowException, UnicodeDecodeError)):
        yield arrow
