"""What a model's folder has and training does not touch is in every export, bit for bit."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import save_file

from megatrain import AdamW, Engine, InputError
from megatrain.checkpoint import open_checkpoint
from megatrain.checkpoint.manifest import signed
from megatrain.source.write_model import write_saved
from megatrain.train.export import export
from tests.families.folders import tensors_of
from tests.families.tiny import tiny_config
from tests.refusals import refused
from tests.sweeps import few

IDS = torch.arange(4, 20).view(2, 8)
STEP = [{"input_ids": IDS, "labels": IDS}]
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "chat_template.jinja")
WHOLE = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "llava": "LlavaForConditionalGeneration",
}


def predicts_further(family, count):
    """Tensors as of layers that predict further tokens: several dtypes, and one for each expert."""
    start = {"qwen3_5": "mtp.layers.0", "deepseek_v3": f"model.layers.{count}"}.get(family)
    if start is None:
        return {}
    names = [f"mlp.experts.{n}.{kind}_proj.weight" for n in range(2) for kind in ("gate", "up")]
    named = {f"{start}.{name}": torch.randn(3, 5, dtype=torch.bfloat16) for name in names}
    return named | {f"{start}.eh_proj.weight": torch.randn(7), f"{start}.count": torch.arange(3)}


@pytest.fixture
def folder(request, tmp_path):
    """A folder as the hub has it, of a model with more than is trained on text."""
    config = tiny_config(request.param)
    count = config.get_text_config().num_hidden_layers
    config.num_nextn_predict_layers = 1
    model = getattr(transformers, WHOLE[request.param])._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path := tmp_path / "model")
    more = predicts_further(request.param, count)
    save_file(tensors_of(path) | more, path / "model.safetensors", metadata={"format": "pt"})
    for name in PROCESSORS:
        (path / name).write_text("{}")
    return path


def assert_carried(out, source, config):
    """All tensors under their names; what is not of the text model as it was."""
    written = tensors_of(out)
    assert written.keys() == source.keys()
    changed = {name for name, each in written.items() if not torch.equal(each, source[name])}
    assert changed
    assert not [n for n in changed if "vis" in n or n.startswith("mtp.") or "layers.3." in n]
    assert all(each.dtype == source[name].dtype for name, each in written.items())
    exported = json.loads((out / "config.json").read_text())
    for key in ("model_type", "architectures"):
        assert exported[key] == config[key]
    assert config.keys() - {"use_cache"} <= exported.keys()
    for name in PROCESSORS:
        assert (out / name).is_file()


def engine(model, **options):
    return Engine(model, optimizer=AdamW(lr=1e-1), precision="fp32", device="cpu", **options)


@pytest.mark.parametrize("folder", few(sorted(WHOLE), 1, 2), indirect=True)
def test_everything_is_exported_though_the_folder_has_gone(folder, tmp_path):
    source, config = tensors_of(folder), json.loads((folder / "config.json").read_text())
    towers = sum(each.numel() for name, each in source.items() if "vis" in name)
    with engine(folder) as first:
        assert first.computing[0] <= first.num_parameters - towers
        first.step(STEP)
        shutil.rmtree(folder)
        for _ in range(2):  # the second takes the place of the first
            first.save(tmp_path / "checkpoint")
        first.save_pretrained(tmp_path / "out")
        first.step(STEP)
        first.save_pretrained(tmp_path / "two steps")
    assert_carried(tmp_path / "out", source, config)
    write_saved(open_checkpoint(tmp_path / "checkpoint"), tmp_path / "saved")
    assert_carried(tmp_path / "saved", source, config)
    with Engine.load(tmp_path / "checkpoint", device="cpu") as resumed:
        shutil.rmtree(tmp_path / "checkpoint")
        resumed.step(STEP)
        resumed.save_pretrained(tmp_path / "resumed")
    for name, each in tensors_of(tmp_path / "two steps").items():
        assert torch.equal(tensors_of(tmp_path / "resumed")[name], each)
    kind = getattr(transformers, config["architectures"][0])
    kind.from_pretrained(tmp_path / "out", dtype=torch.float32)(input_ids=IDS)


@pytest.mark.parametrize("folder", few(sorted(WHOLE), 2), indirect=True)
def test_merged_adapters_are_exported_with_everything(folder, tmp_path):
    source, config = tensors_of(folder), json.loads((folder / "config.json").read_text())
    with engine(folder, adapter={"r": 2, "target_modules": ["o_proj"]}) as trained:
        trained.step(STEP)
        trained.save(tmp_path / "checkpoint")
        trained.save_pretrained(tmp_path / "adapter")
        trained.save_pretrained(tmp_path / "merged", merged=True)
    assert "carried.safetensors" not in {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert_carried(tmp_path / "merged", source, config)
    write_saved(open_checkpoint(tmp_path / "checkpoint"), tmp_path / "saved", merged=True)
    assert_carried(tmp_path / "saved", source, config)
    export(str(tmp_path / "adapter"), tmp_path / "exported", merged=True)
    assert_carried(tmp_path / "exported", source, config)


@pytest.mark.parametrize("folder", ["deepseek_v3"], indirect=True)
def test_a_base_whose_carried_tensors_have_changed_is_refused(folder, tmp_path):
    with engine(folder, adapter={"r": 2, "target_modules": ["o_proj"]}) as trained:
        for name in ("checkpoint", "as before"):
            trained.step(STEP)
            trained.save(tmp_path / name)
    manifest = tmp_path / "as before" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["settings"]["left_out"]["carried"]
    manifest.write_text(json.dumps(signed(content)))
    tensors = tensors_of(folder)
    tensors["model.layers.3.eh_proj.weight"][2] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = f"{folder}: its weights are not those that {tmp_path / 'checkpoint'} was trained on"
    with pytest.raises(InputError, match=said):
        Engine.load(tmp_path / "checkpoint", device="cpu")
    with pytest.raises(InputError, match=said):
        saved = open_checkpoint(tmp_path / "checkpoint")
        write_saved(saved, tmp_path / "saved", merged=True)
    with Engine.load(tmp_path / "as before", device="cpu") as again:
        again.step(STEP)


@pytest.mark.parametrize(
    ("family", "architecture", "said"),
    [
        ("bert", "BertForMaskedLM", "names BertForMaskedLM"),
        ("gpt2", "GPT2DoubleHeadsModel", "names GPT2DoubleHeadsModel"),
        ("bart", "BartForConditionalGeneration", "names BartForConditionalGeneration"),
        ("qwen3_5", "Qwen3_5ForCausalLM", "let architectures in config.json name Qwen3_5ForCond"),
        ("qwen3_5", None, "let architectures in config.json name Qwen3_5ForConditionalGeneration"),
    ],
)
def test_models_of_other_kinds_are_refused(family, architecture, said, tmp_path):
    config = tiny_config(family)
    config.architectures = None if architecture is None else [architecture]
    config.save_pretrained(tmp_path)
    with refused(said):
        engine(tmp_path)
