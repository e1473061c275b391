"""Readers of tables: Parquet, Arrow, CSV and data sets of the hub.

Only the wanted columns are read; the others' names have the value UNREAD in rows.
"""

import csv
import importlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import IO, Any

from megatrain.data.sources import HubSplit, SourceFile
from megatrain.errors import InputError, first_line

UNREAD: Any = ...
_BATCH_ROWS = 256

DataRow = Mapping[str, Any]
Wanted = Callable[[str], bool]


def read_hub(source: HubSplit, wanted: Wanted) -> Iterator[tuple[int, DataRow]]:
    """The rows of a hub data set."""
    if not hasattr(source.rows, "__len__"):  # a stream, whose columns only its rows may show
        for number, row in enumerate(source.rows, start=1):
            yield number, {n: _without_nulls(v) if wanted(n) else UNREAD for n, v in row.items()}
        return
    names = source.rows.column_names
    others = dict.fromkeys((n for n in names if not wanted(n)), UNREAD)
    present = [n for n in names if wanted(n)]
    # Reading no columns would give no rows, and no error could name the columns.
    rows = source.rows.select_columns(present) if present else [{}] * min(len(source.rows), 1)
    for number, row in enumerate(rows, start=1):
        yield number, {**_without_nulls(row), **others}


def read_parquet(file: SourceFile, wanted: Wanted) -> Iterator[tuple[int, DataRow]]:
    """The rows of a Parquet file."""
    parquet = _pyarrow(file, "pyarrow.parquet")
    with _reading(file, "Parquet"), parquet.ParquetFile(file.path) as table:
        names = table.schema_arrow.names
        _once(names, file)
        present = [n for n in names if wanted(n)]
        batches = table.iter_batches(batch_size=_BATCH_ROWS, columns=present)
        yield from _rows(batches, [n for n in names if not wanted(n)])


def read_arrow(file: SourceFile, wanted: Wanted) -> Iterator[tuple[int, DataRow]]:
    """The rows of an Arrow file, as a stream (what `datasets` saves) or with random access."""
    arrow = _pyarrow(file, "pyarrow")
    with _reading(file, "Arrow"), arrow.memory_map(str(file.path)) as stream:
        try:
            table: Any = arrow.ipc.open_stream(stream)
            batches: Iterable[Any] = table
        except arrow.ArrowInvalid:
            stream.seek(0)
            table = arrow.ipc.open_file(stream)
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        names = table.schema.names
        _once(names, file)
        present = [n for n in names if wanted(n)]
        parts = (
            batch.slice(start, _BATCH_ROWS).select(present)
            for batch in batches
            for start in range(0, batch.num_rows, _BATCH_ROWS)
        )
        yield from _rows(parts, [n for n in names if not wanted(n)])


def read_csv(
    file: SourceFile, wanted: Wanted, stream: IO[bytes], longest: int
) -> Iterator[tuple[int, DataRow]]:
    """The rows of a CSV or TSV file with a header; every value is the string that is written."""
    text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    csv.field_size_limit(longest)
    number = 0
    try:
        header = text.readline(longest)
        if "\0" in header:
            raise InputError(f"{file.name}: NUL in its header (UTF-16?): convert it to UTF-8")
        default = "\t" if ".tsv" in file.path.suffixes else ","
        delimiter = next((d for d in (default, "\t", ";", "|", ",") if d in header), default)
        cells = csv.reader(chain([header], text), delimiter=delimiter, strict=True)
        names = next(cells, [])
        _once(names, file)
        for values in cells:
            if values:
                number += 1
                if len(values) != len(names):
                    raise InputError(
                        f"{file.name}:{number}: {len(values)} values for {len(names)} columns: "
                        "correct the row (values with commas need quotes)"
                    )
                yield number, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise InputError(f"{file.name}:{number + 1}: not CSV: {error}: correct the row") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file.name}: not UTF-8: {error.reason}: convert it to UTF-8") from error


def _without_nulls(value: Any) -> Any:
    """A value without the nulls that tables put for absent keys of nested objects."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _once(names: list[str], file: SourceFile) -> None:
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise InputError(f"{file.name}: column {twice!r:.40} is there twice: rename one")


def _rows(batches: Iterable[Any], unread: list[str]) -> Iterator[tuple[int, DataRow]]:
    number, others = 0, dict.fromkeys(unread, UNREAD)
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield number, {**_without_nulls(row), **others}


def _pyarrow(file: SourceFile, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{file.name}: reading it needs pyarrow: install datasets") from error


@contextmanager
def _reading(file: SourceFile, what: str) -> Iterator[None]:
    """Turns pyarrow's errors into one line that names the file."""
    arrow = _pyarrow(file, "pyarrow")
    try:
        yield
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        reason = first_line(error)
        raise InputError(f"{file.name}: not a readable {what} file: {reason}") from error
