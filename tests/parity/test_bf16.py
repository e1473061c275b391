"""bf16 computes, fp32 learns: small steps are not lost, and files have their source's dtype."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain import AdamW, Engine, InputError
from megatrain.train.export import export
from tests.families.plain import make_steps
from tests.families.tiny import tiny_model
from tests.parity.cases import in_dtype, llama, make_batches, make_engine, masters, parameters, same
from tests.sweeps import few, swept

RATE, STEPS = 1e-6, 50


def moved(after, before):
    """The way of all weight matrices (norms, at exactly 1, are a case of their own)."""
    names = [name for name in before if "norm" not in name]
    return torch.cat([(after[name].float() - before[name].float()).flatten() for name in names])


def test_small_steps_move_the_masters_where_bf16_alone_stalls():
    model, [step] = llama(num_hidden_layers=1, hidden_size=16), make_batches(1, ((2, 8),))
    model.load_state_dict({name: p.bfloat16().float() for name, p in model.state_dict().items()})
    before = parameters(model)
    finals = {}
    for precision in ("bf16", "fp32"):
        optimizer = AdamW(lr=RATE, weight_decay=0.0)
        engine = Engine(model, optimizer=optimizer, precision=precision, device="cpu")
        for _ in range(STEPS):
            engine.step(step)
        finals[precision] = moved(masters(engine), before)
    # As far as in fp32, and the same way: gradients in bf16 leave some signs near zero open.
    assert finals["bf16"].norm() == pytest.approx(float(finals["fp32"].norm()), rel=0.05)
    assert torch.cosine_similarity(finals["bf16"], finals["fp32"], dim=0) > 0.95
    assert finals["bf16"].abs().max() > 0.9 * RATE * STEPS

    stalled = model.bfloat16()
    plain = torch.optim.AdamW(stalled.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(STEPS):
        stalled(**step[0]).loss.backward()
        torch.nn.utils.clip_grad_norm_(stalled.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
    assert moved(parameters(stalled), before).norm() < 0.5 * finals["fp32"].norm()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masters_are_the_source_s_values(dtype, precision):
    model = in_dtype(llama(), dtype)
    wanted = {name: p.float() for name, p in parameters(model).items()}
    got = masters(make_engine(model, precision=precision))
    assert all(master.dtype == torch.float32 for master in got.values())
    assert same(got, wanted)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_masters_are_copies(precision):
    engine, [step] = make_engine(llama(), precision=precision), make_batches(1)
    before = masters(engine)
    kept = {name: master.clone() for name, master in before.items()}
    engine.step(step)
    assert same(before, kept)
    for master in before.values():
        master.zero_()
    assert not any(torch.equal(before[name], after) for name, after in engine.named_masters())


@swept(
    together=1,
    source=["instance", "folder", "config"],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    precision=["bf16", "fp32"],
)
def test_files_have_the_source_s_dtype_and_the_masters_values(source, dtype, precision, tmp_path):
    model = in_dtype(llama(tie_word_embeddings=True), dtype)
    given: Any = model
    if source == "folder":
        model.save_pretrained(given := tmp_path / "given")
    if source == "config":
        given = model.config
        given.dtype = dtype
    [step] = make_batches(1)
    engine = make_engine(given, precision=precision)
    engine.step(step)
    engine.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    assert same(saved, {name: master.to(dtype) for name, master in masters(engine).items()})
    again = type(model).from_pretrained(tmp_path / "saved", dtype="auto")
    assert again.dtype == dtype


def test_fp32_masters_survive_a_bf16_engine_exactly(tmp_path):
    """Saved and opened again, twice, with training between."""
    steps = make_batches(4)
    whole = make_engine(llama(), precision="bf16", clip=None, eps=1e-3)
    whole.step(steps[0])
    whole.save_pretrained(tmp_path / "first")
    opened = make_engine(tmp_path / "first", precision="bf16", clip=None, eps=1e-3)
    assert same(masters(opened), masters(whole))
    assert any(
        not torch.equal(master, master.bfloat16().float()) for master in masters(whole).values()
    )


# Models from folders: buffers as transformers loads them, and what is not trained as it came.


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
