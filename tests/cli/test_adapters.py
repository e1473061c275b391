"""A run that trains an adapter: what it writes, how it goes on, and what is made of it."""

import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatrain import Engine, InputError
from megatrain.telemetry.metrics import model_tflops
from tests.cli.cases import MISTAKES, change_run, records, sets

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
HERE = ("--gpu", "4090", "--host-memory", "64GiB", "--cores", "8")
LORA = {"method": "lora", "r": 4, "target_modules": "all-linear", "lora_dropout": 0.1}


@pytest.fixture
def adapter_file(run_file, base):
    """The run file, of an adapter on a folder."""
    return change_run(run_file, model={"path": str(base)}, adapter=LORA)


def test_an_adapter_is_trained_resumed_and_merged(megatrain, adapter_file, base, tmp_path):
    file = "adapter_model.safetensors"
    _, run = megatrain.resumed(adapter_file, 4, 2, name=file)
    whole = load_file(run / "model" / file)
    assert any(values.any() for name, values in whole.items() if "lora_B" in name)

    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run / "model")
    sizes = loaded.num_parameters(), sum(values.numel() for values in whole.values())
    for step in records(run, "model_tflops"):
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
    loaded.save_pretrained(tmp_path / "bare")  # without the tokenizer, which is the base's
    options = [
        "--prompt", "cat", "--temperature", "0", "--max-new-tokens", "4", "--device", "cpu",
        "--precision", "fp32",
    ]  # fmt: skip
    sources = (run, tmp_path / "finished", tmp_path / "bare")
    said = [megatrain.done("generate", each, *options).stdout for each in sources]
    assert said[0] == said[1] == said[2]


def test_a_finished_run_takes_no_other_base(megatrain, adapter_file, base, tmp_path):
    shutil.copytree(base, tmp_path / "moves")
    changes = sets(model__path=str(tmp_path / "moves"), training__steps=1)
    megatrain.done("train", adapter_file, *changes, *sets(training__eval_every=None))
    file, run = tmp_path / "moves" / "model.safetensors", tmp_path / "run"
    megatrain.done("export", run, tmp_path / "right", "--merged")
    save_file({n: 2 * v for n, v in load_file(file).items()}, file, {"format": "pt"})
    told = f"{tmp_path / 'moves'}: its weights are not those that {run}"
    for each in (run, run / "model"):
        megatrain.refused(told, "export", each, tmp_path / "wrong", "--merged")
        megatrain.refused(told, "generate", each, "--prompt", "cat", "--device", "cpu")
        begun = sets(model__path=str(each), output__folder=str(tmp_path / "begun"))
        megatrain.refused(told, "train", change_run(adapter_file, adapter={}), *begun)
    taught = {"name": "distill", "teacher": str(run), "top_k": 5}
    megatrain.refused(told, "train", adapter_file, *sets(loss=taught, output__folder="taught"))
    with pytest.raises(InputError, match=told):
        Engine(run / "model", device="cpu")
    assert not (tmp_path / "wrong").exists()


def test_a_finished_run_finds_its_base_where_its_adapter_says(
    megatrain, adapter_file, base, tmp_path
):
    shutil.copytree(base, tmp_path / "old")
    changes = sets(model__path=str(tmp_path / "old"), training__steps=1)
    megatrain.done("train", adapter_file, *changes, *sets(training__eval_every=None))
    (tmp_path / "old").rename(tmp_path / "new")
    config = tmp_path / "run" / "model" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(tmp_path / "old"), str(tmp_path / "new")))
    megatrain.done("export", tmp_path / "run", tmp_path / "whole", "--merged")


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
    change_run(adapter_file, adapter={})
    goes_on = {"model__path": str(start), "optimizer__lr": 1e-9}
    second = trained("second", **goes_on)
    assert second.keys() == first.keys()
    assert all(torch.allclose(second[n], first[n], atol=1e-6) for n in first)
    assert (tmp_path / "second" / "model" / "tokenizer.json").exists()
    chosen = {"engine__precision": "bf16", "engine__device": "auto", **goes_on}
    assert_adapter_is_planned(megatrain.planned(adapter_file, *HERE, *sets(**chosen)))
    told = "leave adapter out to go on with that one"
    megatrain.refused(told, "train", adapter_file, *sets(**goes_on, adapter=LORA))


def assert_adapter_is_planned(plan):
    layers = next(tile for tile in plan["tiles"] if tile["name"].startswith("layer"))
    assert 0 < layers["planes"]["moments"] < layers["planes"]["weights"]


def test_a_plan_knows_the_adapter_of_a_run_file_and_of_a_folder(
    megatrain, adapter_file, base, tmp_path
):
    chosen = sets(engine__precision="bf16", engine__device="auto")
    told = megatrain.planned(adapter_file, *chosen, *HERE)
    step = told["forecast"]
    usual = 6 * step["parameters"] * step["tokens_per_second"] / 1e12
    assert 0.66 < step["model_tflops"] / usual < 0.9  # no gradients of what is frozen
    assert_adapter_is_planned(told)
    config = LoraConfig(r=4, target_modules=["q_proj", "not_there"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(tmp_path / "a")
    chosen += sets(model__path=str(tmp_path / "a"))
    file = change_run(adapter_file, adapter={})
    assert_adapter_is_planned(megatrain.planned(file, *chosen, *HERE))


@pytest.mark.parametrize("told", MISTAKES["adapter"])
def test_a_bad_adapter_is_refused_in_a_line(megatrain, adapter_file, told):
    megatrain.refused(told, "train", adapter_file, *sets(**MISTAKES["adapter"][told]))
