"""Streaming readers: every row of a file with its number, or one error that names it.

Memory stays bounded whatever a file holds: text comes in pieces, rows of JSON have a longest size.
"""

import bz2
import codecs
import gzip
import importlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

from megatrain.base.json_yaml import each_key_once, parse_json
from megatrain.base.units import MIB
from megatrain.data.sources import DataSource, HubSplit, SourceFile
from megatrain.data.tables import DataRow, Wanted, read_arrow, read_csv, read_hub, read_parquet
from megatrain.errors import InputError

# First bytes of files that are neither rows nor text, whatever their name says.
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
    """A file's bytes, unpacked. Raises InputError: the library that unpacks it is missing."""
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
    """Turns read errors, also of a wrong format, into one line that names the file.

    Raises InputError: it cannot be read, or is plainly something else.
    """
    try:
        _refuse_other(file)
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{file.name}: cannot be read: {reason.lower()}") from error


def _refuse_other(file: SourceFile) -> None:
    """Raises InputError: the file's first bytes contradict its name."""
    with file.path.open("rb") as stream:
        begins = stream.read(64)
    packed = file.path.suffix.lower() in (*_UNPACKED, ".zst")
    for beginning, what in _BEGINNINGS.items():
        of_its_name = beginning == _TABLES.get(file.format) or (packed and "packed by" in what)
        if begins.startswith(beginning) and not of_its_name:
            raise InputError(f"{file.name}: {what}")
    if file.format != "text" and begins.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_PAGES):
        raise InputError(f"{file.name}: a page of HTML, not rows: download the file itself")


PIECE_BYTES = 256 * 1024  # long documents are tokenised in pieces of about this size
_BOM = "\ufeff"
MAX_LINE_BYTES = 32 * MIB  # parsed JSON can take 20 times its text
# A list of rows (not of messages) as the file's only field, whose name no row's field has.
_WRAPPED = re.compile(
    r'\s*\{\s*"(train|data|rows|examples|samples|items|records|instances|dataset)"\s*:\s*'
    r'\[(?=\s*\{\s*"(?!(?:role|content|from|value)"))'
)
_LIST = re.compile(r"\s*\[(?=\s*\{)")
_ROW = re.compile(r'[\s,]*(\{\s*"([^"\\]*)"\s*:)')
_FIELDS = {
    "messages", "conversations", "conversation", "instruction", "prompt", "completion", "text",
    "question", "answer", "input", "output", "response", "problem", "solution", "query", "chosen",
    "rejected",
}  # fmt: skip
_BLANK = re.compile(r"[ \t\r\n,]*")


class TextPiece(NamedTuple):
    """A part of a document that starts at `line`; a short document is one piece."""

    line: int
    text: str
    first: bool
    last: bool


