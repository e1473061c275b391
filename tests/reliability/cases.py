"""Toy runs in processes of their own, and what two runs have in common."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from megatrain.checkpoint import verify
from megatrain.telemetry.metrics import read_metrics
from tests.cli.cases import write_run_file

ROOT = Path(__file__).parents[2]

# What of a line of `metrics.jsonl` follows from the run alone; times and memory do not.
EXACT = ("step", "epoch", "loss", "grad_norm", "lr", "tokens", "eval_loss", "skipped")

# Python done before a run: at the beginning of each step, it calls `at(number)`.
AT_STEP = """
import megatrain.train.steps as steps
take = steps.Steps.take
def counted(self):
    at(self.done + 1)
    return take(self)
steps.Steps.take = counted
"""


class Zygote:
    """Hands out toy runs as processes; see zygote.py."""

    def __init__(self) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop("PYTHONUNBUFFERED", None)  # a user's output is buffered
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.reliability.zygote"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip

    def start(self, *arguments: Any, log: Path, before: str = "", **environment: str) -> "Run":
        """`megatrain *arguments`, its output in `log`; `before` is Python done in the process."""
        request = {
            "start": [str(argument) for argument in arguments],
            "log": str(log),
            "before": before,
            "environment": environment,
        }
        return Run(self, self._ask(request), log)

    def _ask(self, request: dict) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def wait(self, pid: int) -> int:
        return self._ask({"wait": pid})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Run:
    """One process of a run."""

    def __init__(self, zygote: Zygote, pid: int, log: Path) -> None:
        self._zygote, self.pid, self._log = zygote, pid, log

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

    def signal_if_there(self, number: signal.Signals) -> None:
        """Send a signal to a process that may have ended (its id is its own until `wait`)."""
        with suppress(ProcessLookupError):
            self.send(number)

    def wait(self) -> int:
        """Its exit code, or the negative number of the signal that ended it."""
        return self._zygote.wait(self.pid)

    def finish(self) -> str:
        """Wait for a good end; its output."""
        code = self.wait()
        assert code == 0, f"exit code {code}:\n{self.output}"
        return self.output


def toy_run(folder: Path, tokenizer: Path, **overrides: Any) -> Path:
    """A run file of `folder`; overrides are written `section__key=value`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = write_run_file(folder, tokenizer)
    tree = yaml.safe_load(path.read_text())
    tree["output"]["log_every"] = 1
    for name, value in overrides.items():
        section, key = name.split("__")
        tree.setdefault(section, {})[key] = value
    path.write_text(yaml.safe_dump(tree))
    return path


def logged(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log, of each what must repeat."""
    records = read_metrics(run / "metrics.jsonl")
    return [{key: record[key] for key in EXACT if key in record} for record in records]


def model_bytes(run: Path) -> bytes:
    """The finished model's weights, to the last bit."""
    return (run / "model" / "model.safetensors").read_bytes()


def checkpoint_steps(run: Path) -> list[int]:
    """The checkpoints of a run by their names."""
    found = (run / "checkpoints").glob("step-*") if (run / "checkpoints").exists() else ()
    return sorted(int(path.name.removeprefix("step-")) for path in found)


def assert_same_state(first: Path, second: Path) -> None:
    """Two checkpoints, verified to the last byte, hold the same state of engine and run."""
    ours, others = verify(first), verify(second)
    assert ours.settings == others.settings
    for name in ("step", "data", "refusals"):
        assert ours.extra[name] == others.extra[name]
    for tile in (tile for tile in ours.manifest.tiles if tile.parameters):
        assert (first / tile.file).read_bytes() == (second / tile.file).read_bytes(), tile.name
