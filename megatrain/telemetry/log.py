"""Log lines on the terminal; apart from the progress bar, which takes longer to import."""

import logging
import os
import shutil
import sys
import textwrap
import time
from contextlib import suppress
from threading import Lock

# Of what is being done at this moment: a terminal shows it in a line that the next thing to say
# replaces; nowhere else is it of use.
PASSING = 15
logging.addLevelName(PASSING, "PASSING")

_ERASE = "\r\x1b[2K"
_SECONDS = 0.2  # between two of a share's


def wrapped(text: str) -> str:
    """Lines for stderr: wrapped at words in a terminal, as they are in a file or a pipe."""
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = (
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )
    return "\n".join(lines)


class StderrHandler(logging.Handler):
    """Writes log lines to what `sys.stderr` is at that time.

    A live bar takes its place, to put lines above itself; written past it, they break the bar.
    """

    _passing = False  # whether the terminal shows what is being done

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == PASSING:
            self._pass(record.getMessage())
            return
        self.end_passing()
        try:
            print(wrapped(self.format(record)), file=sys.stderr, flush=True)
        except Exception:  # as every handler does: logging never ends a run
            self.handleError(record)

    def _pass(self, text: str) -> None:
        able = os.environ.get("TERM") != "dumb" and not hasattr(sys.stderr, "rich_proxied_file")
        with suppress(OSError, ValueError):  # the terminal is gone
            if able and os.environ.get("RANK", "0") == "0" and sys.stderr.isatty():
                line = text[: shutil.get_terminal_size().columns - 1]
                print(f"{_ERASE}{line}", end="", file=sys.stderr, flush=True)
                self._passing = bool(text)

    def end_passing(self) -> None:
        """Take away what the terminal shows as being done, before anything else is written."""
        if self._passing:
            self._pass("")


class Share:
    """Says which share of a whole is done; from any thread."""

    def __init__(self, log: logging.Logger, what: str, whole: int) -> None:
        self._log, self._what, self._whole = log, what, whole
        self._done, self._said, self._lock = 0, 0.0, Lock()

    def add(self, part: int) -> None:
        with self._lock:
            self._done += part
            now = time.monotonic()
            if now - self._said >= _SECONDS:
                self._said = now
                self._log.log(PASSING, "%s: %.0f %%", self._what, 100 * self._done / self._whole)
