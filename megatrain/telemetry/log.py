"""Log lines on the terminal; apart from the progress bar, which takes longer to import."""

import logging
import shutil
import sys
import textwrap


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

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(wrapped(self.format(record)), file=sys.stderr, flush=True)
        except Exception:  # as every handler does: logging never ends a run
            self.handleError(record)
