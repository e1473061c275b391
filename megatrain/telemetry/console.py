"""Progress for people."""

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from rich.console import Console

from megatrain.base.units import duration, gib
from megatrain.telemetry.log import end_passing, passing


def say(console: Console, text: str) -> None:
    """Print text without markup; lines are wrapped at words on a terminal, not in a file."""
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


def described_rewards(record: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The measurements of a loss of replies, in few words; empty for other losses."""
    if (reward := record.get(f"{prefix}reward")) is not None:
        return [f"reward {reward:.4g}"]
    forms = {"accuracies": "preferred {:.1%}", "margins": "margin {:.4g}"}
    values = {form: record.get(f"{prefix}rewards/{name}") for name, form in forms.items()}
    return [form.format(value) for form, value in values.items() if value is not None]


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
    """Shows the steps of one run: in place on a terminal, as lines anywhere else."""

    def __init__(
        self, total_steps: int, log_every: int, console: Console | None = None, *, done: int = 0
    ) -> None:
        """Args: `done`: steps that earlier processes have taken."""
        self._console = console or Console(highlight=False)
        self._total, self._before, self._log_every = total_steps, done, log_every
        self._in_place = self._console.is_terminal and sys.stderr.isatty()
        self._started = time.monotonic()

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
        # Evaluations are part of the elapsed time, so the estimate counts those to come.
        elapsed = time.monotonic() - self._started
        eta = duration(elapsed / (done - self._before) * (self._total - done))
        if self._in_place:
            passing(f"step {done}/{self._total}  ETA {eta}  {describe_step(record)}")
        elif done == self._before + 1 or done % self._log_every == 0 or done == self._total:
            self.say(f"step {done}/{self._total}  {describe_step(record)}  ETA {eta}")

    def say(self, text: str) -> None:
        """Print a line that stays; a full disk or a reader that went away only loses the line."""
        end_passing()
        with suppress(OSError, SystemExit):  # rich ends the program when nobody reads any more
            say(self._console, text)
