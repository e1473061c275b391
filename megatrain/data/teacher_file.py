"""A teacher's likeliest tokens for each label of a data set: computed once, then kept.

A folder of two files, which grow together, so that a killed process can go on where it was.
`labels.bin`: for each label, row after row, the ids of K tokens (int32) and their log-probabilities
(fp32). `rows.bin`: of each row how many labels there are up to its end (int64), and a CRC-32 of
them, of this number and that of the row before (uint32). `whole.json`, once all rows are there:
size and time of both.
"""

import itertools
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.data.kept_file import KeptFile
from megatrain.data.token_store import alone
from megatrain.errors import InputError

TeacherAnswers = tuple[Tensor, Tensor, Tensor]
"""Of a micro-batch: labels `[B, T]`, ids and log-probabilities of likeliest tokens `[B, T, K]`."""

IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"
_ROW = np.dtype([("end", "<i8"), ("crc32", "<u4")])
_log = logging.getLogger("megatrain.data")


class TeacherFile:
    """Reads answers row by row, so that memory stays flat. Raises RunFailed: bytes have changed."""

    def __init__(self, folder: Path, top_k: int) -> None:
        self._top_k, self._record = top_k, _record(top_k)
        self._labels = KeptFile(folder / "labels.bin")
        self._rows = KeptFile(folder / "rows.bin")

    def of(self, rows: Sequence[int], labels: Tensor) -> dict[str, Tensor]:
        """Ids and log-probabilities `[B, T, K]` for rows whose labels are `[B, T]`."""
        answers = np.concatenate([self._of_row(row) for row in rows])
        shape, labelled = (*labels.shape, self._top_k), labels != -100
        ids, log_probs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        ids[labelled] = torch.from_numpy(answers["ids"].astype(np.int64))
        log_probs[labelled] = torch.from_numpy(answers["log_probs"].copy())
        return {IDS: ids, LOG_PROBS: log_probs}

    def _of_row(self, row: int) -> NDArray[np.void]:
        place = row * _ROW.itemsize
        before, this = np.frombuffer(self._rows.read(place, 2 * _ROW.itemsize), _ROW)
        begin, end = int(before["end"]), int(this["end"])
        size = self._record.itemsize
        if not 0 <= begin <= end <= self._labels.identity[0] // size:
            raise self._rows.damage(f"row {row}", place, 2 * _ROW.itemsize)
        labels = self._labels.read(begin * size, (end - begin) * size)
        if _crc32(begin, end, labels) != this["crc32"]:
            raise self._labels.damage(f"row {row}", begin * size, len(labels))
        return np.frombuffer(labels, self._record)


@contextmanager
def answering(folder: Path, top_k: int) -> Iterator["TeacherWriter | None"]:
    """A writer of the answers that `folder` lacks; None: it is whole.

    It is whole after the block. Processes that want the same one wait.

    Raises InputError: the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder.with_suffix(".lock"), "asking a teacher of these rows"):
            if _is_whole(folder):
                yield None
                return
            folder.mkdir(exist_ok=True)
            with _growing(folder / "labels.bin") as labels, _growing(folder / "rows.bin") as rows:
                yield TeacherWriter(labels, rows, top_k)
                os.fsync(rows.fileno())
            (folder / "whole.json").write_text(json.dumps(_identities(folder)))
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"{folder.parent}: cannot keep the teacher's answers there: {reason}"
        ) from error


class TeacherWriter:
    """Adds answers to a folder. `done`: rows whose answers are there, as they were written."""

    def __init__(self, labels: BinaryIO, rows: BinaryIO, top_k: int) -> None:
        self._labels, self._rows, self._record = labels, rows, _record(top_k)
        content = rows.read()
        size = len(content) // _ROW.itemsize * _ROW.itemsize
        records = np.frombuffer(content[:size] or bytes(_ROW.itemsize), _ROW).copy()
        records[0] = 0, 0  # before the first row
        records = records[: 1 + _num_whole(records, labels, self._record.itemsize)]
        rows.seek(0)
        rows.write(records.tobytes())
        rows.truncate()
        self._end, self.done = int(records[-1]["end"]), len(records) - 1
        labels.seek(self._end * self._record.itemsize)
        labels.truncate()

    def add(self, labels: Tensor, ids: Tensor, log_probs: Tensor) -> None:
        """Add the answers for a micro-batch, as `TeacherAnswers` has them."""
        used, end = labels != -100, self._end
        answered = np.zeros(int(used.sum()), self._record)
        answered["ids"], answered["log_probs"] = ids[used].numpy(), log_probs[used].numpy()
        self._labels.write(answered.tobytes())
        self._labels.flush()
        os.fsync(self._labels.fileno())  # rows must not be counted before their labels are
        edges = np.cumsum([end, *used.sum(1).tolist()]).tolist()
        sums = [
            _crc32(begin, stop, answered[begin - end : stop - end].tobytes())
            for begin, stop in itertools.pairwise(edges)
        ]
        self._rows.write(np.array([*zip(edges[1:], sums, strict=True)], _ROW).tobytes())
        self._rows.flush()
        self._end = edges[-1]


def _record(top_k: int) -> np.dtype[np.void]:
    return np.dtype([("ids", "<i4", (top_k,)), ("log_probs", "<f4", (top_k,))])


def _crc32(begin: int, end: int, labels: bytes | memoryview) -> int:
    return zlib.crc32(labels, zlib.crc32(np.array([begin, end], "<i8").tobytes()))


def _is_whole(folder: Path) -> bool:
    """True if both files are as they were written; damaged ones are removed."""
    if not (folder / "whole.json").is_file():
        return False
    try:
        if json.loads((folder / "whole.json").read_text()) == _identities(folder):
            return True
        problem = "files are not as they were written"
    except (OSError, ValueError, InputError) as error:
        problem = str(error)
    _log.warning(
        "%s: the answers of a teacher are damaged (%s): it is asked again", folder, problem
    )
    shutil.rmtree(folder)
    return False


def _identities(folder: Path) -> list[list[int]]:
    return [list(KeptFile(folder / name).identity) for name in ("rows.bin", "labels.bin")]


def _num_whole(every: NDArray[np.void], labels: BinaryIO, size: int) -> int:
    """Number of first rows whose labels, of `size` bytes each, are as they were written."""
    room = os.fstat(labels.fileno()).st_size
    for number, (begin, end) in enumerate(itertools.pairwise(every["end"].tolist())):
        if not begin <= end <= room // size:
            return number
        if _crc32(begin, end, labels.read((end - begin) * size)) != every["crc32"][number + 1]:
            return number
    return len(every) - 1


def _growing(path: Path) -> BinaryIO:
    return path.open("r+b" if path.exists() else "w+b")
