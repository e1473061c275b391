"""Which parameters a run trains, and noise on its embeddings."""

import pytest

from megatrain.telemetry.metrics import read_metrics
from tests.cli.cases import sets
from tests.cli.test_mistakes import assert_refused


def records(run):
    return list(read_metrics(run / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"model__freeze": ["lm_hed"]}, "freeze: 'lm_hed' matches the name of no parameter; there"),
        ({"model__freeze": ["("]}, "model.freeze: '(' is not a regular expression"),
        ({"model__train_only": []}, "model.train_only"),
        ({"model__freeze": ["."]}, "every parameter is frozen: there is nothing to train"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(megatrain, run_file, choice, told):
    assert_refused(megatrain("train", run_file, *sets(**choice)), told)


def test_a_resumed_run_draws_the_noise_of_one_that_was_not_interrupted(megatrain, run_file):
    folder, found = run_file.parent, []
    even = {"training__neftune_alpha": 10.0, "schedule__name": "constant_with_warmup"}
    for name, lengths in (("whole", [4]), ("run", [2, 4])):
        for steps in lengths:
            how = ("--resume",) if steps != lengths[0] else ()
            changes = sets(**even, output__folder=str(folder / name), training__steps=steps)
            megatrain.done("train", run_file, *how, *changes)
        found.append([r["loss"] for r in records(folder / name) if "loss" in r])
    assert found[0] == found[1]
    quiet = sets(**even | {"training__neftune_alpha": None}, output__folder=str(folder / "quiet"))
    megatrain.done("train", run_file, *quiet)
    assert records(folder / "quiet")[0]["loss"] != found[0][0]
