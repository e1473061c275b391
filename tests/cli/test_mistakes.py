"""What a user can get wrong: one line, the documented exit code, nothing half-written."""

import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatrain import Engine, InputError, __version__, config
from megatrain.cli import main
from megatrain.config import load
from megatrain.device import cpu
from megatrain.driver.base import Gpu
from megatrain.train import second_model, setup
from tests.cli.cases import MISTAKES, SENTENCES, assert_refused, change_run, sets
from tests.inside import answering
from tests.unit.data_cases import write_jsonl


def given(overrides):
    return [part for override in overrides for part in ("--set", override)]


@pytest.mark.parametrize("expected", MISTAKES["run file"])
def test_a_mistake_in_the_run_file(megatrain, run_file, tmp_path, expected):
    megatrain.refused(expected, "train", run_file, *given(MISTAKES["run file"][expected]))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(kind, each) for kind in ("early", "too large") for each in MISTAKES[kind]],
)
def test_what_can_be_known_before_data_is_read(megatrain, run_file, kind, expected):
    overrides = [*MISTAKES[kind][expected], "data.path=none.txt"]
    code = 3 if kind == "too large" else 2
    megatrain.refused(expected, "train", run_file, *given(overrides), code=code)


def test_a_disk_without_room_for_the_next_checkpoint(megatrain, run_file, trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    with (tmp_path / "run" / "checkpoints" / "step-00000006" / "sparse").open("wb") as file:
        file.truncate(8 << 40)
    longer = sets(training__steps=8)
    result = megatrain("train", run_file, "--resume", *longer)
    assert_refused(result, "left, and the next checkpoint takes 8192.0 GiB; free ", code=3)
    none = sets(checkpoint={"every": None, "at_end": False})
    megatrain.done("train", run_file, "--resume", *longer, *none)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_run_that_takes_the_cpu_says_so(megatrain, run_file, caplog, device):
    megatrain("train", run_file, *sets(engine__device=device, data__path="none.txt"))
    assert ("torch sees no GPU here: the run computes on the CPU" in caplog.text) == (
        device == "auto"
    )


def test_a_model_larger_than_the_host_does_not_fit(megatrain, run_file, tmp_path, monkeypatch):
    answering(monkeypatch, cpu, host_available_bytes=1 << 12)
    result = megatrain("train", run_file)
    assert_refused(result, "no host memory for weights: ", code=3)
    assert not (tmp_path / "run").exists()
    plan = "; `megatrain plan` with this run file names what would make it fit"
    assert plan not in result.stderr  # which refuses a run on the CPU

    for gpu in (Gpu("NVIDIA H200", 1, "580"), None):  # without one, plan wants its name
        answering(monkeypatch, setup, find_gpu=gpu)
        result = megatrain("train", run_file, "--set", "engine.device=auto")
        assert_refused(result, "no host memory for weights: ", code=3)
        assert (plan in result.stderr) == (gpu is not None)


@pytest.mark.parametrize("expected", MISTAKES["usage"])
def test_wrong_usage_is_one_line_too(megatrain, expected):
    result = megatrain.refused(expected, *MISTAKES["usage"][expected].split())
    assert len(result.stderr.splitlines()) == 1 and not result.stdout


def test_a_command_alone_shows_its_help(megatrain):
    result = megatrain()
    assert result.exit_code == 2
    assert "Commands:" in result.output and "error:" not in result.output


def test_export_of_what_is_no_model_and_into_what_is_not_empty(megatrain, tmp_path):
    assert_refused(megatrain("export", tmp_path, "out"), "no finished model there")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert_refused(megatrain("export", tmp_path, tmp_path / "model"), "is not empty")
    assert not (tmp_path / "out").exists()


def test_a_path_that_cannot_be_used_is_bad_input(megatrain, trained, tmp_path):
    if Path("/proc").is_dir():
        told = "/proc/.out.partial: No such file"
        assert_refused(megatrain("export", trained[0], "/proc/out"), told)
    (tmp_path / "page.html").mkdir()
    result = megatrain("report", trained[0], "--output", tmp_path / "page.html")
    assert_refused(result, f"{tmp_path / 'page.html'}: Is a directory")


def test_the_version_can_be_asked_for(megatrain):
    result = megatrain("--version")
    assert (result.exit_code, result.stdout) == (0, f"megatrain {__version__}\n")


def test_debug_adds_the_traceback(megatrain):
    result = megatrain("--debug", "train", "none.yaml")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert "megatrain: error: none.yaml" in result.stderr


def test_a_bug_shows_its_traceback_and_ends_with_4(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["megatrain", "train", "x"])
    bug = patch.object(config, "load", side_effect=ZeroDivisionError)
    with bug, pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 4
    assert "ZeroDivisionError" in capsys.readouterr().err


# A run that cannot be prepared closes all engines that it has opened.


def noted(name):
    """A method of engines that notes its calls."""
    return patch.object(Engine, name, autospec=True, side_effect=getattr(Engine, name))


PAIRS = {"chosen": "the cat sat", "rejected": "a dog ran"}
GRPO = {"name": "grpo", "beta": 0.1, "num_generations": 2, "max_completion_length": 8}


@pytest.mark.parametrize(
    ("loss", "row", "broken", "number"),
    [
        ({"name": "dpo"}, PAIRS, (second_model, "logprobs"), 1),
        (GRPO, {"prompt": "the cat"}, (setup, "Rollouts"), 2),
    ],
    ids=["pass of the reference", "rollouts"],
)
def test_what_fails_leaves_no_engine_open(
    loss, row, broken, number, run_file, base, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def none(completions, **_): return [0.0]\n")
    rows = [row | {"prompt": f"{SENTENCES[each % 3]} {each}"} for each in range(20)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    chosen = {"data": {"path": str(data), "sequence_length": 48}, "training__eval_every": None}
    if loss["name"] == "grpo":
        chosen["rollout"] = {"rewards": ["rewards.py:none"]}
    change_run(run_file, model={"path": str(base)}, loss=loss, **chosen)
    fails = patch.object(*broken, side_effect=InputError("broken"))
    refused = pytest.raises(InputError, match="broken")
    with noted("__init__") as opened, noted("close") as closed, fails, refused:
        setup.prepare(load(run_file), ExitStack())
    engines = [{call.args[0] for call in calls.mock_calls} for calls in (opened, closed)]
    assert engines[0] == engines[1] and len(engines[0]) == number
