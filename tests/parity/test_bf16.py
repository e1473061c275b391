"""bf16 computes, fp32 learns: small steps are not lost, and files have their source's dtype."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatrain import AdamW, Engine, InputError
from megatrain.train.export import export
from tests.families.tiny import tiny_model
from tests.parity.cases import in_dtype, llama, make_batches, make_engine, masters, parameters, same
from tests.sweeps import swept

RATE, STEPS = 1e-6, 20


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


# Models from folders: buffers as transformers loads them, and what is not trained as it came.


def stored(folder):
    return load_file(folder / "model.safetensors")


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


def test_a_folder_in_float64_is_refused(tmp_path):
    tiny_model("llama").double().save_pretrained(tmp_path / "folder")
    with pytest.raises(InputError, match="dtype 'float64' is no float to train with .*convert"):
        Engine(tmp_path / "folder", precision="fp32", device="cpu")
