"""Tokenised documents on disk: written once, then read row by row, so that memory stays flat.

A store is a folder of four files. `tokens.bin`: int32, all documents end to end; a token that is
only read is stored as its bitwise complement (a negative number); a document's classes follow it.
`images.bin`: for each document with images their names in JSON, then the bytes of those that are in
no file. `documents.bin`: one record per document. `meta.json`: names and notes of the sources, a
digest of the tokens, sizes, times and checksums of all files.

Nothing is memory-mapped: a mapped file that somebody cuts short kills the process with SIGBUS,
while a failed read is one line, and the run can still save its weights.
"""

import hashlib
import json
import logging
import os
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from megatrain.base.json_yaml import json_crc32
from megatrain.base.units import KIB
from megatrain.base.whole_files import fill, whole_folder
from megatrain.data.encoders import Document
from megatrain.data.images import Medium
from megatrain.errors import InputError, RunFailed, explained

_log = logging.getLogger("megatrain.data")
_FILES = ("tokens.bin", "documents.bin", "images.bin")
_TOKEN = np.dtype("<i4")
# begin, end: of the document's tokens in `tokens.bin`; labels: the number of its classes
# first_target: the document's first token to predict, -1 if there is none
# images, images_size: first byte and size of the JSON in `images.bin` about the document's images
_RECORD = np.dtype([("begin", "<i8"), ("end", "<i8"), ("first_target", "<i8"),
                    ("line", "<i8"), ("source", "<i4"), ("good", "<i4"),
                    ("margin", "<f8"), ("labels", "<i8"),
                    ("images", "<i8"), ("images_size", "<i8")])  # fmt: skip

# Bytes of one checksum: a row of 4,096 tokens touches two blocks at most; checksums take 0.01 %.
_BLOCK_BYTES = 32 * KIB
_SECONDS_BETWEEN_NEWS = 5.0


class Tokens(NamedTuple):
    """Copies of a document's tokens, int64 `[n]`, with their labels (-100: not predicted)."""

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]


class DocumentMedia(NamedTuple):
    """The media of a document, and the number of tokens up to the end of the last one's."""

    end: int
    media: list[Medium]


class TokenStore:
    """Documents and their tokens on disk; a read raises RunFailed if they are damaged."""

    def __init__(self, folder: Path) -> None:
        """Open a store. Raises an error of `_DAMAGES`: a file is not as it was written."""
        for name in ("meta.json", *_FILES):
            if not (folder / name).is_file():  # reading a pipe would wait
                raise ValueError(f"{name} is not a plain file")
        meta = json.loads((folder / "meta.json").read_text())
        if meta.pop("crc32") != json_crc32(meta):
            raise ValueError("meta.json is not as it was written")
        self.names: list[str] = meta["names"]  # of the sources
        # findings about the sources, as JSON (`Examples.notes`)
        self.notes: dict[str, Any] = meta["notes"]
        self.digest: str = meta["digest"]  # of all tokens and records
        files = map(_KeptFile, map(folder.joinpath, _FILES), meta["files"])
        self._tokens, self._records, self._images = files
        self.has_images = self._images.num_bytes > 0

    def documents(self) -> NDArray[Any]:
        """The records of all documents; they are large: call this once, at the start."""
        return np.frombuffer(self._records.read(0, self._records.num_bytes), _RECORD)

    def read(self, document: int, begin: int, end: int) -> Tokens:
        """The tokens `begin` to `end` of a document."""
        size = _TOKEN.itemsize
        first = int(self._record(document)["begin"])
        raw = self._tokens.read((first + begin) * size, (end - begin) * size)
        stored = np.frombuffer(raw, _TOKEN).astype(np.int64)
        only_read = stored < 0  # tokens without a label are stored as `~token`
        return Tokens(np.where(only_read, ~stored, stored), np.where(only_read, -100, stored))

    def length(self, document: int) -> int:
        record = self._record(document)
        return int(record["end"] - record["begin"])

    def margin(self, document: int) -> float:
        """The margin by which the better reply of the document's pair is preferred."""
        return float(self._record(document)["margin"])

    def labels(self, document: int) -> NDArray[np.int64]:
        """The classes of a document, or of each of its tokens."""
        record, size = self._record(document), _TOKEN.itemsize
        raw = self._tokens.read(int(record["end"]) * size, int(record["labels"]) * size)
        return np.frombuffer(raw, _TOKEN).astype(np.int64)

    def images_of(self, document: int, *, whole: bool = True) -> DocumentMedia:
        """A document's media; not `whole`: without the bytes of those that are in no file."""
        record = self._record(document)
        offset, size = int(record["images"]), int(record["images_size"])
        images: list[Medium] = []
        if not size:
            return DocumentMedia(0, images)
        end, entries = json.loads(bytes(self._images.read(offset, size)))
        offset += size
        for path, digest, dimensions, state, length, *frames in entries:
            data = bytes(self._images.read(offset, length)) if whole and length else b""
            images.append(Medium(path, digest, (*dimensions,), (*state,), data, *frames))
            offset += length
        return DocumentMedia(end, images)

    def place(self, document: int) -> str:
        record = self._record(document)
        return f"{self.names[record['source']]}:{record['line']}"

    def _record(self, document: int) -> Any:
        raw = self._records.read(int(document) * _RECORD.itemsize, _RECORD.itemsize)
        return np.frombuffer(raw, _RECORD)[0]


