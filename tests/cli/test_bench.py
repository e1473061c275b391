"""The step benchmark: its shapes are the published ones and its result can be repeated."""

import json

import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from benchmarks import checkpoint, generation, preferences, rollouts, start
from benchmarks.configurations import CONFIGS
from benchmarks.step import app, statistics_of
from megatrain.cli.models import qwen2_config
from megatrain.optim import RULES
from tests.cli.cases import MISTAKES
from tests.inside import compiled_by
from tests.sweeps import few

# Parameters of the published checkpoints (the safetensors metadata on huggingface.co/Qwen).
PARAMETERS = {
    "0.5b": 494_032_768,
    "1.5b": 1_543_714_304,
    "3b": 3_085_938_688,
    "7b": 7_615_616_512,
    "14b": 14_770_033_664,
    "32b": 32_763_876_352,
    "72b": 72_706_203_648,
}


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Runs `python -m benchmarks.step` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *options: CliRunner().invoke(app, [str(option) for option in options])


@pytest.mark.parametrize("name", few(PARAMETERS, 0, 3))
def test_a_shape_has_the_parameters_of_the_published_model(name):
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(qwen2_config(name))
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def measured(measure, folder, *options, code=0):
    """What is written of two steps of one layer, after one that warms up."""
    toy = ["--shape", "toy", "--layers", 1, "--device", "cpu", "--precision", "fp32", "--steps", 2]
    rows = ["--sequences", 2, "--sequence-length", 8, "--micro-batch", 1]
    result = measure(*toy, *rows, "--output", folder / "step.json", *options)
    assert result.exit_code == code, result.output
    return result, json.loads((folder / "step.json").read_text())


def test_a_measurement_carries_what_repeats_it(measure, tmp_path):
    result, written = measured(measure, tmp_path, "--warmup", 1)
    assert written["count"] == 2
    assert len(written["step_seconds"]) == 3
    assert written["min_seconds"] <= written["median_seconds"] <= written["max_seconds"]
    assert written["case"]["sequences"] == 2
    matrices, biases, norms = 256 * (2 * 256 + 2 * 128 + 3 * 704), 256 + 2 * 128, 2 * 256
    layer = matrices + biases + norms
    assert written["parameters"] == layer + 4096 * 256 + 256
    expected = 6 * written["parameters"] * 16 / written["median_seconds"] / 1e12
    assert written["model_tflops"] == pytest.approx(expected)
    assert written["environment"]["packages"]["torch"]
    assert "model TFLOPS" in result.stdout
    assert written["compilations"] == written["recompilations_after_warmup"] == 0
    assert written["breakdown"]["busy"]["compute"] > 0


@pytest.mark.parametrize("rule", few(RULES, 2))
def test_steps_of_each_rule_are_measured_with_planes_on_a_disk(measure, tmp_path, rule):
    on_disk = ["--placement", "disk_moments=9", "--placement", "disk_remainder=9"]
    options = ["--optimizer", rule, *on_disk, "--disk", tmp_path, "--precision", "bf16"]
    _, written = measured(measure, tmp_path, *options, "--warmup", 0)
    assert written["case"]["optimizer"] == rule
    assert written["breakdown"]["busy"]["disk out"] > 0
    if rule != "adamw":
        refused, _ = measured(measure, tmp_path, *options, "--states", "int8", code=2)
        assert f"{rule} has no such choice" in refused.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("warmup", [0, 1])
def test_compilations_in_measured_steps_are_warned_of(measure, tmp_path, monkeypatch, warmup):
    torch.compiler.reset()
    compiled_by(monkeypatch, "eager")
    options = ["--placement", "compile=true", "--warmup", warmup]
    result, written = measured(measure, tmp_path, *options)
    assert written["compilations"] == 2  # the one kind; the loss
    assert written["recompilations_after_warmup"] == (0 if warmup else 2)
    assert ("2 compilations after the warm-up" in result.stderr) == (warmup == 0)


