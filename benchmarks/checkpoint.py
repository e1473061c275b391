"""`python -m benchmarks.checkpoint`: what a save costs a training that goes on meanwhile.

    python -m benchmarks.checkpoint --shape 7b --folder /scratch/saves --output saves.json

Two checkpoints of 12 bytes a parameter each are written to the folder, which must be new.
"""

import argparse
import logging
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.options import peak_process_bytes, write
from benchmarks.step import StepCase, build_engine, parse_placement, random_step
from megatrain.api import Engine
from megatrain.base.units import gib
from megatrain.checkpoint import Saving, rotate
from megatrain.cli.models import SHAPES
from megatrain.errors import InputError
from megatrain.telemetry.host import commit, environment

_log = logging.getLogger(__name__)

SETTLING_STEPS = 2  # after a save has ended, and still counted as its cost
RESUMED_STEPS = 2  # the second one's loss depends on moments, too


def measure_saves(
    case: StepCase, folder: Path, every: int, saves: int, *, resume: bool
) -> dict[str, Any]:
    """Steps without saves, then saves with steps until they have ended, then a resume.

    Args:
        case: `steps` of it are measured without a save.
        folder: where two checkpoints fit; made, and removed at the end.
        every: steps between two saves, of the run that the loss of throughput is told for.
        resume: save once more, load that and compare the steps that follow.

    Returns:
        Plain JSON values. A save's `lost_seconds` is how much longer the steps took from its call
        until two steps after its end than as many median steps without a save. The loss that is
        told is that of the saves after the first, which also takes the memory that all of them use.
    """
    with _folder(folder):
        engine = build_engine(case)
        try:
            run = _Run(engine, case)
            for _ in range(case.warmup):
                run.step()
            plain = [run.step() for _ in range(case.steps)]
            median = statistics.median(plain)
            _log.info("%d steps without saves: %.2f s each", len(plain), median)
            measured = [run.save(folder / f"save-{n}", median) for n in range(saves)]
            result = _described(case, engine, plain, measured, every)
            if not resume:
                return result
            last = run.number
            engine.save(folder / "last")
            wanted = [run.loss() for _ in range(RESUMED_STEPS)]
        finally:
            engine.close()
        del engine, run
        _log.info("loading the last checkpoint...")
        return result | {"resume": _resume(case, folder / "last", last, wanted)}


@contextmanager
def _folder(folder: Path) -> Iterator[None]:
    if folder.exists():
        raise InputError(f"{folder}: is there already; give a new folder for the checkpoints")
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder)


class _Run:
    """Steps of random tokens, counted."""

    def __init__(self, engine: Engine, case: StepCase, number: int = 0) -> None:
        self._engine, self._case, self.number = engine, case, number

    def loss(self) -> float:
        """The loss of one more step."""
        vocab_size, seed = self._engine.config.vocab_size, self._case.seed + self.number
        self.number += 1
        return float(self._engine.step(random_step(self._case, vocab_size, seed)).loss)

    def step(self) -> float:
        """The seconds of one more step."""
        started = time.perf_counter()
        self.loss()
        return time.perf_counter() - started

    def save(self, folder: Path, median: float) -> dict[str, Any]:
        """A save in the background, with steps until it has ended and settled."""
        started = time.perf_counter()
        saving = self._engine.save(folder, wait=False)
        call_seconds = time.perf_counter() - started
        times: list[float] = []
        while not saving.done:
            times.append(self.step())
        during = len(times)
        times += [self.step() for _ in range(SETTLING_STEPS)]
        saving.wait()
        _log.info("a save of %s: %.1f s, %d steps", gib(saving.num_bytes), saving.seconds, during)
        rotate(folder.parent, 1)
        return _save_result(saving, times, during, median) | {"call_seconds": call_seconds}


def _save_result(saving: Saving, times: list[float], during: int, median: float) -> dict[str, Any]:
    assert saving.seconds is not None
    return {
        "seconds": saving.seconds,
        "bytes": saving.num_bytes,
        "gb_per_second": saving.num_bytes / saving.seconds / 1e9,
        "moved_bytes": saving.snapshot.moved_bytes,
        "steps_during": during,
        "step_seconds": times,
        "lost_seconds": sum(times) - len(times) * median,
    }


