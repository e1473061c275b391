"""What callbacks have changed goes on after a resume, and what a run would not heed is refused."""

import pytest
from transformers import TrainerCallback

import megatrain as package
from megatrain.errors import InputError
from megatrain.telemetry.metrics import read_metrics

SHORT = ["training.eval_every=null", "data.eval_fraction=0", "checkpoint.every=1",
         "checkpoint.keep=9", "training.batch_size=2", "schedule.name=linear"]  # fmt: skip


def rates(run_file):
    records = read_metrics(run_file.parent / "run" / "metrics.jsonl")
    return [record["lr"] for record in records if "lr" in record]


class Changes(TrainerCallback):
    """Changes something from the second step on, and ends the process after the third."""

    def __init__(self, change, *, ends=True):
        self._change, self._ends = change, ends

    def on_step_end(self, args, state, control, **given):
        if state.global_step in (2, 3):
            self._change(args=args, state=state, control=control, **given)

    def on_save(self, args, state, control, **given):
        if self._ends and state.global_step >= 3:
            raise KeyboardInterrupt


def halve_rates(lr_scheduler, **given):
    lr_scheduler.base_lrs = [rate / 2 for rate in lr_scheduler.base_lrs]


def set_the_next_rate(optimizer, state, **given):
    for group in optimizer.param_groups:
        group["lr"] = 0.003


def step_further(lr_scheduler, **given):
    lr_scheduler.step()


def set_settings(optimizer, **given):
    for group in optimizer.param_groups:
        group |= {"betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.3}


@pytest.mark.parametrize("change", [halve_rates, set_the_next_rate, step_further, set_settings])
def test_rates_and_settings_stay_changed(run_file, change):
    outcome = package.run(run_file, SHORT, callbacks=[Changes(change, ends=False)])
    whole = read_metrics(outcome.folder / "metrics.jsonl")
    losses = [record["loss"] for record in whole if "loss" in record]
    elsewhere = [*SHORT, f"output.folder={run_file.parent / 'other'}"]
    with pytest.raises(KeyboardInterrupt):
        package.run(run_file, elsewhere, callbacks=[Changes(change)])
    package.run(run_file, elsewhere, callbacks=[Changes(change, ends=False)], resume=True)
    again = list(read_metrics(run_file.parent / "other" / "metrics.jsonl"))
    assert [record["loss"] for record in again if "loss" in record] == losses
    assert [record["lr"] for record in again if "lr" in record] == rates(run_file)


def test_one_process_is_not_taken_for_several(run_file):
    with pytest.raises(InputError, match="engine.devices is 2, and this is one process: start"):
        package.run(run_file, ["engine.devices=2"])


class Stops(TrainerCallback):
    """Asks for the run's end at step 3, whose checkpoint is the last thing the process does."""

    def __init__(self, *, ends):
        self._ends = ends

    def on_step_end(self, args, state, control, **given):
        control.should_training_stop |= state.global_step == 3

    def on_save(self, args, state, control, **given):
        if self._ends and state.global_step == 3:
            raise KeyboardInterrupt


def test_an_end_that_was_asked_for_is_one_after_a_resume(run_file):
    with pytest.raises(KeyboardInterrupt):
        package.run(run_file, SHORT, callbacks=[Stops(ends=True)])
    outcome = package.run(run_file, SHORT, callbacks=[Stops(ends=False)], resume=True)
    assert (outcome.steps, outcome.early) == (3, "a callback asked for it")
    longer = [*SHORT, "training.steps=8"]  # more was asked for by hand
    assert package.run(run_file, longer, resume=True).steps == 8


REFUSED = {
    "args.max_grad_norm": lambda args, **given: setattr(args, "max_grad_norm", 0.1),
    "state.save_steps": lambda state, **given: setattr(state, "save_steps", 7),
    "state.max_steps": lambda state, **given: setattr(state, "max_steps", 3),
    "processing_class.chat_template": lambda processing_class, **given: setattr(
        processing_class, "chat_template", "x"
    ),
    "the number of tokens": lambda processing_class, **given: processing_class.add_tokens(["zz"]),
    "lr_scheduler.lr_lambdas": lambda lr_scheduler, **given: setattr(
        lr_scheduler, "lr_lambdas", [lambda step: 1.0] * 2
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_run_would_not_heed_is_refused(run_file, name):
    with pytest.raises(InputError, match=f"Changes.on_step_end has changed .*{name}"):
        package.run(run_file, SHORT, callbacks=[Changes(REFUSED[name], ends=False)])
