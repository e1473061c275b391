"""Runs that begin from other runs: by `model.path`, and by `megatrain branch`."""

import shutil

import pytest
import yaml

from megatrain.checkpoint import open_checkpoint
from megatrain.config import load
from megatrain.telemetry.metrics import read_metrics
from tests.cli.cases import sets
from tests.cli.test_train import weights


@pytest.fixture
def unfinished(trained, tmp_path):
    """A copy of the finished run without its model."""
    folder = tmp_path / "unfinished"
    shutil.copytree(trained[0], folder)
    shutil.rmtree(folder / "model")
    (folder / "finished.json").unlink()
    return folder


def losses(folder):
    return [(r["step"], r["loss"]) for r in read_metrics(folder / "metrics.jsonl") if "loss" in r]


def test_a_model_may_be_a_run_a_checkpoint_or_an_export(
    megatrain, run_file, trained, unfinished, tmp_path
):
    """Each starts from the same weights, with a new optimizer: the same losses."""
    places = [trained[0], unfinished, trained[0] / "checkpoints" / "step-00000006"]
    tree = yaml.safe_load(run_file.read_text())
    seen = []
    for number, place in enumerate(places):
        tree["model"] = {"path": str(place)}
        tree["output"]["folder"] = str(tmp_path / f"from-{number}")
        run_file.write_text(yaml.safe_dump(tree))
        megatrain.done("train", run_file, *sets(training__steps=2, training__eval_every=None))
        seen.append(losses(tmp_path / f"from-{number}"))
        exported = weights(tmp_path / f"from-{number}" / "model")
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0][1] < losses(trained[0])[0][1]  # it begins where the other one ended
    assert exported.keys() == weights(trained[0] / "model").keys()
    megatrain.done("data", run_file)
    result = megatrain("data", run_file, *sets(model__path=str(tmp_path)))
    assert result.exit_code == 2
    assert f"{tmp_path}: a folder of runs; name one of them, such as {tmp_path}/" in result.stderr


def test_a_branch_goes_on_with_other_settings(megatrain, run_file, trained, tmp_path):
    """Where the settings are the same, a branch is what the run would have been."""
    longer = sets(training__steps=8)
    plain, other = tmp_path / "plain", tmp_path / "other"
    megatrain.done("branch", trained[0], plain, *longer)
    megatrain.done("branch", trained[0], other, *longer, *sets(optimizer__lr=0.1))
    megatrain.done("train", run_file, *longer, *sets(output__folder=str(tmp_path / "whole")))
    assert losses(plain)[:6] == losses(trained[0])[:6] == losses(other)[:6]
    assert [step for step, _ in losses(plain)] == list(range(1, 9))
    assert losses(plain)[6] == losses(other)[6]  # the first step's update is seen in the next one
    assert losses(plain)[7] != losses(other)[7]
    assert load(other / "config.yaml").optimizer.lr == 0.1
    assert open_checkpoint(trained[0] / "checkpoints" / "step-00000006").step == 6  # as it was


def test_a_fresh_branch_takes_the_weights_alone(megatrain, trained, tmp_path):
    changed = sets(optimizer={"name": "lion", "lr": 1e-3}, training__steps=2)
    changed += sets(training__eval_every=None, training__batch_size=2, engine__precision="bf16")
    new = tmp_path / "new"
    megatrain.done("branch", trained[0], new, "--fresh", *changed)
    assert [step for step, _ in losses(new)] == [1, 2]
    assert losses(new)[0][1] < losses(trained[0])[0][1]
    (checkpoint,) = (new / "checkpoints").iterdir()
    assert open_checkpoint(checkpoint).settings.precision == "bf16"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--set", "training.batch_size=2"], "training.batch_size: 2 now, but"),
        (["--set", "training.batch_size=2"], "begin anew from these weights with --fresh"),
        (["--set", "training.batch_sise=2"], "--set training.batch_sise: unknown key; did you"),
        (["--set", "training.steps=3"], "the run has done 6 steps already"),
        (
            ["--set", "optimizer.lr=1e-6"],
            "has done all of its 6 steps; ask for more with --set trai",
        ),
    ],
)
def test_settings_that_cannot_change(megatrain, trained, tmp_path, options, problem):
    result = megatrain("branch", trained[0], tmp_path / "new", *options)
    assert result.exit_code == 2 and problem in result.stderr
    assert result.stderr.count("megatrain: error:") == 1
    assert not (tmp_path / "new").exists()


def test_what_is_no_run_and_what_is_no_new_folder(megatrain, trained, tmp_path):
    result = megatrain("branch", tmp_path, tmp_path / "new")
    assert result.exit_code == 2 and "no run with a whole checkpoint" in result.stderr
    result = megatrain("branch", trained[0], trained[0])
    assert result.exit_code == 2 and "holds a finished run; choose another" in result.stderr
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    result = megatrain("branch", trained[0], tmp_path / "mine")
    assert result.exit_code == 2 and "is not empty" in result.stderr
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "mine"
    damaged = tmp_path / "damaged"
    shutil.copytree(trained[0] / "checkpoints" / "step-00000006", damaged)
    (damaged / "model" / "config.json").write_text("{}")
    result = megatrain("branch", damaged, tmp_path / "new")
    assert result.exit_code == 2 and "damaged" in result.stderr
    assert not (tmp_path / "new").exists()
