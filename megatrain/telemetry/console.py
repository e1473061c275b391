"""Progress and log lines for people, and a line on the current work that the next one replaces."""

import logging
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from megatrain.base.units import duration, gib

if TYPE_CHECKING:
    from rich.console import Console

# The level of log records on the current work. `StderrHandler` shows them on a terminal, in a line
# that the next record replaces; it leaves them out of files and pipes.
PASSING = 15
logging.addLevelName(PASSING, "PASSING")

_ERASE = "\r\x1b[2K"
_MARK = re.compile(r"- |\d+\. |\S.{0,10}?  +| +")  # of a list, or a label: before a line's text
_SHARE_SECONDS = 0.2  # between two log lines of a `Share`
_shown: list[str] = []  # the line of `passing` that is on the terminal, if any


def say(console: "Console", text: str) -> None:
    """Print text without markup; lines are wrapped at words on a terminal, not in a file."""
    text = _filled(text, console.width) if console.is_terminal else text
    console.print(text, markup=False, soft_wrap=True)


_MEASURED = {
    "loss": "loss {:.4f}",
    "accuracy": "accuracy {:.1%}",
    "perplexity": "perplexity {:.4g}",
    "grad_norm": "grad {:.3g}",
    "reward": "reward {:.4g}",
    "rewards/accuracies": "preferred {:.1%}",
    "rewards/margins": "margin {:.4g}",
    "lr": "lr {:.3g}",
    "tokens_per_second": "{:,.0f} tok/s",
    "model_tflops": "{:.3g} TFLOPS",
    "mfu": "MFU {:.1%}",
}


def measured(record: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The measurements of a step or an evaluation (`prefix` eval_) as short texts."""
    values = {text: record.get(f"{prefix}{name}") for name, text in _MEASURED.items()}
    return [text.format(value) for text, value in values.items() if value is not None]


def describe_step(record: Mapping[str, Any]) -> str:
    """The measurements of a step (a line of `metrics.jsonl`) as one line of text."""
    memory = {"device": record.get("device_peak_bytes"), "host": record["host_bytes"]}
    used = [f"{place} {gib(num_bytes)}" for place, num_bytes in memory.items() if num_bytes]
    return "  ".join([*measured(record), *used])


class TrainingProgress:
    """Shows the steps of a run: in one line on a terminal, as many lines in files and pipes."""

    def __init__(
        self, total_steps: int, log_every: int, console: "Console | None" = None, *, done: int = 0
    ) -> None:
        """Args: `done`: steps that earlier processes have taken."""
        from rich.console import Console  # engines work without it

        self._console = console or Console(highlight=False)
        self._total, self._before, self._log_every = total_steps, done, log_every
        self._in_place = self._console.is_terminal and sys.stderr.isatty()

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        end_passing()

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a finished step; `record["step"]` counts from 1."""
        done = int(record["step"])
        if "skipped" in record:
            self.say(f"step {done}/{self._total}  left out: {record['skipped']}")
            return
        # The elapsed time includes evaluations, and so does the estimate.
        elapsed = time.monotonic() - self._started
        eta = duration(elapsed / (done - self._before) * (self._total - done))
        if self._in_place:
            passing(f"step {done}/{self._total}  ETA {eta}  {describe_step(record)}")
        elif done == self._before + 1 or done % self._log_every == 0 or done == self._total:
            self.say(f"step {done}/{self._total}  {describe_step(record)}  ETA {eta}")

    def say(self, text: str) -> None:
        """Print a line that stays. On a full disk, or without a reader, only the line is lost."""
        end_passing()
        with suppress(OSError, SystemExit):  # rich exits the program if the reader has ended
            say(self._console, text)


def wrapped(text: str) -> str:
    """A text for stderr: wrapped at words for a terminal, unchanged for a file or a pipe."""
    if not sys.stderr.isatty():
        return text
    return _filled(text, _columns())


def _filled(text: str, width: int) -> str:
    """Lines wrapped at words; what follows a line begins below its text, not below its mark."""

    def fill(line: str) -> str:
        mark = _MARK.match(line)
        indent = " " * (mark.end() if mark else 0)
        filler = textwrap.TextWrapper(
            width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        return filler.fill(line)

    return "\n".join(map(fill, text.split("\n")))


def passing(text: str) -> None:
    """Show the current work on a terminal, in place of the last line of this function.

    Only rank 0 shows anything. Nothing is written to a file or a pipe.
    """
    can_erase = os.environ.get("TERM") != "dumb"
    with suppress(OSError, ValueError, AttributeError):  # stderr is missing or closed
        if can_erase and os.environ.get("RANK", "0") == "0" and sys.stderr.isatty():
            _shown[:] = [text]
            print(f"{_ERASE}{_cut(text, _columns() - 1)}", end="", file=sys.stderr, flush=True)


def _cut(text: str, width: int) -> str:
    """The first parts of a line, separated by two spaces, that fit into `width`."""
    while len(text) > width and "  " in text:
        text = text.rpartition("  ")[0]
    return text[:width]


def end_passing() -> None:
    """Erase the line that `passing` has shown, if any, before other text is written."""
    if _shown:
        _shown.clear()
        with suppress(OSError, ValueError, AttributeError):
            print(_ERASE, end="", file=sys.stderr, flush=True)


def _columns() -> int:
    """The width of stderr's terminal; stdout may be a file."""
    with suppress(OSError):  # stderr is no terminal, but an IDE's or a test's
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
        except Exception:  # as in all handlers: logging never ends a run
            self.handleError(record)


class Share:
    """Logs at the level PASSING the percentage of work that is done; any thread may call it."""

    def __init__(self, log: logging.Logger, what: str, whole: int) -> None:
        self._log, self._what, self._whole = log, what, whole
        self._done, self._logged_at, self._lock = 0, 0.0, Lock()

    def add(self, part: int) -> None:
        """Count `part` of the whole as done."""
        with self._lock:
            self._done += part
            time_now = time.monotonic()
            if time_now - self._logged_at >= _SHARE_SECONDS:
                self._logged_at = time_now
                self._log.log(PASSING, "%s: %.0f %%", self._what, 100 * self._done / self._whole)
