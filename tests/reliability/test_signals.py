"""Signals sent to a real run in each of its phases."""

import signal

import pytest

from megatrain.checkpoint import open_checkpoint, verify
from tests.cli.cases import sets
from tests.reliability.cases import PLANTED, checkpoint_steps, logged, model_bytes
from tests.sweeps import few

CHOICES = {"training__steps": 6, "training__eval_every": 2, "checkpoint__every": 3}

PHASES = PLANTED["phases"]
SIGNALS = [(phase, getattr(signal, name)) for phase, (*_, name) in PHASES.items() if name]


def held(phase, go):
    """The part waits until the file `go` is there: after a signal, however late that comes."""
    module, owner, name, _ = PHASES[phase]
    return PLANTED["held"].format(module=module, owner=owner, name=name, go=str(go))


@pytest.fixture
def go(tmp_path):
    """What `held` waits for; to be touched."""
    return tmp_path / "go"


@pytest.mark.parametrize(
    ("phase", "number"),
    few(SIGNALS, 2, 4),
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)
def test_one_signal_ends_the_run_well_and_loses_nothing(
    whole, run, tmp_path, start, phase, number, go
):
    before = held(phase, go)
    if phase == "save":  # the steps beside it shall not be over before the signal
        before += PLANTED["beside"].format(go=str(go))
    first = start(before)
    first.until("PHASE")
    first.send(number)
    go.touch()
    out = first.finish()
    folder = tmp_path / "run"
    if phase in ("reading", "loading"):
        assert f"stopped by {number.name} before the first step" in out
        assert not folder.exists()
    elif phase == "model":  # the last step is done: the run ends as it would have
        assert "6 steps done; the model is in" in out
    else:
        assert "stopping after this step and saving" in out
        assert out.endswith(f"go on with:\n  megatrain train {folder} --resume\n")
        step = max(checkpoint_steps(folder))
        assert f"stopped by {number.name} after step {step} and saved" in out
        assert max(record["step"] for record in logged(folder)) == step
    start("", "--resume").finish()
    assert logged(folder) == logged(whole)
    assert model_bytes(folder) == model_bytes(whole)


@pytest.mark.parametrize("phase", few(["resuming", "step", "save"], 2))
def test_a_second_signal_ends_it_at_once(run, tmp_path, start, phase, go):
    """Whatever it is doing; the checkpoint before is whole."""
    start("", *sets(training__steps=3)).finish()
    before = held(phase, go) + PLANTED["clock"].format(later=str(tmp_path / "later"))
    process = start(before, "--resume", *sets(training__steps=100000))
    process.until("PHASE")
    if phase != "resuming":  # there the first one ends it
        process.send(signal.SIGINT)
        process.until("stopping after this step")
        process.send(signal.SIGINT)  # as timeout(1) does
        process.until("look 2")
        (tmp_path / "later").touch()
    last = signal.SIGINT if phase == "step" else signal.SIGTERM
    process.send(last)
    assert process.wait() == (0 if phase == "resuming" else 128 + last)
    assert ("stopped at once" in process.output) == (phase != "resuming")
    assert [verify(tmp_path / "run" / "checkpoints" / "step-00000003").step] == [3]
    assert checkpoint_steps(tmp_path / "run") == [3]


def test_usr1_saves_now_and_the_run_goes_on(whole, run, tmp_path, start, go):
    none = sets(checkpoint__every=None, checkpoint__at_end=False)
    process = start(held("evaluation", go), *none)
    process.until("PHASE")  # after step 2
    process.send(signal.SIGUSR1)
    go.touch()
    process.finish()
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert open_checkpoint(saved).extra["step"] == 3
    assert logged(tmp_path / "run") == logged(whole)


def test_a_step_that_the_signal_breaks_is_given_up(whole, run, tmp_path, start):
    """A compiler in the same group gets the signal, too."""
    before = """
import os, signal
from megatrain.api import Engine
step = Engine.step
def broken(self, *args, **kwargs):
    if self.optimizer.num_steps == 4:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("the compiler has gone")
    return step(self, *args, **kwargs)
Engine.step = broken
"""
    out = start(before).finish()
    assert "the running step is given up: the compiler has gone" in out
    assert "stopped by SIGTERM after step 4 and saved" in out
    start("", "--resume").finish()
    assert logged(tmp_path / "run") == logged(whole)
