"""Log lines on the terminal, and one that is replaced by the next."""

import logging
import os
import shutil
import sys
import textwrap
import time
from contextlib import suppress
from threading import Lock

# The level of log records that say what is being done at this moment. `StderrHandler` shows them on
# a terminal, in a line that the next record replaces; in files and pipes it leaves them out.
PASSING = 15
logging.addLevelName(PASSING, "PASSING")

_ERASE = "\r\x1b[2K"
_SECONDS = 0.2  # between two log lines of a share
_shown: list[str] = []  # the line that `passing` has left on the terminal; empty: none


def wrapped(text: str) -> str:
    """Lines for stderr: wrapped at words for a terminal, unchanged for a file or a pipe."""
    if not sys.stderr.isatty():
        return text
    width = _columns()
    lines = (
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )
    return "\n".join(lines)


def passing(text: str) -> None:
    """Show the current work on a terminal, in place of this function's last line.

    Only the first rank of several shows anything. Nothing is written to a file or a pipe.
    """
    able = os.environ.get("TERM") != "dumb"
    with suppress(OSError, ValueError, AttributeError):  # there is no terminal, or none any more
        if able and os.environ.get("RANK", "0") == "0" and sys.stderr.isatty():
            _shown[:] = [text]
            print(f"{_ERASE}{text[: _columns() - 1]}", end="", file=sys.stderr, flush=True)


def end_passing() -> None:
    """Erase the line of `passing`, before anything else is written to the terminal."""
    if _shown:
        _shown.clear()
        with suppress(OSError, ValueError, AttributeError):
            print(_ERASE, end="", file=sys.stderr, flush=True)


def _columns() -> int:
    """The width of stderr's terminal; stdout may be a file."""
    with suppress(OSError):  # it is no terminal: an IDE's, or a test's
        if columns := os.get_terminal_size(sys.stderr.fileno()).columns:
            return columns
    return shutil.get_terminal_size().columns


class StderrHandler(logging.Handler):
    """Writes log lines to the current `sys.stderr`, above the line of `passing`."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.levelno == PASSING:
                passing(record.getMessage())
                return
            end_passing()
            print(wrapped(self.format(record)), file=sys.stderr, flush=True)
        except Exception:  # as every handler does: logging never ends a run
            self.handleError(record)


class Share:
    """Logs, at the level PASSING, how much of a whole is done; threads may share one."""

    def __init__(self, log: logging.Logger, what: str, whole: int) -> None:
        self._log, self._what, self._whole = log, what, whole
        self._done, self._logged, self._lock = 0, 0.0, Lock()

    def add(self, part: int) -> None:
        """Count `part` of the whole as done."""
        with self._lock:
            self._done += part
            now = time.monotonic()
            if now - self._logged >= _SECONDS:
                self._logged = now
                self._log.log(PASSING, "%s: %.0f %%", self._what, 100 * self._done / self._whole)
