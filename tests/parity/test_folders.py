"""Models from folders: buffers as transformers loads them, and what is not trained as it came."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain import AdamW, Engine, InputError
from megatrain.train.export import export
from tests.families.plain import make_steps
from tests.families.tiny import tiny_model
from tests.sweeps import few

BIASES = torch.tensor([7.0014, 7.0071, -7.0043])  # in bf16 all are 7


def stored(folder):
    return load_file(folder / "model.safetensors")


def rewrite(folder, changes):
    save_file(stored(folder) | changes, folder / "model.safetensors", metadata={"format": "pt"})


def saved(family, folder):
    """A bf16 folder whose floating buffers are stored in float32 and mean something there."""
    model = tiny_model(family)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.to(torch.bfloat16).save_pretrained(folder)
    rewrite(
        folder,
        {
            name: BIASES.repeat(len(values.flatten()))[: values.numel()].view(values.shape)
            for name, values in stored(folder).items()
            if name not in parameters and name.endswith("bias")
        },
    )
    return folder


def opened(folder, precision):
    return Engine(folder, optimizer=AdamW(), precision=precision, device="cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_not_trained_is_exported_as_it_came(precision, tmp_path):
    """After a step, by the engine and out of a checkpoint whose source is gone."""
    folder = saved("deepseek_v3", tmp_path / "folder")
    source = stored(folder)
    with opened(folder, precision) as engine:
        engine.step(make_steps(engine.config)[0])
        engine.save_pretrained(tmp_path / "exported")
        engine.save(tmp_path / "saved")
    shutil.rmtree(folder)
    with Engine.load(tmp_path / "saved", device="cpu") as again:
        again.save_pretrained(tmp_path / "resumed")
    export(str(tmp_path / "saved"), tmp_path / "out")
    for name in ("exported", "resumed", "out"):
        got = stored(tmp_path / name)
        assert {n: (t.dtype, t.shape) for n, t in got.items()} == {
            n: (t.dtype, t.shape) for n, t in source.items()
        }
        kept = [n for n, t in source.items() if n.endswith("e_score_correction_bias")]
        assert kept
        assert all(source[n].dtype == torch.float32 for n in kept)
        assert all(torch.equal(got[n], source[n]) for n in kept)


@pytest.mark.parametrize("precision", few(["fp32", "bf16"], 1))
def test_frozen_weights_keep_dtype_and_bits(precision, tmp_path):
    """Parameters of a class that freezes them, stored in another dtype than all others."""
    folder = saved("afmoe", tmp_path / "folder")
    frozen = [n for n, p in tiny_model("afmoe").named_parameters() if not p.requires_grad]
    assert frozen
    rewrite(folder, {n: stored(folder)[n].float() + 0.123456789 for n in frozen})
    source = stored(folder)
    with opened(folder, precision) as engine:
        engine.step(make_steps(engine.config)[0])
        engine.save_pretrained(tmp_path / "exported")
        engine.save(tmp_path / "saved")
    with Engine.load(tmp_path / "saved", device="cpu") as again:
        again.save_pretrained(tmp_path / "resumed")
    export(str(tmp_path / "saved"), tmp_path / "out")
    for name in ("exported", "resumed", "out"):
        got = stored(tmp_path / name)
        assert all(got[n].dtype == source[n].dtype for n in source)
        assert all(torch.equal(got[n], source[n]) for n in frozen)


def test_rounded_weights_are_not_exported_as_the_source(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "folder")
    with Engine(tmp_path / "folder", precision="bf16", device="cpu") as engine:
        with pytest.raises(InputError, match=r"rounded its weights; export with dtype"):
            engine.save_pretrained(tmp_path / "out")
        engine.save_pretrained(tmp_path / "out", dtype=torch.bfloat16)
        engine.save(tmp_path / "saved")
    export(str(tmp_path / "saved"), tmp_path / "again")
    for name in ("out", "again"):
        assert {t.dtype for t in stored(tmp_path / name).values()} == {torch.bfloat16}
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["dtype"] == "bfloat16"


def test_float64_weights_that_no_master_can_hold_are_refused(tmp_path):
    tiny_model("llama").double().save_pretrained(tmp_path / "folder")
    with Engine(tmp_path / "folder", precision="fp32", device="cpu"):
        pass  # each is a float32 all the same
    name = "model.norm.weight"
    rewrite(tmp_path / "folder", {name: stored(tmp_path / "folder")[name] + 1e-12})
    with pytest.raises(InputError, match=rf"'{name}' has float64 values.*float32"):
        Engine(tmp_path / "folder", precision="fp32", device="cpu")