def read_text(file: SourceFile) -> Iterator[TextPiece]:
    """The pieces of a UTF-8 text file, which is one document; cut at line ends if possible.

    Raises InputError: unreadable, not UTF-8, or with NUL bytes; with the offset in the file.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, first, text = 1, True, ""
    offset = 0
    with reading(file), open_file(file) as stream:
        while block := stream.read(PIECE_BYTES):
            # To the end of its line, so that pieces rarely cut a word; a line may be endless.
            if len(block) == PIECE_BYTES:
                block += stream.readline(PIECE_BYTES)
            if text:
                yield TextPiece(line, text, first, last=False)
                line, first = line + text.count("\n"), False
            text = _decode(decoder, block, offset, file, final=False)
            text = text.removeprefix(_BOM) if first else text
            whole = len(block) < PIECE_BYTES
            if offset == 0 and (ending := _ending_of_rows(text, whole=whole)):
                raise InputError(f"{file.name}: rows of JSON are no text: name the file {ending}")
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


def read_rows(source: DataSource, wanted: Wanted) -> Iterator[tuple[int, DataRow | InputError]]:
    """The rows of a source, numbered from 1; of tables only the `wanted` columns.

    A malformed row is yielded as an error, and reading goes on after it.

    Raises InputError: the source is unreadable, malformed or empty.
    """
    number = 0
    read: Any = read_hub if isinstance(source, HubSplit) else _read_file
    for number, row in read(source, wanted):
        yield number, row
    if number == 0 and source.named:
        raise InputError(f"{source.name}: no rows in it: give data that has some")


def _read_file(file: SourceFile, wanted: Wanted) -> Iterator[tuple[int, DataRow | InputError]]:
    with reading(file):
        if file.format == "parquet":
            yield from read_parquet(file, wanted)
        elif file.format == "arrow":
            yield from read_arrow(file, wanted)
        else:
            with open_file(file) as stream:
                if file.format == "csv":
                    yield from read_csv(file, wanted, stream, MAX_LINE_BYTES)
                    return
                begins: bytes = stream.peek(64)  # type: ignore[attr-defined]  # all of `open_file`
                is_list = begins.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
                read = _read_json if file.format == "json" or is_list else _read_jsonl
                yield from read(file, stream)


def _ending_of_rows(text: str, *, whole: bool) -> str | None:
    """`.jsonl` if the first two lines (or the only one) are JSON objects, `.json` for other rows.

    None: the text has no rows. Args: `whole`: True if it is all of the file.
    """
    lines = [line for line in text.split("\n", 16) if line.strip()][:2]
    try:
        if lines and all(isinstance(parse_json(line), dict) for line in lines):
            return ".jsonl"
    except ValueError:
        if not whole and len(lines) == 1 and text.lstrip().startswith('{"'):
            return ".jsonl"
    return ".json" if _begins_with_rows(text, whole=whole) else None


def _begins_with_rows(text: str, *, whole: bool) -> bool:
    """True if a text begins with a list of JSON objects, or two objects, with fields of rows."""
    begins = _WRAPPED.match(text) or _LIST.match(text)
    place = begins.end() if begins else 0
    for _ in range(1 if begins else 2):
        first = _ROW.match(text, place)
        if first is None:
            return False
        try:
            row, place = json.JSONDecoder().raw_decode(text, first.start(1))
        except json.JSONDecodeError as error:
            cut_off = error.msg.startswith("Unterminated string") or error.pos >= len(text) - 8
            return not whole and cut_off and first.group(2) in _FIELDS
        except (ValueError, RecursionError):  # an integer of thousands of digits, deep nesting
            return False
        if _FIELDS.isdisjoint(row):
            return False
    rest = text[place:].lstrip()
    if rest.startswith("]"):
        return not rest.lstrip("] }\t\r\n")
    return rest[:1] in (("", ",") if begins else ("", ",", "{"))


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


def _read_jsonl(file: SourceFile, stream: IO[bytes]) -> Iterator[tuple[int, DataRow | InputError]]:
    number, offset = 0, 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        where = f"{file.name}:{number}"
        if len(line) > MAX_LINE_BYTES:
            raise _too_long(f"{where}: the line")
        if line.strip():
            try:
                yield number, _parse(line, where, offset)
            except InputError as error:
                yield number, error
        offset += len(line)


def _read_json(file: SourceFile, stream: IO[bytes]) -> Iterator[tuple[int, DataRow]]:
    """The objects of a list, or consecutive objects; one at a time is in memory.

    The list may be the only field of an object: {"train": [...]}.
    """
    decode = json.JSONDecoder(object_pairs_hook=each_key_once).raw_decode
    reader = codecs.getreader("utf-8-sig")(stream)
    text, place, number, ended = _more(reader, file), 0, 0, False
    wrapped = _WRAPPED.match(text)
    place = wrapped.end() if wrapped else len(text) - len(text.lstrip())
    listed_ = wrapped is not None or text[place : place + 1] == "["
    place += listed_ and wrapped is None
    while True:
        place = _BLANK.match(text, place).end()  # type: ignore[union-attr]
        begins = text[place : place + 1]
        if begins == "]" and listed_:
            rest = (text[place + 1 :] + _more(reader, file)).strip()
            if rest != ("}" if wrapped else ""):
                raise _more_than_a_list(file, wrapped)
            return
        where = f"{file.name}:{number + 1}"
        row, end = _decoded(decode, text, place, where, ended) if begins else (None, place)
        if row is not None and (end < len(text) or ended):
            number, place = number + 1, end
            yield number, row
            continue
        if ended and not begins:
            if listed_:
                raise InputError(f"{where}: the list of rows is cut off: give the whole file")
            return
        if len(text) - place > MAX_LINE_BYTES:
            raise _too_long(f"{where}: the row")
        more = _more(reader, file, max(PIECE_BYTES, len(text) - place))
        text, place, ended = text[place:] + more, 0, not more


def _more_than_a_list(file: SourceFile, wrapped: re.Match[str] | None) -> InputError:
    if wrapped is None:
        return InputError(f"{file.name}: more after the list of rows: correct the file")
    name = wrapped.group(1)
    return InputError(
        f"{file.name}: the list of rows {name!r} is not all that it has: take the one to train on "
        f"out, as by jq -c '.{name}[]' {file.path.name} > {name}.jsonl"
    )


def _decoded(
    decode: Callable[[str, int], tuple[object, int]], text: str, place: int, where: str, ended: bool
) -> tuple[DataRow | None, int]:
    """A row and its end in the text; None while it is incomplete."""
    try:
        row, end = decode(text, place)
    except json.JSONDecodeError as error:
        if not ended:
            return None, place
        raise InputError(f"{where}: not JSON: {error.msg}: correct the row") from error
    except RecursionError as error:
        raise InputError(f"{where}: not usable JSON: nested too deeply") from error
    except ValueError as error:
        raise InputError(f"{where}: not usable JSON: {str(error).split(';')[0]}") from error
    return _row(row, where), end


def _more(reader: codecs.StreamReader, file: SourceFile, num_chars: int = PIECE_BYTES) -> str:
    try:
        return reader.read(num_chars)
    except UnicodeDecodeError as error:
        raise InputError(f"{file.name}: not UTF-8: {error.reason}: convert it to UTF-8") from error


def _too_long(what: str) -> InputError:
    return InputError(f"{what} is longer than {MAX_LINE_BYTES // MIB} MiB: split the row")


def _parse(line: bytes, where: str, offset: int) -> DataRow:
    try:
        text = line.decode("utf-8")
        text = text.removeprefix(_BOM) if offset == 0 else text
        row = parse_json(text)
    except UnicodeDecodeError as error:
        raise _not_utf8(where, offset, error) from error
    except json.JSONDecodeError as error:
        remedy = "correct the line (of rows over several lines, name the file .json)"
        raise InputError(
            f"{where}: not JSON: {error.msg} (column {error.colno}): {remedy}"
        ) from error
    except ValueError as error:  # nested too deeply, an integer of thousands of digits, a key twice
        raise InputError(f"{where}: not usable JSON: {str(error).split(';')[0]}") from error
    return _row(row, where)


def _row(row: object, where: str) -> DataRow:
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise InputError(f"{where}: a row must be a JSON object, this is a {kind}")
    return row
