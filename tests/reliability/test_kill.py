"""`kill -9` of a real run at random moments: what is on the disk is always exactly a step's state.

A run that nothing interrupts keeps a checkpoint of every step. After each kill, the newest
checkpoint of the other run must equal the one of the same step there, bit for bit, and in the end
log and model must be equal, too.
"""

import random
import signal
import time

import pytest

from megatrain.checkpoint import verify
from tests.reliability.cases import (
    assert_same_state,
    checkpoint_steps,
    logged,
    model_bytes,
    start_run,
    toy_run,
)

CHOICES = {"training__eval_every": 7}


def checkpoint(run, step):
    return run / "checkpoints" / f"step-{step:08d}"


def kill_and_go_on(tokenizer_folder, folder, *, kills, steps):
    """Returns the steps that the run was resumed from."""
    choices = CHOICES | {"training__steps": steps}
    for name, every, keep in (("whole", 1, 10**6), ("killed", 2, 2)):
        saves = {"checkpoint__every": every, "checkpoint__keep": keep}
        toy_run(folder / name, tokenizer_folder, **choices, **saves)
    whole, killed = folder / "whole" / "run", folder / "killed" / "run"
    reference = folder / "whole" / "run.yaml"
    start_run("train", reference, log=folder / "log").finish()
    moments = random.Random(kills)
    came_to = []
    for count in range(kills):
        log = folder / f"log-{count}"
        run = start_run("train", folder / "killed" / "run.yaml", "--resume", log=log)
        last = count == kills - 1  # it comes when the save of step 2 has made place for the next
        if moments.random() < 0.9 or last:  # else before the first step
            run.until(f"step {(came_to or [0])[-1] + moments.randint(5 if last else 1, 7)}/")
        time.sleep(moments.uniform(0, 0.1))
        run.send(signal.SIGKILL)
        if run.wait() == 0:
            break  # it was faster
        newest = max(checkpoint_steps(killed), default=0)
        came_to.append(newest)
        for step in checkpoint_steps(killed):
            verify(checkpoint(killed, step))
        if newest:
            assert_same_state(checkpoint(killed, newest), checkpoint(whole, newest))
    log = folder / "last"
    out = start_run("train", folder / "killed" / "run.yaml", "--resume", log=log).finish()
    assert "not resumed from" not in out
    assert logged(killed) == logged(whole)
    assert model_bytes(killed) == model_bytes(whole)
    left = {path.name for path in (killed / "checkpoints").iterdir()}
    assert left == {checkpoint(killed, step).name for step in checkpoint_steps(killed)}
    return came_to


def test_a_run_survives_kills(tokenizer_folder, tmp_path):
    came_to = kill_and_go_on(tokenizer_folder, tmp_path, kills=3, steps=18)
    assert max(came_to) > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_run_survives_a_hundred_kills(tokenizer_folder, tmp_path):
    came_to = kill_and_go_on(tokenizer_folder, tmp_path, kills=100, steps=700)
    assert len(came_to) == 100 and len(set(came_to)) > 30
