"""Finds the files that the user's paths, folders, globs or hub ids name."""

import logging
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatrain.errors import InputError, explained, os_reason

_log = logging.getLogger("megatrain.data")

FileFormat = Literal["text", "jsonl", "json", "csv", "parquet", "arrow", "hub"]
DataKind = Literal[
    "auto", "text", "chat", "pairs", "margins", "anchors", "prompts",
    "classes", "class_sets", "tags",
]  # fmt: skip

_SUFFIXES: dict[str, FileFormat] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".jsonlines": "jsonl", ".json": "json", ".csv": "csv",
    ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
_PACKED = (".gz", ".bz2", ".xz", ".zst")
# Files that `datasets` saves beside rows: descriptions, and caches of `map`.
_BESIDE_ROWS = re.compile(
    r"dataset_infos?\.json|dataset_dict\.json|state\.json|cache-[0-9a-f]{8,}(_\d+_of_\d+)?\.arrow"
)
_SPLITS = {
    "train": re.compile(r"(?<![a-z0-9])train(ing)?(?![a-z0-9])"),
    "test": re.compile(r"(?<![a-z0-9])(test|val|valid|validation|dev|eval)(?![a-z0-9])"),
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class DataSource:
    """A file to read, or a data set of the hub, which `datasets` keeps in memory-mapped files."""

    name: str
    format: FileFormat
    place: str  # the same for all names of one file: links, other spellings of its path
    identity: tuple[str | int, ...]  # the same as long as the source does not change
    named: bool = True  # True if the user named this file itself: it is an error if it is empty
    path: Path = Path()
    size: int = 0
    rows: Any = None  # of a hub data set, the object of `datasets`


def load_hub(name: str, config: str | None, split: str) -> DataSource:
    """A hub data set, which `datasets` downloads, or without a network takes from its cache.

    Raises InputError: no such data set, configuration or split, or it cannot be reached.
    """
    problem = f"{name!r}: no such file or folder, nor a hub data set that can be loaded"
    remedy = "check the path, install the package datasets, or fetch it once with a network"
    with explained(problem, remedy):  # datasets raises its back ends' errors
        import datasets

        rows = datasets.load_dataset(name, config, split=split)
    title = f"{name}[{split}]"
    return DataSource(title, "hub", title, (title, rows._fingerprint, len(rows)), rows=rows)


def open_sources(
    source: str | Path | Sequence[str | Path],
    kind: DataKind,
    hub_config: str | None = None,
    hub_split: str = "train",
    *,
    weighted: bool = False,
) -> tuple[list[DataSource], list[int]]:
    """The sources, each once, and for each the number of the entry of `source` that named it.

    A file with several names (links, other spellings of its path) is one file.

    Raises InputError: as `find_files` and `load_hub`; `weighted` sources share a file.
    """
    entries = [source] if isinstance(source, (str, Path)) else list(source)
    if not entries:
        raise InputError("the data has no path: name at least one file, folder or glob")
    chosen: dict[str, tuple[DataSource, int]] = {}
    for group, entry in enumerate(entries):
        files = find_files(entry, kind)
        if files and (hub_config is not None or hub_split != "train"):
            _log.warning("%s: hub_config and hub_split choose nothing here: these are files", entry)
        for file in files or [load_hub(str(entry), hub_config, hub_split)]:
            named_twice = chosen.get(file.place, (file, group))[1] != group
            if named_twice and weighted:
                raise InputError(f"{file.name}: named twice: a weight is for one of them, keep one")
            if named_twice:
                _log.warning("%s: named twice, and read once", file.name)
            chosen.setdefault(file.place, (file, group))
    return [file for file, _ in chosen.values()], [group for _, group in chosen.values()]


def find_files(source: str | Path, kind: DataKind) -> list[DataSource] | None:
    """The files that a path or glob names; None: it can only be a hub id.

    Folders are searched in sorted order for all but hidden files and those that `datasets` keeps
    beside rows. Beside files of rows, text files are read only if the kind is text. Links to
    folders are not followed, with a warning. Empty files are skipped unless they are named.

    Raises InputError: a path is missing or cannot be read; nothing fits; chat data has no rows.
    """
    text = str(source)
    path = Path(source).expanduser()
    known_file = Path(text).suffix in (*_SUFFIXES, *_PACKED, ".txt", ".py", ".md")
    if not (os.path.lexists(text) or known_file) and _HUB_ID.fullmatch(text):
        return None
    if re.match(r"[a-z][a-z0-9+.-]*://", text) and not os.path.lexists(path):
        raise InputError(f"{text}: an address, not a path: fetch it, and name the file or folder")
    if not os.path.lexists(path) and any(mark in text for mark in "*?["):
        paths: Iterator[Path] = iter(_glob(path))
    elif stat.S_ISDIR(_status(path).st_mode):
        paths = _walk(path)
    else:
        file = _describe(path, named=True)
        if kind not in ("auto", "text") and file.format == "text":
            raise InputError(f"{path}: conversations must be rows: .jsonl, .json, .csv or .parquet")
        if file.size == 0:
            raise InputError(f"{path}: the file is empty: give one with data")
        return [file]
    described = [f for f in (_describe(p, named=False) for p in paths) if f.size > 0]
    row_files = [f for f in described if f.format != "text"]
    needs_rows = kind not in ("auto", "text")
    files = row_files if needs_rows or (kind == "auto" and row_files) else described
    if not files:
        kind_of_file = "non-empty file" + (" of rows, such as .jsonl" if needs_rows else "")
        raise InputError(f"no {kind_of_file} in {text!r}: check the path")
    _refuse_splits(text, path, files)
    if len(files) < len(described):
        texts = [f.name for f in described if f.format == "text"]
        _log.info("left out %d files beside those of rows (first: %s)", len(texts), texts[0])
    return files


def _refuse_splits(text: str, folder: Path, files: list[DataSource]) -> None:
    """Raises InputError: file names say that some rows are for training, others for tests."""
    file_of: dict[str, str] = {}  # split -> the name of a file in it
    for file in files:
        if file.format != "text":
            place = os.path.relpath(file.path, folder).lower()
            file_of |= {split: file.name for split, names in _SPLITS.items() if names.search(place)}
    if len(file_of) > 1:
        raise InputError(
            f"{text}: it has rows to train on and rows to test with ({file_of['train']}, "
            f"{file_of['test']}): name the former as data.path, the latter as data.eval_path"
        )


def _describe(path: Path, *, named: bool) -> DataSource:
    """A file as a source. Raises InputError: it is not a plain file."""
    status = _status(path)
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path}: not a plain file (a device or a pipe?): copy its data to a file")
    name = Path(path.name.lower())
    suffix = name.with_suffix("").suffix if name.suffix in _PACKED else name.suffix
    form = _SUFFIXES.get(suffix, "text")
    identity = str(path.absolute()), status.st_size, status.st_mtime_ns
    return DataSource(str(path), form, str(path.resolve()), identity, named, path, status.st_size)


def _status(path: Path) -> os.stat_result:
    # Loops of links, links to nothing, missing permission, a NUL in the name.
    with explained(f"{path}: cannot be read", "check the path", of=(OSError, ValueError)):
        return path.stat()


def _walk(folder: Path) -> Iterator[Path]:
    """The files below `folder`, sorted, without hidden ones."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{os_reason(error)}: check who may read it") from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(filter(_visible, folders))
        for name in sorted(filter(_visible, names)):
            if not _BESIDE_ROWS.fullmatch(name):
                yield Path(parent, name)
        for path in (Path(parent, name) for name in folders):
            if path.is_symlink():
                _log.warning("%s: a link to a folder is not followed: add it to the path", path)


def _glob(pattern: Path) -> list[Path]:
    first_wild = next(i for i, part in enumerate(pattern.parts) if any(m in part for m in "*?["))
    base, rest = Path(*pattern.parts[:first_wild]), Path(*pattern.parts[first_wild:])
    with explained(f"{pattern}: not a usable pattern", of=(OSError, ValueError)):
        matches = [path for path in base.glob(str(rest)) if not path.is_dir()]
        return sorted(p for p in matches if all(map(_visible, p.relative_to(base).parts)))


def _visible(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"
