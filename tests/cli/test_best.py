"""The best state of a run, its early end, and several evaluation sets."""

import json
import math
import shutil

import pytest
from safetensors.torch import load_file

from megatrain import config
from megatrain.train.evaluations import Watch
from tests.cli.cases import records, sets, write_rows
from tests.reliability.cases import checkpoint_steps

# A rate that grows until nothing is learnt any more: the best state is an early one.
WORSE = {
    "training__steps": 8,
    "training__eval_every": 1,
    "training__max_grad_norm": None,
    "optimizer__lr": 3.0,
    "schedule__name": "linear",
    "schedule__warmup_steps": 8,
    "checkpoint__every": None,
    "checkpoint__keep": 1,
}
BEST = {"checkpoint__best": "eval_loss", "checkpoint__load_best": True}


def same_weights(one, other):
    ours, others = (load_file(folder / "model.safetensors") for folder in (one, other))
    return all(ours[name].equal(others[name]) for name in ours)


def test_the_best_state_stays_and_is_exported(megatrain, run_file, tmp_path, caplog):
    run = run_file.parent / "run"
    result = megatrain.done("train", run_file, *sets(**WORSE, **BEST))
    losses = {record["step"]: record["eval_loss"] for record in records(run, "eval_loss")}
    best = min(losses, key=losses.get)
    assert best < 8
    assert checkpoint_steps(run) == [best, 8]
    noted = json.loads((run / "finished.json").read_text())
    assert noted["best"] == {"step": best, "eval_loss": losses[best]} and noted["done"] == 8
    assert f"the model of step {best}, the best (eval_loss {losses[best]:.4g})" in result.stdout
    step = run / "checkpoints" / f"step-{best:08d}"
    megatrain.done("export", step, tmp_path / "out")
    assert same_weights(run / "model", tmp_path / "out")
    assert {path.name for path in (run / "model").iterdir()} >= {"tokenizer.json", "config.json"}
    again = megatrain("train", run_file, "--resume", *sets(**WORSE, **BEST))
    assert again.exit_code == 0 and "8 steps done" in again.stdout
    assert "going on" not in caplog.text
    last = BEST | {"checkpoint__load_best": False}
    for choice, is_best in ((last, False), (BEST, True)):
        megatrain.done("train", run_file, "--resume", *sets(**WORSE, **choice))
        assert same_weights(run / "model", tmp_path / "out") is is_best
    shutil.rmtree(step)
    (run / "finished.json").unlink()
    megatrain("train", run_file, "--resume", *sets(**WORSE, **BEST))
    assert f"the state of step {best} was better, but is not kept" in caplog.text


def test_a_run_ends_early_and_a_resumed_one_at_the_same_step(megatrain, run_file):
    run = run_file.parent / "run"
    early = sets(**WORSE, training__early_stopping={"patience": 2})
    result = megatrain.done("train", run_file, *early)
    losses = [record["eval_loss"] for record in records(run, "eval_loss")]
    best = losses.index(min(losses)) + 1
    assert len(losses) == best + 2 < 8 and checkpoint_steps(run) == [best + 2]
    told = f"stopped early: eval_loss was not better than {min(losses):.4g} in 2 evaluations"
    assert told in result.stdout
    assert json.loads((run / "finished.json").read_text())["early"] in told
    assert told in megatrain("train", run_file, "--resume", *early).stdout
    shutil.move(run, run_file.parent / "whole")
    first = sets(**WORSE | {"training__steps": best + 1})
    slow = sets(schedule__name="constant_with_warmup")  # alike however long the run is
    megatrain.done("train", run_file, *first, *slow)
    megatrain.done("train", run_file, "--resume", *early, *slow)
    assert [record["eval_loss"] for record in records(run, "eval_loss")] == losses
    patient = sets(**WORSE, training__early_stopping={"patience": 9})
    assert "8 steps done;" in megatrain("train", run_file, "--resume", *patient, *slow).stdout


def watched(values, **changes):
    tree = {
        "model": {"path": "m"},
        "data": {"path": "a", "sequence_length": 8, "eval_fraction": 0.1},
        "training": {"steps": 9, "eval_every": 1, "early_stopping": {"patience": 2}},
        "checkpoint": {"best": "eval_accuracy"},
    }
    tree["training"]["early_stopping"] |= changes
    records = [{"step": n, "eval_accuracy": value} for n, value in enumerate(values, 1)]
    return Watch(config.validate(tree, "run.yaml"), records)


def test_large_accuracies_are_good_and_no_numbers_are_bad():
    found = watched([0.5, None, 0.7, math.nan, 0.7])
    assert found.ranked == [3, 5, 1] and found.value(3) == 0.7
    assert found.stop == "eval_accuracy was not better than 0.7 in 2 evaluations"
    assert watched([0.5, 0.4, 0.6]).stop is None
    assert watched([0.5, 0.51, 0.52], min_delta=0.05).stop is not None
    assert watched([None, None]).stop == "eval_accuracy was no number in 2 evaluations"


def test_named_sets_have_metrics_of_their_own(megatrain, run_file, tmp_path):
    paths = {name: str(write_rows(tmp_path / f"{name}.jsonl", rows))
             for name, rows in (("short", 12), ("long", 60))}  # fmt: skip
    named = sets(data__eval_fraction=0, data__eval_path=paths, checkpoint__best="eval_short_loss")
    result = megatrain.done("train", run_file, *named)
    *_, last = records(run_file.parent / "run", "eval_loss")
    parts = [last["eval_short_loss"], last["eval_long_loss"]]
    assert min(parts) < last["eval_loss"] < max(parts)
    assert last["eval_perplexity"] == pytest.approx(math.exp(last["eval_loss"]))
    assert 0 <= last["eval_long_accuracy"] <= 1
    assert f"short {parts[0]:.4f}  long {parts[1]:.4f}" in result.stdout
    assert " (training " in result.stdout