def _described(
    case: StepCase,
    engine: Engine,
    plain: list[float],
    saves: list[dict[str, Any]],
    every: int,
) -> dict[str, Any]:
    median = statistics.median(plain)
    first, *later = [each["lost_seconds"] + each["call_seconds"] for each in saves]
    lost = statistics.mean(later or [first])
    return {
        "benchmark": "checkpoint",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "case": asdict(case),
        "placement": engine.placement.as_dict(),
        "parameters": engine.num_parameters,
        "tokens_per_step": case.sequences * case.sequence_length,
        "plain_step_seconds": plain,
        "median_seconds": median,
        "min_seconds": min(plain),
        "max_seconds": max(plain),
        "count": len(plain),
        "saves": saves,
        "mean_save_seconds": statistics.mean(each["seconds"] for each in saves),
        "first_lost_seconds": first,
        "mean_lost_seconds": lost,
        "every": every,
        "lost_share": lost / (every * median + lost),
        "memory": engine.memory(),
        "host_peak_bytes": peak_process_bytes(),
        "environment": environment(str(engine.device.torch_device)),
    }


def _resume(case: StepCase, folder: Path, number: int, wanted: list[float]) -> dict[str, Any]:
    """Load the last checkpoint and compare the losses of the steps that follow."""
    started = time.perf_counter()
    device = None if case.device == "auto" else case.device
    with Engine.load(folder, device=device) as engine:
        seconds = time.perf_counter() - started
        run = _Run(engine, case, number)
        losses = [run.loss() for _ in range(len(wanted))]
    return {
        "load_seconds": seconds,
        "losses": losses,
        "uninterrupted_losses": wanted,
        "same": losses == wanted,
    }


def summary(result: dict[str, Any]) -> str:
    """The result in a few lines, for people."""
    saves = result["saves"]
    moved = max(each["moved_bytes"] for each in saves)
    return (
        f"{result['case']['shape']}, {result['tokens_per_step']} tokens a step: "
        f"{result['median_seconds']:.3f} s without saves; a save of {gib(saves[0]['bytes'])} takes "
        f"{result['mean_save_seconds']:.1f} s ({saves[-1]['gb_per_second']:.2f} GB/s), "
        f"{gib(moved)} of it moved out of the updates' way, and costs "
        f"{result['mean_lost_seconds']:.2f} s: {result['lost_share']:.2%} of the throughput with "
        f"one every {result['every']} steps; the first costs {result['first_lost_seconds']:.2f} s\n"
        f"host memory for saves {gib(result['memory']['host_checkpoint_bytes'])}"
        + (_resumed(result["resume"]) if "resume" in result else "")
    )


def _resumed(resume: dict[str, Any]) -> str:
    went_on = "bit for bit" if resume["same"] else f"DIFFERENTLY: {resume}"
    return f"; loaded in {resume['load_seconds']:.1f} s, and went on {went_on}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = vars(_parser().parse_args(arguments))
    folder, output = options.pop("folder"), options.pop("output")
    every, saves, resume = (options.pop(name) for name in ("every", "saves", "resume"))
    case = StepCase(**options | {"placement": parse_placement(options["placement"])})
    result = measure_saves(case, folder, every, saves, resume=resume)
    print(summary(result))
    write(output, result)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", choices=SHAPES, required=True, help="size of Qwen2.5")
    add("--folder", type=Path, required=True, help="for two checkpoints; must be new")
    add("--sequences", type=int, default=96, help="rows of one optimizer step")
    add("--sequence-length", type=int, default=1024, help="tokens of a row")
    add("--micro-batch", type=int, default=16, help="rows of a micro-batch")
    add("--max-grad-norm", type=_norm, default=1.0, help="0: no clipping")
    add("--precision", choices=("bf16", "fp32"), default="bf16")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    add("--placement", action="append", default=[], metavar="NAME=VALUE")
    add("--layers", type=int, help="only so many layers")
    add("--warmup", type=int, default=4, help="steps before the measured ones")
    add("--steps", type=int, default=5, help="measured steps without saves")
    add("--saves", type=int, default=2, help="measured saves")
    add("--every", type=int, default=50, help="tell the loss for a save every N steps")
    add("--no-resume", dest="resume", action="store_false", help="load no checkpoint at the end")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="write the result to this file")
    return parser


def _norm(text: str) -> float | None:
    return float(text) or None


if __name__ == "__main__":
    main()
