"""A checkpoint of an adapter leaves out its base, and knows it again."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatrain import Engine, InputError
from megatrain.checkpoint import open_checkpoint
from megatrain.config import ModelSection
from megatrain.model.trained import Trained
from megatrain.train.export import export
from megatrain.train.resolve import ResolvedModel
from tests.parity.cases import (
    in_dtype,
    llama,
    make_batches,
    make_engine,
    masters,
    qwen2,
    resumes,
    same,
)
from tests.sweeps import few

LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
STEPS = make_batches(2)


@pytest.fixture
def base(tmp_path):
    in_dtype(llama(num_hidden_layers=2), torch.bfloat16).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def trained(model, saved, **how):
    """A step, a save, and a step; that one's loss, and all masters in the end."""
    with make_engine(model, adapter=LORA, precision="bf16", **how) as engine:
        engine.step(STEPS[0])
        engine.save(saved)
        return engine.step(STEPS[1]).loss, masters(engine)


@pytest.mark.parametrize("packed", few(["nf4", "bf16"]))
def test_a_run_goes_on_to_the_bit(packed, base, tmp_path):
    loss, wanted = trained(base, tmp_path / "saved", base=packed)
    saved = open_checkpoint(tmp_path / "saved")
    held = {each.name for tile in saved.manifest.tiles for each in tile.parameters}
    assert held and all("lora_" in name for name in held)
    num_bytes = sum(each.num_bytes for each in saved.manifest.files.values())
    assert num_bytes < 14 * sum(wanted[name].numel() for name in held) + 60_000
    for folder in (tmp_path / "saved", tmp_path / "again"):
        with Engine.load(folder, device="cpu") as engine:
            engine.save(tmp_path / "again")
            assert engine.step(STEPS[1]).loss == loss
            assert same(masters(engine), wanted)


@pytest.mark.parametrize("packed", few(["bf16", "nf4"]))
def test_its_weights_and_its_merged_model_are_whole(packed, base, tmp_path):
    with make_engine(base, adapter=LORA, precision="bf16", base=packed) as engine:
        engine.step(STEPS[0])
        engine.save(tmp_path / "saved")
        engine.save_pretrained(tmp_path / "merged", merged=True)
        wanted = masters(engine)
    with make_engine(tmp_path / "saved") as opened:
        assert same(masters(opened), wanted)
    with (
        Engine(tmp_path / "saved", precision="fp32", device="cpu") as opened,
        opened.whole_model(spare=0) as model,
    ):
        assert same(dict(model.named_parameters()), wanted)
    export(str(tmp_path / "saved"), tmp_path / "exported", merged=True)
    parts = [load_file(tmp_path / n / "model.safetensors") for n in ("merged", "exported")]
    assert same(*parts)


def test_a_base_that_has_changed_or_gone_is_refused(base, tmp_path):
    saved, file = tmp_path / "saved", base / "model.safetensors"
    trained(base, saved)
    values = load_file(file)
    values["model.layers.1.mlp.up_proj.weight"][3, 5] *= 1.01
    save_file(values, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"{base}: its weights are not those that {saved} was"):
        Engine.load(saved, device="cpu")
    with pytest.raises(InputError, match="put the base back"):
        make_engine(saved)
    shutil.rmtree(base)
    with pytest.raises(InputError, match="its base cannot be read: .*base is not there"):
        Engine.load(saved, device="cpu")


@pytest.mark.parametrize("packed", few(["nf4", "bf16"]))
def test_a_base_that_has_moved_is_linked(packed, base, tmp_path):
    saved, there = tmp_path / "saved", tmp_path / "there"
    loss, wanted = trained(base, saved, base=packed)
    base.rename(there)
    with pytest.raises(InputError, match="base is not there; put the base back .* a link in its"):
        Engine.load(saved, device="cpu")
    base.symlink_to(there)
    with Engine.load(saved, device="cpu") as engine:
        assert engine.step(STEPS[1]).loss == loss
        assert same(masters(engine), wanted)
    larger = llama(hidden_size=64, num_hidden_layers=2)
    in_dtype(larger, torch.bfloat16).save_pretrained(tmp_path / "larger")
    base.unlink()
    base.symlink_to(tmp_path / "larger")
    with pytest.raises(InputError, match="base: is not the base that .*shape.*put the base back"):
        Engine.load(saved, device="cpu")


@pytest.mark.parametrize("what", few(["part of the adapter", "a model"]))
def test_what_is_no_file_s_is_saved(what, base, tmp_path):
    model, how = AutoModelForCausalLM.from_pretrained(base), {}
    if what == "part of the adapter":
        model, how = base, {"trained": Trained(freeze=("lora_A",))}
    with make_engine(model, adapter=LORA, precision="bf16", **how) as engine:
        engine.step(STEPS[0])
        resumes(engine, tmp_path / "saved", STEPS[1:])
    assert open_checkpoint(tmp_path / "saved").settings.left_out is None


def test_parts_of_the_base_that_are_trained_are_saved(tmp_path):
    qwen2().save_pretrained(tmp_path / "base")
    lora = {"target_modules": ["q_proj"], "modules_to_save": ["norm"], "bias": "all"}
    with make_engine(tmp_path / "base", adapter=lora) as engine:
        engine.step(STEPS[0])
        resumes(engine, tmp_path / "saved", STEPS[1:])


def test_a_base_that_has_an_adapter_is_refused(base, tmp_path):
    trained(base, tmp_path / "saved")
    with make_engine(base, adapter=LORA) as engine:
        engine.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(file.read_text().replace(str(base), str(tmp_path / "saved")))
    with pytest.raises(InputError, match="saved has an adapter itself; merge that first"):
        make_engine(tmp_path / "adapter")
    text = file.read_text().replace(str(tmp_path / "saved"), "BASE")
    shutil.copytree(tmp_path / "adapter", tmp_path / "other")
    for one, base_of_it in (("adapter", "other"), ("other", "adapter")):
        named = text.replace("BASE", str(tmp_path / base_of_it))
        (tmp_path / one / "adapter_config.json").write_text(named)
    with pytest.raises(InputError, match="other has an adapter itself; merge that first"):
        ResolvedModel.of(ModelSection(path=str(tmp_path / "adapter")))


def test_a_base_that_is_gone_when_the_run_saves_is_saved(base, tmp_path):
    with make_engine(base, adapter=LORA, precision="bf16") as engine:
        engine.step(STEPS[0])
        shutil.rmtree(base)
        engine.save(tmp_path / "saved")
        wanted = masters(engine)
    with Engine.load(tmp_path / "saved", device="cpu") as again:
        assert same(masters(again), wanted)
