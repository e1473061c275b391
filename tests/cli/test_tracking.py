"""Trackers get what `metrics.jsonl` gets, for real, and never end a run."""

import json
from unittest import mock

import pytest
from accelerate.tracking import TensorBoardTracker

from megatrain import config
from megatrain.train.trackers import Trackers
from tests.cli.cases import records

TENSORBOARD = ("--set", "tracking.to=tensorboard", "--set", "training.steps=3")


def scalars(folder):
    """Steps and values of each name, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    names = events.Tags()["scalars"]
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in names}


def test_tensorboard_has_the_metrics_of_a_run_and_of_its_continuation(megatrain, run_file):
    run = run_file.parent / "run"
    megatrain.done("train", run_file, *TENSORBOARD)
    longer = ("--set", "training.steps=5")
    megatrain.done("train", run_file, "--resume", *TENSORBOARD, *longer)
    found = scalars(run / "tracking" / "tensorboard")
    for there, here in (("train/loss", "loss"), ("eval/loss", "eval_loss"),
                        ("train/learning_rate", "lr")):  # fmt: skip
        ours = [(each["step"], each[here]) for each in records(run, here)]
        assert len(ours) >= 2
        assert found[there] == [(step, pytest.approx(value)) for step, value in ours]


def test_a_tracker_that_fails_costs_one_warning(megatrain, run_file, caplog):
    broken = ConnectionError("no route\nto host")
    with mock.patch.object(TensorBoardTracker, "log", side_effect=broken):
        megatrain.done("train", run_file, *TENSORBOARD)
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["tensorboard: no route to host; it gets no more, the run goes on"]
    assert (run_file.parent / "run" / "model" / "model.safetensors").is_file()


def test_a_tracker_that_does_not_start_is_refused_and_leaves_nothing(megatrain, run_file):
    refused = "tracking.to: tensorboard does not start: not logged in"
    broken = PermissionError("not logged in")
    with mock.patch.object(TensorBoardTracker, "start", side_effect=broken):
        megatrain.refused(refused, "train", run_file, *TENSORBOARD)
    assert [path.name for path in (run_file.parent / "run").iterdir()] == [".lock"]
    megatrain.done("train", run_file, *TENSORBOARD)


def test_mlflow_goes_on_in_the_same_run(run_file, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    loaded, folder = config.load(run_file, ["tracking.to=mlflow"]), tmp_path / "tracking"
    for first in (0, 1):
        started = Trackers(loaded, tmp_path, first)
        started.log({"step": first + 1, "loss": 3.0 - first, "mfu": None})
        started.close()
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    run = json.loads((folder / "runs.json").read_text())["mlflow"]
    history = client.get_metric_history(run, "train/loss")
    assert [(each.step, each.value) for each in history] == [(1, 3.0), (2, 2.0)]
    assert client.get_run(run).data.params["training.steps"] == "6"
