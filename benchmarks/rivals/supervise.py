"""Processes under a time limit, with an eye on their memory while they run."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rivals.case import (
    FAILED,
    NO_DEVICE_MEMORY,
    NO_HOST_MEMORY,
    NO_TIME,
    Task,
)
from megatrain.telemetry.host import ProcessTree

LOOKS_PER_SECOND = 20
SHOWN_LINES = 25  # of a failed process's output
_CHILD = (sys.executable, "-m", "benchmarks.rivals.child")


class PeakMemory(threading.Thread):
    """The largest memory of a process and its children so far, in bytes; what they pin counts.

    A driver's pinned memory is resident in the process that asked for it: 4 GiB pinned by torch
    made 4 GiB (H200, driver 580).
    """

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self._tree = ProcessTree(process)
        self._over = threading.Event()
        self.bytes = 0

    def run(self) -> None:
        with suppress(psutil.NoSuchProcess):  # it has ended
            while not self._over.is_set():
                self.bytes = max(self.bytes, self._tree.num_bytes())
                self._over.wait(1 / LOOKS_PER_SECOND)

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self.bytes


def run(task: Task, command: Sequence[str] = _CHILD) -> dict[str, Any]:
    """The outcome of one process: `status`, `host_peak_bytes`, and what it wrote."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps(task.as_dict()), encoding="utf-8")
        arguments = [*command, str(folder / "task.json"), str(folder / "outcome.json")]
        with (folder / "log").open("w+", encoding="utf-8", errors="replace") as log:
            code, peak_bytes = _run_limited(arguments, task.seconds, log)
        outcome: dict[str, Any] = {"host_peak_bytes": peak_bytes}
        written = folder / "outcome.json"
        if written.exists():
            outcome |= json.loads(written.read_text(encoding="utf-8"))
        if code != 0:
            outcome |= _abrupt_end(code, task.seconds)
        if "reason" in outcome:
            lines = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
            print("\n".join(f"    | {line}" for line in lines[-SHOWN_LINES:]))
        return outcome


def _run_limited(arguments: Sequence[str], seconds: float, log: Any) -> tuple[int | None, int]:
    """Exit code (None: the time was up) and peak memory. Leaves no process of the row behind."""
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=_environment(),
        start_new_session=True,
    )
    memory = PeakMemory(process.pid)
    memory.start()
    try:
        return process.wait(seconds), memory.stop()
    except subprocess.TimeoutExpired:
        return None, memory.stop()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment() -> dict[str, str]:
    """What all rivals get; tools of this Python (ninja) are found, whatever the caller's PATH."""
    tools = str(Path(sys.executable).parent)
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        **os.environ,
        "PATH": os.pathsep.join([tools, os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
    }


def _abrupt_end(code: int | None, seconds: float) -> dict[str, Any]:
    if code is None:
        return {"status": NO_TIME, "reason": f"not done after {seconds:.0f} s"}
    if code == -signal.SIGKILL:
        return {"status": NO_HOST_MEMORY, "reason": "killed by the system"}
    if code < 0:
        return {"status": FAILED, "reason": f"ended by {signal.Signals(-code).name}"}
    return {"status": FAILED, "reason": f"exit code {code}"}


def run_fitting(task: Task, command: Sequence[str] = _CHILD) -> dict[str, Any]:
    """`run` with half the micro-batch as long as the device's memory is too small for it.

    `attempts` holds those that were too large, `micro_batch` is that of the outcome.
    """
    attempts: list[dict[str, Any]] = []
    while True:
        outcome = {"micro_batch": task.micro_batch, "attempts": attempts, **run(task, command)}
        if outcome["status"] != NO_DEVICE_MEMORY or task.micro_batch in (None, 1):
            return outcome
        attempts = [
            *attempts,
            {"micro_batch": task.micro_batch, "reason": outcome["reason"]},
        ]
        task = Task.from_dict({**task.as_dict(), "micro_batch": task.micro_batch // 2})


@contextmanager
def only(device_memory_bytes: int | None, device: str) -> Iterator[None]:
    """Leave other processes no more of the device than this, by holding the rest of it."""
    if device_memory_bytes is None:
        yield
        return
    module = "benchmarks.rivals.ballast"
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(device_memory_bytes), device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline().strip() != "held":
            raise RuntimeError("the rest of the device's memory could not be held")
        yield
    finally:
        process.stdin.close()
        process.wait(60)
