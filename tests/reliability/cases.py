"""Toy runs in processes of their own, and what two runs have in common."""

import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.checkpoint import verify
from megatrain.cli import main
from tests.cli.cases import leave_out, records, write_run_file
from tests.forks import start
from tests.refusals import table

# What of a line of `metrics.jsonl` follows from the run alone; times and memory do not.
EXACT = ("step", "epoch", "loss", "grad_norm", "lr", "tokens", "eval_loss", "skipped")

PLANTED = table(__file__, "planted.yaml")
AT_STEP = PLANTED["at step"]


class Run:
    """One process of a run."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self._log = pid, log

    @property
    def output(self) -> str:
        """What it has printed, on both streams."""
        return self._log.read_text() if self._log.exists() else ""

    def until(self, text: str, seconds: float = 240) -> None:
        """Wait until it has printed `text`."""
        end = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < end, f"no {text!r} in:\n{self.output}"
            time.sleep(0.005)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, or the negative number of the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def finish(self) -> str:
        """Wait for a good end; its output."""
        code = self.wait()
        assert code == 0, f"exit code {code}:\n{self.output}"
        return self.output

    def refused(self, *texts: str, code: int = 2) -> None:
        """Wait for an end with `code` and one line of error, with these texts in the output."""
        assert self.wait() == code, self.output
        assert not [text for text in texts if text not in self.output], self.output
        assert self.output.count("megatrain: error:") == 1, self.output


def start_run(*arguments: Any, log: Path, before: str = "", **environment: str) -> Run:
    """Start `megatrain *arguments`, a fork of this process: that takes a tenth of a second.

    Args: `log`: gets its output; `before`: Python that it does first.
    """

    def command() -> None:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream, source in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(source, stream)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
        logging.root.handlers.clear()  # those of pytest
        os.environ.update(environment)
        sys.argv = ["megatrain", *map(str, arguments)]
        leave_out(setattr)
        exec(before, {})
        main()

    return Run(start(command), log)


def toy_run(folder: Path, tokenizer: Path, **overrides: Any) -> Path:
    """A run file of `folder`; overrides are written `section__key=value`."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_run_file(folder, tokenizer, output__log_every=1, **overrides)


def logged(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log, of each what must repeat."""
    return [{key: line[key] for key in EXACT if key in line} for line in records(run)]


def model_bytes(run: Path) -> bytes:
    """The finished model's weights, to the last bit."""
    return (run / "model" / "model.safetensors").read_bytes()


def checkpoint_steps(run: Path) -> list[int]:
    """The checkpoints of a run by their names."""
    found = (run / "checkpoints").glob("step-*") if (run / "checkpoints").exists() else ()
    return sorted(int(path.name.removeprefix("step-")) for path in found)


def assert_same_state(first: Path, second: Path) -> None:
    """Two checkpoints, verified to the last byte, hold the same state of engine and run.

    They may be of other placements.
    """
    ours, others = verify(first), verify(second)
    assert replace(ours.settings, placement=others.settings.placement) == others.settings
    for name in ("step", "data", "refusals"):
        assert ours.extra[name] == others.extra[name]
    for tile in (tile for tile in ours.manifest.tiles if tile.parameters):
        assert (first / tile.file).read_bytes() == (second / tile.file).read_bytes(), tile.name
