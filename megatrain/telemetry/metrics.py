"""`metrics.jsonl`: one JSON object a line, written as it happens."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


def _warn(message: str) -> None:
    print(message, file=sys.stderr)


class MetricsWriter:
    """Appends lines to a file; a full disk costs lines, never the run.

    The first line that cannot be written is reported through `warn`, once; later ones are tried
    again, so that the log goes on when there is room. The file is opened for each line: a file
    object whose flush has failed keeps the unwritten bytes and fails for ever.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] = _warn) -> None:
        self._path = path
        self._warn = warn
        self._warned = False
        self._torn = False

    def write(self, **values: Any) -> None:
        """Append one line; numbers that JSON cannot hold (NaN, infinities) become null."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        # A line cut short by a full disk must not swallow the next one.
        line = ("\n" if self._torn else "") + json.dumps(finite) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
            self._torn = False
        except OSError as error:
            self._torn = True
            if not self._warned:
                self._warned = True
                self._warn(f"{self._path}: cannot be written ({error.strerror}); the run goes on")


def read_metrics(path: Path) -> Iterator[Mapping[str, Any]]:
    """The lines of a metrics file, without those a full disk or a kill has cut short."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record
