"""What a run remembers of steps that the engine refused."""

import json

import pytest

from megatrain.config import TrainingSection
from megatrain.errors import RunFailed, StepRefused
from megatrain.train.steps import BadSteps


def test_a_resumed_run_counts_on():
    settings = TrainingSection(steps=9, on_nonfinite="skip", max_skips=2, spike=2.0)
    before, after = BadSteps(settings), BadSteps(settings)
    for _ in range(20):
        before.passed(1.5)
    bad = StepRefused("the loss is nan", intact=True)
    before.skip(bad)
    before.skip(bad)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.norm_limit == before.norm_limit == 3.0
    with pytest.raises(RunFailed, match="3 bad steps in a row"):
        after.skip(bad)
