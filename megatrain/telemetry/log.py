"""Log lines on the terminal; apart from the progress bar, which takes longer to import."""

import logging
import sys


class StderrHandler(logging.Handler):
    """Writes log lines to what `sys.stderr` is at that time.

    A live bar takes its place, to put lines above itself; written past it, they break the bar.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # as every handler does: logging never ends a run
            self.handleError(record)
