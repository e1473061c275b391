"""Writes and reads `metrics.jsonl`: one JSON object a line, written at once."""

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from megatrain.base.json_yaml import parse_json

Record = Mapping[str, Any]  # a line of the log
Listener = Callable[[Record], None]
_LONGEST_LINE = 1 << 20  # bytes; the places of a step's rows may be many

log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends lines to a file; a full disk delays lines, and never ends the run.

    The first line that cannot be written is named in the log; it and later lines are kept (the
    newest 100,000) and written when there is space. The file is opened for each attempt: a file
    object whose flush has failed keeps the unwritten bytes and fails for ever.
    """

    def __init__(self, path: Path, also: Sequence[Listener] = ()) -> None:
        """Args: `also`: functions that get each line's values once it is written."""
        self._path, self._also, self._warned = path, also, False
        self._unwritten: deque[bytes] = deque(maxlen=100_000)

    def write(self, **values: Any) -> None:
        """Append one line; numbers that JSON cannot hold (NaN, infinities) become null."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        self._unwritten.append(json.dumps(finite).encode() + b"\n")
        try:
            self._append(b"".join(self._unwritten))
        except OSError as error:
            if not self._warned:
                self._warned = True
                reason = error.strerror
                log.warning("%s: cannot be written (%s); the run goes on", self._path, reason)
        else:
            self._unwritten.clear()
        for listener in self._also:
            listener(values)

    def _append(self, lines: bytes) -> None:
        """Append all of `lines` or nothing: a cut line would damage the next one."""
        with self._path.open("ab", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size
            try:
                while lines:
                    lines = lines[file.write(lines) :]
            except OSError:
                with suppress(OSError):  # it is no plain file, so that nothing was appended
                    file.truncate(end)
                raise


def read_metrics(path: Path) -> Iterator[Record]:
    """The records of a metrics file, without lines that are cut, by a kill for example."""
    with path.open("rb") as file:
        yield from (record for _, record in lines(file) if record is not None)


def lines(file: IO[bytes]) -> Iterator[tuple[bytes, Record | None]]:
    """Yield each line (an endless one in pieces) and its record, or None."""
    while line := file.readline(_LONGEST_LINE):
        record = None
        with suppress(ValueError):
            record = parse_json(line)
        yield line, record if isinstance(record, dict) else None


def is_evaluation(record: Record) -> bool:
    """True if a line of `metrics.jsonl` is that of an evaluation."""
    return any(name.startswith("eval_") for name in record)


def model_tflops(parameters: int, trained: int, tokens: int, seconds: float) -> float:
    """The model TFLOPS of a step: each token takes 4 operations a parameter, 6 a trained one.

    Of experts only the parameters of those that a token chooses count.
    """
    return (4 * parameters + 2 * trained) * tokens / seconds / 1e12
