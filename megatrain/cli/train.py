"""`megatrain train`: trains by a run file, or resumes a run from its folder."""

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.run_folder.layout import MODEL, load_run
from megatrain.telemetry.console import end_passing
from megatrain.train.signals import Signals, Stopped

if TYPE_CHECKING:
    from megatrain.train.loop import Outcome


def run_training(run: Path, overrides: Sequence[str], *, resume: bool) -> None:
    """Train, and print where the result is, or how to resume."""
    try:
        with Signals() as signals:
            with signals.interruptible():  # before the import of torch, which takes seconds
                loaded = load_run(run, overrides, resume=resume)
                from megatrain.parallel.distributed import is_launched, is_restarted, launch
            needs_launch = loaded.engine.devices > 1 and not is_launched()
            if not needs_launch:
                with signals.interruptible():
                    from megatrain.train.loop import train
                resume = resume or is_restarted()
                outcome = train(loaded, run.stem, resume=resume, signals=signals)
    except Stopped as signal:
        _say(f"stopped by {signal} before the first step; nothing to save")
        return
    if needs_launch:
        from megatrain.device import find_device

        end_passing()
        find_device(loaded.engine.device, loaded.engine.devices - 1)  # raises if one is missing
        options = [part for override in overrides for part in ("--set", override)]
        options += ["--resume"] if resume else []
        if exit_code := launch(loaded.engine.devices, ["train", str(run), *options]):
            raise SystemExit(exit_code)
        return
    say_end(outcome)


def say_end(outcome: "Outcome") -> None:
    """Print where the result of a run is, or how to resume the run."""
    if int(os.environ.get("RANK", 0)):
        return  # rank 0 prints
    if outcome.stopped and not outcome.steps:
        _say(f"stopped by {outcome.stopped} before the first step; nothing to save")
    elif outcome.stopped:
        command = shlex.join(["megatrain", "train", str(outcome.folder), "--resume"])
        _say(f"stopped by {outcome.stopped} after step {outcome.steps} and saved; go on with:")
        _say(f"  {command}")
    else:
        done = f"{outcome.steps} step{'s' if outcome.steps > 1 else ''} done"
        early = f", stopped early: {outcome.early}" if outcome.early else ""
        best = f" of {outcome.best}" if outcome.best else ""  # "step 40, the best (...),"
        _say(f"{done}{early}; the model{best} is in {outcome.folder / MODEL}")


def _say(text: str) -> None:
    end_passing()
    with suppress(OSError):  # a full disk must not fail a finished run
        print(text, flush=True)
