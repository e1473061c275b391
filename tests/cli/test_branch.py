"""Runs that begin from other runs: by `model.path`, and in a copy of their folder."""

import shutil

import pytest

import megatrain as package
from megatrain.config import load
from megatrain.errors import InputError
from tests.cli.cases import change_run, records, sets
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
    return [(record["step"], record["loss"]) for record in records(folder, "loss")]


def test_a_model_may_be_a_run_a_checkpoint_or_an_export(
    megatrain, run_file, trained, unfinished, tmp_path
):
    """Each starts from the same weights, with a new optimizer: the same losses."""
    places = [trained[0], unfinished, trained[0] / "checkpoints" / "step-00000006"]
    seen = []
    for number, place in enumerate(places):
        into = str(tmp_path / f"from-{number}")
        change_run(run_file, model={"path": str(place)}, output__folder=into)
        megatrain.done("train", run_file, *sets(training__steps=1, training__eval_every=None))
        seen.append(losses(tmp_path / f"from-{number}"))
        exported = weights(tmp_path / f"from-{number}" / "model")
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0][1] < losses(trained[0])[0][1]  # it begins where the other one ended
    assert exported.keys() == weights(trained[0] / "model").keys()
    megatrain.done("data", run_file)
    told = f"{tmp_path}: a folder of runs; name one of them, such as {tmp_path}/"
    megatrain.refused(told, "data", run_file, *sets(model__path=str(tmp_path)))


def test_a_copied_run_goes_on_with_other_settings(megatrain, trained, tmp_path):
    plain, other = tmp_path / "plain", tmp_path / "other"
    for folder, changed in ((plain, {}), (other, {"optimizer__lr": 0.1})):
        shutil.copytree(trained[0], folder)
        megatrain.done("train", folder, "--resume", *sets(training__steps=8, **changed))
    assert [step for step, _ in losses(plain)] == list(range(1, 9))
    assert losses(plain)[:6] == losses(trained[0])[:6] == losses(other)[:6]
    assert losses(plain)[6] == losses(other)[6]  # the first step's update is seen in the next one
    assert losses(plain)[7] != losses(other)[7]
    assert load(other).optimizer.lr == 0.1
    megatrain.done("train", other, "--resume", *sets(output__folder=str(tmp_path / "." / "other")))
    elsewhere = sets(output__folder=str(tmp_path / "third"))
    megatrain.refused(f"cp -r {other} NEW", "train", other, "--resume", *elsewhere)


def test_a_run_calls_a_function_with_each_record_and_no_callbacks(run_file):
    heard = []
    folder = package.run(run_file, on_record=heard.append).folder
    assert heard == records(folder)
    with pytest.raises(InputError, match="callbacks: a run calls none; give on_record"):
        package.run(run_file, callbacks=[print])
    with pytest.raises(InputError, match="overrides is 'training.steps=1'; give a list"):
        package.run(run_file, "training.steps=1")
