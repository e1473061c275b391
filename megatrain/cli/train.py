"""`megatrain train`: a run file or a run's folder in, a finished or a resumable run out."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatrain import config
from megatrain.errors import InputError
from megatrain.train.folders import CONFIG, MODEL


def run_training(run: Path, overrides: Sequence[str], *, resume: bool) -> None:
    """Train, and say where the result is or how to go on.

    Raises:
        InputError: the run file cannot be used.
    """
    if run.is_dir():
        if not resume:
            raise InputError(f"{run}: a folder; give its run file, or --resume to go on with it")
        overrides = [*overrides, f"output.folder={json.dumps(str(run))}"]
        loaded = config.load(run / CONFIG, overrides)
    else:
        loaded = config.load(run, overrides)  # before torch, whose import takes seconds
    from megatrain.train.loop import train
    from megatrain.train.stop import Stopped

    try:
        outcome = train(loaded, run.stem, resume=resume)
    except Stopped as signal:
        print(f"stopped by {signal} before the first step; nothing to save")
        return
    if outcome.stopped:
        command = shlex.join(["megatrain", "train", str(outcome.folder), "--resume"])
        print(f"{outcome.steps} steps done and saved; go on with: {command}")
    else:
        print(f"{outcome.steps} steps done; the model is in {outcome.folder / MODEL}")
