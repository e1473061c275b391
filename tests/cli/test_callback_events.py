"""Callbacks are told what transformers' Trainer tells them, in its order."""

import pytest
from transformers import PrinterCallback, TrainerCallback
from transformers.integrations import TensorBoardCallback

import megatrain as package
from megatrain.errors import InputError
from tests.reliability.cases import checkpoint_steps

EVENTS = ("init_end", "train_begin", "epoch_begin", "step_begin", "step_end", "log", "evaluate",
          "epoch_end", "save", "train_end")  # fmt: skip


class Recorder(TrainerCallback):
    def __init__(self):
        self.seen, self.saved, self.history, self.logs = [], [], [], []


def _recording(event):
    def told(self, args, state, control, logs=None, metrics=None, **kwargs):
        if event == "save":  # whenever a checkpoint is whole
            self.saved.append(state.global_step)
        else:
            self.seen.append(event)
        if event == "train_begin":
            self.history = [dict(each) for each in state.log_history]
        if event == "evaluate":
            assert metrics["epoch"] == state.epoch and metrics["eval_runtime"] > 0
        self.args, self.state = args, state
        self.logs += [logs] if logs else []

    return told


for event in EVENTS:
    setattr(Recorder, f"on_{event}", _recording(event))


SHORT = ["training.steps=null", "training.epochs=2", "training.eval_every=2", "output.log_every=2",
         "checkpoint.every=2", "checkpoint.keep=9", "schedule.name=constant_with_warmup",
         "training.batch_size=17"]  # fmt: skip


def test_events_come_in_trainers_order(run_file):
    told = Recorder()
    steps = package.run(run_file, SHORT, callbacks=[told]).steps
    assert steps == 4
    expected = ["init_end", "train_begin"]
    for step in range(1, steps + 1):
        expected += ["epoch_begin"] if step in (1, 3) else []
        expected += ["step_begin", "step_end"]
        expected += ["log", "log", "evaluate"] if step % 2 == 0 else []
        expected += ["epoch_end"] if step in (2, 4) else []
    assert told.seen == [*expected, "log", "train_end"]
    assert told.saved == checkpoint_steps(run_file.parent / "run")
    assert told.args.save_steps == 2 and told.args.num_train_epochs == 2
    assert told.state.num_train_epochs == 2 and told.logs[-1]["train_loss"] > 0
    again = Recorder()
    longer = [*SHORT[2:], f"training.steps={steps + 1}"]
    package.run(run_file, longer, callbacks=[again], resume=True)
    assert again.history == told.state.log_history[:-2]  # told anew: the evaluation after the save
    assert again.state.log_history[:4] == told.state.log_history[:-1]
    assert again.seen[1:7] == [
        *("train_begin", "log", "evaluate", "epoch_begin", "step_begin", "step_end")
    ]


class Asks(TrainerCallback):
    """For a log and an evaluation after step 1, all else at an epoch's end."""

    def __init__(self):
        self.logged, self.evaluated = [], []

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log = control.should_epoch_stop = state.global_step == 1
        control.should_evaluate = state.global_step == 1

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.evaluated.append(state.global_step)

    def on_log(self, args, state, control, logs, **kwargs):
        self.logged += [state.global_step] if "loss" in logs else []

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_save = control.should_training_stop = True


def test_what_callbacks_ask_for_is_done(run_file, caplog):
    asks = Asks()
    given = [
        *SHORT,
        "training.eval_every=null",
        "checkpoint.every=null",
        "output.log_every=100",
        "checkpoint.at_end=false",
    ]
    outcome = package.run(run_file, given, callbacks=[asks, TensorBoardCallback, PrinterCallback])
    assert asks.evaluated == [1, outcome.steps]
    assert asks.logged == [1] and "should_epoch_stop is not heeded" in caplog.text
    assert checkpoint_steps(run_file.parent / "run") == [outcome.steps]
    assert outcome.early == "a callback asked for it"
    assert list((run_file.parent / "run").rglob("events.out.tfevents*"))


class WandbCallback(TrainerCallback):
    """Named as that of transformers, which asks for `model.num_parameters()`."""


def test_events_that_never_come_are_refused(run_file):
    gradients = type("Gradients", (TrainerCallback,), {"on_pre_optimizer_step": print})
    with pytest.raises(InputError, match="Gradients.on_pre_optimizer_step would never be called"):
        package.run(run_file, callbacks=[gradients()])
    with pytest.raises(InputError, match="WandbCallback .* set tracking.to: wandb"):
        package.run(run_file, callbacks=[WandbCallback])
