"""A run that trains an adapter: what it writes, how it goes on, and what is made of it."""

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatrain.telemetry.metrics import model_tflops, read_metrics
from tests.cli.cases import sets

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
LORA = {"method": "lora", "r": 4, "target_modules": "all-linear", "lora_dropout": 0.1}


@pytest.fixture
def adapter_file(run_file, base):
    """The run file, of an adapter on a folder."""
    tree = yaml.safe_load(run_file.read_text())
    tree["model"], tree["adapter"] = {"path": str(base)}, LORA
    run_file.write_text(yaml.safe_dump(tree))
    return run_file


def test_an_adapter_is_trained_resumed_and_merged(megatrain, adapter_file, base, tmp_path):
    def trained(folder, *options):
        megatrain.done("train", adapter_file, *sets(output__folder=str(folder)), *options)
        return load_file(folder / "model" / "adapter_model.safetensors")

    run, length = tmp_path / "run", sets(training__steps=4)
    whole = trained(tmp_path / "whole", *length)
    trained(run, *sets(training__steps=2))
    parts = trained(run, *length, "--resume")
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    assert any(values.any() for name, values in whole.items() if "lora_B" in name)

    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run / "model")
    sizes = loaded.num_parameters(), sum(values.numel() for values in whole.values())
    for step in (r for r in read_metrics(run / "metrics.jsonl") if "model_tflops" in r):
        assert step["model_tflops"] == pytest.approx(
            model_tflops(*sizes, step["tokens"], step["seconds"]), rel=1e-3, abs=1e-6
        )
    ids = torch.arange(8)[None]
    with torch.no_grad():
        wanted = loaded(ids).logits
    for name, source in {"finished": run, "saved": run / "checkpoints" / "step-00000004"}.items():
        megatrain.done("export", source, tmp_path / name, "--merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        with torch.no_grad():
            assert torch.allclose(merged(ids).logits, wanted, atol=1e-5)
    assert megatrain("export", run, tmp_path / "alone").exit_code == 0
    options = [
        "--prompt", "cat", "--temperature", "0", "--max-new-tokens", "4", "--device", "cpu",
        "--precision", "fp32",
    ]  # fmt: skip
    said = [megatrain("generate", each, *options) for each in (run, tmp_path / "finished")]
    assert [each.exit_code for each in said] == [0, 0], said[0].output
    assert said[0].stdout == said[1].stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("tokenizer", [True, False])
def test_a_run_begins_with_the_adapter_of_another(
    tokenizer, megatrain, adapter_file, base, tmp_path
):
    def trained(name, **changes):
        run = sets(output__folder=str(tmp_path / name), training__steps=2, **changes)
        megatrain.done("train", adapter_file, *run)
        return load_file(tmp_path / name / "model" / "adapter_model.safetensors")

    first = trained("first")
    start = tmp_path / "first"
    if not tokenizer:  # a folder as PEFT writes it
        start = tmp_path / "theirs"
        model = AutoModelForCausalLM.from_pretrained(base)
        PeftModel.from_pretrained(model, tmp_path / "first" / "model").save_pretrained(start)
    tree = yaml.safe_load(adapter_file.read_text())
    del tree["adapter"]
    adapter_file.write_text(yaml.safe_dump(tree))
    goes_on = {"model__path": str(start), "optimizer__lr": 1e-9}
    second = trained("second", **goes_on)
    assert second.keys() == first.keys()
    assert all(torch.allclose(second[n], first[n], atol=1e-6) for n in first)
    assert (tmp_path / "second" / "model" / "tokenizer.json").exists()
    options = ("--gpu", "4090", "--host-memory", "64GiB", "--cores", "8", "--json")
    chosen = {"engine__precision": "bf16", "engine__device": "auto", **goes_on}
    plan = yaml.safe_load(megatrain("plan", adapter_file, *sets(**chosen), *options).stdout)
    layers = next(tile for tile in plan["tiles"] if tile["name"].startswith("layer"))
    assert 0 < layers["planes"]["moments"] < layers["planes"]["weights"]
    told = "leave adapter out to go on with that one"
    megatrain.refused(told, "train", adapter_file, *sets(**goes_on, adapter=LORA))


def test_a_plan_knows_the_adapter(megatrain, adapter_file):
    options = ("--gpu", "4090", "--host-memory", "64GiB", "--cores", "8", "--json")
    chosen = sets(engine__precision="bf16", engine__device="auto")
    result = megatrain.done("plan", adapter_file, *chosen, *options)
    told = yaml.safe_load(result.stdout)
    step = told["forecast"]
    usual = 6 * step["parameters"] * step["tokens_per_second"] / 1e12
    assert 0.66 < step["model_tflops"] / usual < 0.9  # no gradients of what is frozen
    layers = next(tile for tile in told["tiles"] if tile["name"].startswith("layer"))
    assert 0 < layers["planes"]["moments"] < layers["planes"]["weights"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"adapter__target_modules": ["nope"]}, "nope"),
        ({"engine__precision": "fp8", "adapter__use_dora": True}, "use_dora needs"),
        ({"model__train_only": ["lora", "norm"]}, "trained beside the adapter"),
    ],
)
def test_a_bad_adapter_is_refused_in_a_line(megatrain, adapter_file, changes, said):
    megatrain.refused(said, "train", adapter_file, *sets(**changes))
