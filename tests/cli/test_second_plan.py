"""Plans count the second model of a run: compared with engines that have one."""

import json
import mmap
from unittest import mock

import pytest

from megatrain.train.second_model import SecondModel
from tests.cli.cases import sets
from tests.cli.test_distill import distilling, teacher  # noqa: F401
from tests.cli.test_preferences import pair, preference_file  # noqa: F401


def forecast(megatrain, file, *options):
    result = megatrain.done("plan", file, "--gpu", "4090", "--json", *options)
    return json.loads(result.stdout)["forecast"]


def of_run(megatrain, file, folder):
    """Host memory that the second model of a real run has while a step asks it; its rows' room."""
    found, asked = [], SecondModel.with_answers

    def noted(self, step):
        made = asked(self, step)
        found.append(self.engine.memory()["host_bytes"])
        return made

    with mock.patch.object(SecondModel, "with_answers", noted):
        result = megatrain("train", file, *sets(output__folder=str(folder), training__steps=2))
    assert result.exit_code == 0, result.output
    return found[-1]


def agree(told, host, hidden):
    """Pages are whole, and a plan's rows of the embedding are as many as tokens of a step."""
    room = 4 * hidden * told["tokens_per_step"]
    parts = told["host_bytes"]
    [own] = [
        v for n, v in parts.items() if n in ("host_teacher_bytes", "host_reference_model_bytes")
    ]
    assert host <= own <= host + room + 2 * mmap.PAGESIZE
    return own


@pytest.mark.exhaustive
def test_a_streamed_teacher_is_counted(megatrain, distilling, tmp_path):  # noqa: F811
    file = distilling()
    plain = forecast(megatrain, file, "--set", "loss={name: sft}")
    told = forecast(megatrain, file)
    own = agree(told, of_run(megatrain, file, tmp_path / "run"), 48)
    assert told["host_peak_bytes"] - plain["host_peak_bytes"] == own
    assert told["device_bytes"]["teacher"] > 0
