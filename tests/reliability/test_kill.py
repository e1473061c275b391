"""`kill -9` of a real run at random moments: what is on the disk is always exactly a step's state.

A run that nothing interrupts keeps a checkpoint of every step. After each kill, the newest
checkpoint of the other run must equal the one of the same step there, bit for bit, and in the end
log and model must be equal, too.
"""

import random
import signal
import time

import psutil
import pytest

from megatrain.checkpoint import verify
from tests.cli.cases import sets
from tests.reliability.cases import (
    assert_same_state,
    checkpoint_steps,
    logged,
    model_bytes,
    start_run,
    toy_run,
)

CHOICES = {"training__eval_every": 7}
MORE = (2, 4, 24 << 20)  # threads, files and bytes that a process may take late beyond early


def checkpoint(run, step):
    return run / "checkpoints" / f"step-{step:08d}"


def usage(pid):
    """The least threads, files and bytes of its own that a process takes for a while."""
    process, seen = psutil.Process(pid), []
    for _ in range(20):
        memory = process.memory_info()
        seen.append((process.num_threads(), process.num_fds(), memory.rss - memory.shared))
        time.sleep(0.02)
    return [min(values) for values in zip(*seen, strict=True)]


def kill_and_go_on(tokenizer_folder, folder, *, kills, steps, choices=None, resumed=list):
    """Returns the steps that the run was resumed from, each time with `resumed` as options."""
    choices = CHOICES | {"training__steps": steps} | (choices or {})
    for name, every, keep in (("whole", 1, 10**6), ("killed", 2, 2)):
        saves = {"checkpoint__every": every, "checkpoint__keep": keep}
        toy_run(folder / name, tokenizer_folder, **choices, **saves)
    whole, killed = folder / "whole" / "run", folder / "killed" / "run"
    reference = start_run("train", folder / "whole" / "run.yaml", log=folder / "log")
    if steps > 100:
        taken = []
        for share in (0.3, 0.8):
            reference.until(f"step {int(share * steps)}/")
            taken.append(usage(reference.pid))
        assert all(b <= a + more for a, b, more in zip(*taken, MORE, strict=True)), taken
    reference.finish()
    moments = random.Random(kills)
    came_to = []
    for count in range(kills):
        again = ["train", folder / "killed" / "run.yaml", "--resume", *resumed()]
        run = start_run(*again, log=folder / f"log-{count}")
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
    out = start_run(
        "train", folder / "killed" / "run.yaml", "--resume", log=folder / "last"
    ).finish()
    assert "not resumed from" not in out
    assert logged(killed) == logged(whole)
    assert model_bytes(killed) == model_bytes(whole)
    left = {path.name for path in (killed / "checkpoints").iterdir()}
    assert left == {checkpoint(killed, step).name for step in checkpoint_steps(killed)}
    return came_to


def test_a_run_survives_kills(tokenizer_folder, tmp_path):
    came_to = kill_and_go_on(tokenizer_folder, tmp_path, kills=3, steps=14)
    assert max(came_to) > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_run_survives_a_hundred_kills(tokenizer_folder, tmp_path):
    came_to = kill_and_go_on(tokenizer_folder, tmp_path, kills=100, steps=700)
    assert len(came_to) == 100 and len(set(came_to)) > 30


RULES = [
    {"states": "bf16"},
    {"states": "int8", "master": 24},
    {"name": "lion", "lr": 1e-3},
    {"name": "sgd", "momentum": 0.9, "nesterov": True},
    {"name": "muon", "adamw_lr": 1e-3, "clip": "all"},
]


def drawn_placement(choice):
    """Where things rest; on the CPU that changes no bit."""
    passes = choice.randint(1, 2)
    numbers = ("keep_weights", "disk_moments", "disk_remainder", "disk_weights")
    return {
        "slots": choice.randint(1, 4),
        "passes": passes,
        "keep_rows": passes == 2 or choice.random() < 0.5,
        "layer_inputs": choice.choice(["device", "host"]),
        "resident": choice.sample(
            ("embedding", "layer 0", "layer 1", "head"), choice.randint(0, 4)
        ),
        "save_activations": choice.randint(0, 2),
        **{name: choice.randint(0, 4) for name in numbers},
    }


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_run_survives_kills_by_each_rule_with_other_placements(tokenizer_folder, tmp_path, rule):
    choice = random.Random(str(rule))
    choices = {f"optimizer__{key}": value for key, value in rule.items()}
    choices |= {"engine__precision": "bf16", "engine__disk": str(tmp_path)}

    def resumed():
        return sets(engine__placement=drawn_placement(choice))

    kills = {"kills": 4, "steps": 50, "choices": choices, "resumed": resumed}
    assert len(kill_and_go_on(tokenizer_folder, tmp_path, **kills)) == 4
