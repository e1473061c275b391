"""bf16 computes, fp32 learns: small steps are not lost, and files have their source's dtype."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatrain import AdamW, Engine
from tests.parity.cases import in_dtype, llama, make_batches, make_engine, masters, parameters, same
from tests.sweeps import swept

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