TOY = ["--shape", "toy", "--device", "cpu", "--out", "out.json"]
ROWS = ["--sequences", "4", "--sequence-length", "8", "--steps", "1", "--warmup", "0"]
REPLIES = ["--prompts", "1", "--replies", "2", "--prompt", "8", "--new", "2", *ROWS[4:]]
TEXTS = ["--rows", "2", "--prompt", "4", "--new", "3", "--repeats", "1"]


def test_saves_are_measured_beside_steps(tmp_path, capsys):
    saves = ["--steps", "2", "--saves", "1", "--folder", str(tmp_path / "saves"), "--layers", "1"]
    toy = [*TOY[:4], *ROWS[:4], "--micro-batch", "1", "--warmup", "1", "--precision", "fp32"]
    output = ["--placement", "slots=2", "--output", str(tmp_path / "result.json")]
    checkpoint.main([*toy, *saves, *output])
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["placement"]["slots"] == 2
    assert written["count"] == 2 and len(written["saves"]) == 1
    assert written["saves"][0]["bytes"] > 12 * written["parameters"]
    assert written["resume"]["same"]
    assert "went on bit for bit" in capsys.readouterr().out
    assert not (tmp_path / "saves").exists()


@pytest.mark.parametrize(
    ("benchmark", "case"), [(generation, TEXTS), (preferences, ROWS), (rollouts, REPLIES)]
)
def test_each_benchmark_measures_a_toy(benchmark, case, tmp_path, monkeypatch, capsys):
    """Generation beside that of transformers, DPO beside plain steps, and stages of rollouts."""
    monkeypatch.chdir(tmp_path)
    benchmark.main([*TOY, *case])
    found, said = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    assert found["environment"]["packages"]["torch"]
    if benchmark is generation:
        assert found["resident"]["logits_off"] == found["streamed"]["logits_off"] == 0.0
        assert "toy: transformers " in said
    elif benchmark is preferences:
        assert found["rate"] == found["sft"]["median_seconds"] / found["dpo"]["median_seconds"]
        assert "DPO has " in said
    else:
        [step] = found["steps"]
        assert step["total"] >= step["generate"] + step["logprobs"] + step["train"] > 0


def test_a_mixture_generates_with_whole_layers_and_with_chosen_experts(
    tmp_path, monkeypatch, capsys
):
    sizes = {"hidden_size": 64, "head_dim": 16, "vocab_size": 512, "moe_intermediate_size": 64}
    sizes |= {"num_experts": 16, "num_experts_per_tok": 2}
    monkeypatch.setitem(CONFIGS, "toy", CONFIGS["qwen3-30b-a3b"] | sizes)
    monkeypatch.chdir(tmp_path)
    generation.main([*TOY, *TEXTS, "--layers", "2", "--base", "nf4"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["chosen"]["pass_bytes"] < 0.7 * found["whole"]["pass_bytes"]
    assert "the same tokens" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_start_ends_with_its_first_step(tmp_path):
    rows = ["--sequences", "2", "--sequence-length", "8", "--runs", "1"]
    files = ["--folder", str(tmp_path / "model"), "--out", str(tmp_path / "out.json")]
    start.main(["--shape", "toy", "--device", "cpu", *rows, *files])
    found = json.loads((tmp_path / "out.json").read_text())
    [stages] = found["runs"]
    assert 0 < stages["imports"] < stages["engine"] < stages["first step"] < stages["second step"]
    assert found["median_seconds"] == stages["first step"]


@pytest.mark.parametrize("problem", MISTAKES["bench"])
def test_a_wrong_placement_is_refused(measure, problem):
    choice = MISTAKES["bench"][problem]
    result = measure("--shape", "0.5b", "--placement", choice)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert f"megatrain: error: --placement {choice}: {problem}" in result.stderr


def test_frozen_parameters_have_no_gradient_to_compute():
    found = statistics_of([2.0], tokens=10, parameters=1000, trained=100)
    assert found["model_tflops"] == (4 * 1000 + 2 * 100) * 10 / 2 / 1e12
    assert statistics_of([2.0], 10, 1000, 1000)["model_tflops"] == 6 * 1000 * 10 / 2 / 1e12
