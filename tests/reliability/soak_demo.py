"""The demo at full speed for minutes, saved every few seconds, stopped, resumed, and watched.

`python -m tests.reliability.soak_demo --device cuda --minutes 8 --runs 3`: each run is a real
command that SIGTERM ends after its minutes; the next one resumes it. Memory of host and device,
threads and open files must not grow within a run, nor from one to the next. What was seen is kept
in the folder: a later call with the same `--folder` goes on there, where a machine is lent for one
run at a time.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatrain.checkpoint import verify
from megatrain.cli.demo import write_corpus_and_tokenizer
from megatrain.telemetry.gpu import gpu_state
from megatrain.telemetry.host import environment
from megatrain.telemetry.metrics import read_metrics
from tests.cli.cases import sets
from tests.reliability.cases import ROOT, checkpoint_steps
from tests.reliability.soak import MIB, MORE, check_flat, early_and_late, last_step, usage

SAVE_SECONDS = 5
GROWTH = MORE | {"device": 32 * MIB}
UNITS = {"memory": (MIB, "MiB"), "device": (MIB, "MiB"), "threads": (1, ""), "files": (1, "")}


def start(run: Path, device: str) -> subprocess.Popen:
    """The demo without an end, at a rate that it stands for ever; only signals make it save."""
    choices = sets(
        training__steps=10**7,
        optimizer__lr=1e-3,
        schedule__name="constant_with_warmup",
        engine__device=device,
        engine__precision="fp32" if device == "cpu" else "bf16",
        optimizer__ns_precision="fp32" if device == "cpu" else "bf16",
        checkpoint__every=None,
        output__folder=str(run),
        output__log_every=1000,
    )
    command = [sys.executable, "-m", "megatrain", "train", "examples/demo.yaml", "--resume"]
    return subprocess.Popen([*command, *choices], cwd=ROOT)


def one_run(run: Path, device: str, seconds: float) -> dict[str, Any]:
    """Raises AssertionError where something grew, or a step was lost."""
    log = run / "metrics.jsonl"
    before = max(checkpoint_steps(run), default=0)
    process = start(run, device)
    while process.poll() is None and (not log.exists() or last_step(log) <= before):
        time.sleep(0.2)
    first_save(run, process, before)  # it takes what all saves need: threads, rooms
    started, seen, saved = time.monotonic(), [], {before}
    due = started + SAVE_SECONDS
    while process.poll() is None and time.monotonic() < started + seconds:
        state = None if device == "cpu" else gpu_state(device)
        device_bytes = 0 if device == "cpu" else state and state.used_bytes
        assert device_bytes is not None, "nvidia-ml-py is not installed"
        seen.append(usage(process.pid) | {"device": device_bytes})
        saved |= set(checkpoint_steps(run))
        if time.monotonic() > due:
            process.send_signal(signal.SIGUSR1)
            due += SAVE_SECONDS
        time.sleep(min(1, seconds / 100))
    took = time.monotonic() - started
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    check_flat(seen, GROWTH)
    assert len(saved) > seconds / (4 * SAVE_SECONDS), f"only {len(saved) - 1} saves"
    newest = max(checkpoint_steps(run))
    verify(run / "checkpoints" / f"step-{newest:08d}")
    steps = [record["step"] for record in read_metrics(log) if "loss" in record]
    assert steps == list(range(1, newest + 1)), "the log has gaps"
    kinds = {name: [s[name] for s in seen] for name in GROWTH}
    return {
        "steps": [before + 1, newest],
        "seconds": round(took, 1),
        "saves": len(saved - {before}),
        **{name: [*early_and_late(values), max(values)] for name, values in kinds.items()},
    }


def first_save(run: Path, process: subprocess.Popen, before: int) -> None:
    """Ask for a checkpoint until there is one: a compiler at work may swallow the signal."""
    due = time.monotonic() + 60
    while process.poll() is None and max(checkpoint_steps(run), default=0) <= before:
        assert time.monotonic() < due, "no checkpoint a minute after it was asked for"
        process.send_signal(signal.SIGUSR1)
        time.sleep(1)


def check_runs(runs: list[dict[str, Any]]) -> None:
    """A resumed run takes no more than the one before it."""
    for first, second in pairwise(runs):
        for name, more in GROWTH.items():
            assert second[name][1] <= first[name][1] + more, f"{name} grew from run to run"


def table(runs: list[dict[str, Any]]) -> str:
    """Of each run what it did, and what it took: early, late, at most."""
    lines = []
    for number, run in enumerate(runs, 1):
        first, last = run["steps"]
        rate = (last - first + 1) / run["seconds"]
        lines.append(
            f"run {number}: steps {first} to {last}, {rate:.1f}/s for {run['seconds']:.0f} s, "
            f"{run['saves']} saves"
        )
        for name, (size, unit) in UNITS.items():
            early, late, most = (value / size for value in run[name])
            lines.append(f"  {name:<8}{early:>10.0f}{late:>10.0f}{most:>10.0f} {unit}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "soak-demo")
    asked = parser.parse_args()
    write_corpus_and_tokenizer()
    kept = asked.folder / "soak.json"
    result = json.loads(kept.read_text()) if kept.exists() else {"runs": []}
    for _ in range(asked.runs):
        result["runs"].append(one_run(asked.folder / "run", asked.device, 60 * asked.minutes))
        result |= {"save_seconds": SAVE_SECONDS, "environment": environment(asked.device)}
        kept.write_text(json.dumps(result, indent=2) + "\n")
        print(table(result["runs"]), flush=True)
    check_runs(result["runs"])
    print(f"flat: {kept}")


if __name__ == "__main__":
    main()
