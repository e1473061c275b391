"""The process of one row: `python -m benchmarks.rivals.child TASK OUTCOME`, both JSON files.

It writes what was measured, or why nothing was, and always exits with 0; the caller judges a
process that ends otherwise.
"""

import importlib
import importlib.util
import json
import re
import sys
import time
import traceback
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.rivals.case import (
    FAILED,
    MEASURED,
    NO_DEVICE_MEMORY,
    NO_HOST_MEMORY,
    NO_PACKAGE,
    Task,
    rival,
)
from benchmarks.rivals.common import Runner, random_tokens, torch_device
from megatrain.cli.models import SHAPES
from megatrain.errors import DoesNotFit
from megatrain.telemetry.host import environment

LEAST_STEPS = 3  # measured, where time is too short for all
REASON_CHARACTERS = 300

_HOST_MEMORY = ("DefaultCPUAllocator", "Cannot allocate memory", "CUDA error: out of memory")


def main() -> None:
    """Do the task in the first argument's file, write the outcome to the second's."""
    # Where host memory runs out the system ends this process, not its caller, if it lets us choose.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    task_file, outcome_file = map(Path, sys.argv[1:])
    task = Task.from_dict(json.loads(task_file.read_text(encoding="utf-8")))
    ends_at = time.monotonic() + task.seconds
    known = surroundings(task)
    outcome_file.write_text(json.dumps(known), encoding="utf-8")  # should this process be killed
    outcome_file.write_text(json.dumps({**known, **outcome_of(task, ends_at)}), encoding="utf-8")


def surroundings(task: Task) -> dict[str, Any]:
    """The machine, and the version of the rival's package."""
    package = rival(task.rival).package
    installed = package is not None and importlib.util.find_spec(package) is not None
    return {
        "environment": environment(str(torch_device(task.case))),
        "version": metadata.version(package) if package and installed else None,
    }


def outcome_of(task: Task, ends_at: float) -> dict[str, Any]:
    """`status`, and what was measured or the `reason` why not."""
    who = rival(task.rival)
    if who.package is not None and importlib.util.find_spec(who.package) is None:
        return {"status": NO_PACKAGE, "reason": f"{who.package} is not installed"}
    try:
        module = importlib.import_module(f"benchmarks.rivals.{who.module}")
        if who.module == "own":
            return {"status": MEASURED, **module.measure(task)}
        return {"status": MEASURED, **measure(task, module.build(task), ends_at)}
    except Exception as error:
        traceback.print_exc()
        return failure(error)


def measure(task: Task, runner: Runner, ends_at: float) -> dict[str, Any]:
    """Run the steps; fewer than asked for, but no less than LEAST_STEPS, when time gets short."""
    cuda = torch_device(task.case).type == "cuda"
    started = time.perf_counter()
    times: list[float] = []
    losses: list[float] = []
    peak = 0
    for index in range(task.warmup + task.case.steps):
        enough = len(times) >= task.warmup + LEAST_STEPS
        if enough and time.monotonic() + 1.5 * times[-1] > ends_at:
            break
        ids = random_tokens(task.case, SHAPES[task.case.shape][5], task.rows, index)
        started = time.perf_counter()
        losses.append(runner.step(ids))
        if cuda:
            torch.cuda.synchronize()
            peak = max(peak, torch.cuda.max_memory_reserved())  # a rival may reset it
        times.append(time.perf_counter() - started)
        print(f"step {index}: {times[-1]:.3f} s, loss {losses[-1]:.4f}", flush=True)
    return {
        "parameters": runner.num_parameters,
        "trained_parameters": runner.num_trained or runner.num_parameters,
        "step_seconds": times,
        "losses": losses,
        "device_peak_bytes": peak,
        "settings": runner.settings,
        "report": runner.report(),
    }


def failure(error: BaseException) -> dict[str, Any]:
    """Status and reason, the most telling line of the error without any folder of this machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    reason = re.sub(r"(?:/[\w.@+-]+)+/", "", text)[:REASON_CHARACTERS]
    return {"status": _status(error), "reason": reason}


def _status(error: BaseException) -> str:
    """A failed allocation on the device has a type; one of pinned memory is any CUDA error."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return NO_DEVICE_MEMORY
    if isinstance(error, DoesNotFit):
        return NO_DEVICE_MEMORY if "device memory" in text else NO_HOST_MEMORY
    if isinstance(error, MemoryError) or any(words in text for words in _HOST_MEMORY):
        return NO_HOST_MEMORY
    return FAILED


if __name__ == "__main__":
    main()
