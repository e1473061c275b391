"""Progress for people: a live bar on a terminal, plain lines anywhere else."""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from megatrain.base.units import duration, gib


def say(console: Console, text: str) -> None:
    """Print text as it is; a terminal's lines are wrapped at words, a file's are not."""
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


def described_rewards(record: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What a loss of replies measures, in few words; nothing of other losses."""
    found = {name: record.get(f"{prefix}rewards/{name}") for name in ("accuracies", "margins")}
    said = {"accuracies": "preferred {:.1%}", "margins": "margin {:.4g}"}
    if (reward := record.get(f"{prefix}reward")) is not None:
        return [f"reward {reward:.4g}"]
    return [said[name].format(value) for name, value in found.items() if value is not None]


def describe_step(record: Mapping[str, Any]) -> str:
    """The measurements of one step (a line of `metrics.jsonl`) in one line."""
    parts = [f"loss {record['loss']:.4f}"]
    if record.get("grad_norm") is not None:
        parts.append(f"grad {record['grad_norm']:.3g}")
    parts += described_rewards(record)
    parts.append(f"lr {record['lr']:.3g}")
    parts.append(f"{record['tokens_per_second']:,.0f} tok/s")
    parts.append(f"{record['model_tflops']:.3g} TFLOPS")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    if record.get("device_peak_bytes"):
        parts.append(f"device {gib(record['device_peak_bytes'])}")
    parts.append(f"host {gib(record['host_bytes'])}")
    return "  ".join(parts)


class TrainingProgress:
    """Shows the steps of one run; a context manager, so that the terminal is always restored."""

    def __init__(
        self, total_steps: int, log_every: int, console: Console | None = None, *, done: int = 0
    ) -> None:
        """Args: `done` steps that an earlier process has taken."""
        self._console = console or Console(highlight=False)
        self._total, self._before = total_steps, done
        self._log_every = log_every
        self._started = time.monotonic()
        self._bar = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("ETA {task.fields[eta]}"),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("steps", total=total_steps, eta="?")
        self._live = Live(console=self._console, transient=True)

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError, SystemExit):  # the terminal is closed
            self._live.stop()

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a finished step; `record["step"]` counts from 1."""
        done = int(record["step"])
        if "skipped" in record:
            self.say(f"step {done}/{self._total}  left out: {record['skipped']}")
            return
        eta = self._eta(done)
        text = describe_step(record)
        if self._live.is_started:
            self._bar.update(self._task, completed=done, eta=eta)
            self._live.update(Group(self._bar, Text(text)))
        elif done == self._before + 1 or done % self._log_every == 0 or done == self._total:
            self.say(f"step {done}/{self._total}  {text}  ETA {eta}")

    def say(self, text: str) -> None:
        """Print a line that stays; a full disk or a reader that went away cost it, not the run."""
        with suppress(OSError, SystemExit):  # rich ends the program when nobody reads any more
            say(self._console, text)

    def _eta(self, done: int) -> str:
        # Evaluations are part of the elapsed time, so the estimate counts those to come.
        elapsed = time.monotonic() - self._started
        return duration(elapsed / (done - self._before) * (self._total - done))
