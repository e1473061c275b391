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
