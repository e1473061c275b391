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


@pytest.mark.parametrize(
    ("family", "precision"),
    few([(f, p) for f in ("deepseek_v3", "afmoe") for p in ("fp32", "bf16")], 0, 1, 3),
)
def test_what_is_not_trained_is_exported_as_it_came(family, precision, tmp_path):
    """Buffers, and weights that a class freezes, here stored in another dtype than all others.

    After a step, by the engine and out of a checkpoint whose source is gone.
    """
    folder = saved(family, tmp_path / "folder")
    kept = [n for n, p in tiny_model(family).named_parameters() if not p.requires_grad]
    rewrite(folder, {n: stored(folder)[n].float() + 0.123456789 for n in kept})
    source = stored(folder)
    kept += [name for name in source if name.endswith("e_score_correction_bias")]
    assert kept and all(source[name].dtype == torch.float32 for name in kept)
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
        assert all(torch.equal(got[n], source[n]) for n in kept)


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