def open_store(
    folder: Path, names: list[str], make: Callable[[], Iterable[Document]], notes: dict[str, Any]
) -> TokenStore:
    """The store in `folder`, made from the documents of `make` unless a complete one exists.

    The folder appears only when the store is complete; processes that need the same store wait.

    Args: `notes`: saved (as JSON) after the last document, as `make` may change them.

    Raises InputError: the folder cannot be written, or whatever reading the documents raises.
    """
    with explained(f"{folder.parent}: cannot keep tokens there", of=OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder.with_suffix(".lock"), "making these tokens"):
            store = _load(folder)
            if store is None:
                _build(folder, names, make(), notes)
                store = _load(folder)
    assert store is not None
    return store


@contextmanager
def alone(path: Path, doing: str) -> Iterator[None]:
    """Hold a lock file; a process that waits for it logs what the other one is `doing`."""
    lock = FileLock(path)
    try:
        acquired = lock.acquire(timeout=0)
    except Timeout:
        _log.info("another run is %s: waiting until it has ended (%s)", doing, path)
        acquired = lock.acquire()
    with acquired:
        yield


def _checksummed(path: Path) -> tuple[int, int, list[int]]:
    """A file's size, its time (ns), and the CRC-32 of each block, which finds 3 flipped bits."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        sums = [*map(zlib.crc32, iter(partial(file.read, _BLOCK_BYTES), b""))]
    return status.st_size, status.st_mtime_ns, sums


class _KeptFile:
    """A file to read, whose bytes must be as they were written."""

    def __init__(self, path: Path, record: tuple[int, int, list[int]]) -> None:
        """Open a file that was `_checksummed`. Raises OSError, ValueError: it has changed since."""
        self._path, (self.num_bytes, time_ns, sums) = path, record
        self._sums = array("I", sums)
        self._file = path.open("rb", buffering=0)
        status = os.fstat(self._file.fileno())
        if (status.st_size, status.st_mtime_ns) != (self.num_bytes, time_ns):
            raise ValueError("files are not as they were written")

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Read exactly these bytes; any thread may call it.

        Raises RunFailed: they cannot be read, or a block that has some of them is not as written.
        """
        first = offset // _BLOCK_BYTES
        start = first * _BLOCK_BYTES
        stop = min(-(-(offset + num_bytes) // _BLOCK_BYTES) * _BLOCK_BYTES, self.num_bytes)
        data = self._read(start, max(stop, offset + num_bytes) - start)
        for block, place in enumerate(range(0, len(data), _BLOCK_BYTES), first):
            if zlib.crc32(data[place : place + _BLOCK_BYTES]) != self._sums[block]:
                raise self._damage(f"block {block}", start + place, _BLOCK_BYTES)
        return data[offset - start :][:num_bytes]

    def _damage(self, problem: str, offset: int, num_bytes: int) -> RunFailed:
        return RunFailed(
            f"{self._path}: {problem} ({num_bytes:,} bytes at byte {offset:,}) is not as it was "
            f"written: the disk or memory is faulty; delete {self._path.parent}, and start again"
        )

    def _read(self, offset: int, num_bytes: int) -> memoryview:
        data, descriptor = memoryview(bytearray(num_bytes)), self._file.fileno()
        problem = f"{self._path}: cannot be read any more"
        with explained(problem, of=(OSError, EOFError), into=RunFailed):
            if os.fstat(descriptor).st_size != self.num_bytes:
                raise self._damage("its size", 0, self.num_bytes)
            fill(data, descriptor, offset)
        return data


_DAMAGES = OSError, ValueError, KeyError, TypeError, RecursionError, RunFailed


def _load(folder: Path) -> TokenStore | None:
    """The store in `folder`; None if it is missing or incomplete."""
    if not folder.exists():
        return None
    try:
        store = TokenStore(folder)
        # Reading all records finds damage now, while the store can be made again.
        with_images = np.flatnonzero(store.documents()["images_size"]).tolist()
        media = (m for n in with_images for m in store.images_of(n, whole=False).media)
        changed = next((medium for medium in media if medium.changed()), None)
    except _DAMAGES as error:
        _log.warning("%s: kept tokens are damaged (%s): made again", folder, error)
        return None
    if changed is not None:
        _log.info("%s has changed: tokens are made again", changed.path)
    return None if changed else store


def _build(
    folder: Path, names: list[str], documents: Iterable[Document], notes: dict[str, Any]
) -> None:
    """Write a store. Raises InputError: the documents have no token to learn."""
    with whole_folder(folder, replace=True) as part:
        digest, num_documents, num_tokens = _write(part, documents)
        if not num_tokens:
            if notes.get("bad"):
                raise InputError(f"every row is bad: {notes['bad'][0]}")
            raise InputError(
                f"{', '.join(names[:4])}: none of the {num_documents} rows has text, or a reply of "
                "the assistant whose weight is not 0, to learn from"
            )
        files = [_checksummed(part / name) for name in _FILES]
        meta = {"names": names, "notes": notes, "digest": digest, "files": files}
        (part / "meta.json").write_text(json.dumps(meta | {"crc32": json_crc32(meta)}))


def _write(part: Path, documents: Iterable[Document]) -> tuple[str, int, int]:
    """Write the files of tokens; returns a digest, the number of documents, and of tokens."""
    digest = hashlib.blake2b(digest_size=16)
    num_documents, num_tokens = 0, 0
    due = time.monotonic() + _SECONDS_BETWEEN_NEWS
    with ExitStack() as stack:
        tokens, records, images = (stack.enter_context((part / name).open("wb")) for name in _FILES)
        for document in documents:
            stored, record = _encoded(document, num_tokens)
            # The digest leaves out the place of images, and fields before it that are unset.
            unset_bytes = 32  # margin, labels, images, images_size
            if len(document.labels):
                unset_bytes = 16
            elif document.margin:
                unset_bytes = 24
            digest.update(stored.tobytes() + record.tobytes()[:-unset_bytes])
            digest.update("".join(image.digest for image in document.images).encode())
            entries = [
                [m.path, m.digest, m.size, m.state, len(m.data), m.kind, m.film, m.together]
                for m in document.images
            ]
            names = json.dumps([document.images_end, entries]).encode() if entries else b""
            record["images"], record["images_size"] = images.tell(), len(names)
            images.write(names + b"".join(image.data for image in document.images))
            tokens.write(stored.tobytes())
            records.write(record.tobytes())
            num_documents, num_tokens = num_documents + 1, num_tokens + len(stored)
            if time.monotonic() >= due:
                due = time.monotonic() + _SECONDS_BETWEEN_NEWS
                _log.info(
                    "tokenised %s documents, %s tokens", f"{num_documents:,}", f"{num_tokens:,}"
                )
    return digest.hexdigest(), num_documents, num_tokens


def _encoded(document: Document, begin: int) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """The stored tokens [n] of a document, which begin at `begin`, and its record [1]."""
    ids, targets = document.ids, document.targets.copy()
    targets[:1] = False  # no token before it predicts it
    has_class = len(ids) == 1 and len(document.labels) > 0  # one token, but something to learn
    first = int(targets.argmax()) if has_class or targets.any() else -1
    of_row = document.line, document.source, document.good, document.margin, len(document.labels)
    record = np.array([(begin, begin + len(ids), first, *of_row, 0, 0)], _RECORD)
    stored = np.concatenate([np.where(targets, ids, ~ids), document.labels])
    return stored.astype(_TOKEN), record
