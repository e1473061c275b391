"""Parameters that transformers keeps in fp32 in a bf16 model: streamed whole, computed in fp32."""

from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from megatrain import AdamW, Engine, InputError, Placement
from megatrain.device import disk
from megatrain.device.disk import BLOCK
from megatrain.engine import sink
from tests.families.media import media_steps
from tests.families.plain import accumulate, make_steps
from tests.families.tiny import tiny_model, tiny_multimodal
from tests.inside import program_of, sized, store_of
from tests.parity.cases import make_engine, masters, resumes, same
from tests.race.late import LateDevice
from tests.sweeps import few, placements

# A gate that is trained, a bias that is frozen; the head and what mixes states before it.
FAMILIES = few(
    ["ernie4_5_moe", "hy_v4", "beam", "flint", "hunyuan_v1_moe", "deepseek_v4", "olmo_hybrid"], 2
)
RATE = 1e12  # of one step of Adam with as large an eps, which tells the gradient
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}

PLACEMENTS = placements("wide")


def from_folder(family, folder):
    """A bf16 folder, the model that transformers loads of it, and its parameters in fp32."""
    tiny_model(family).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
    model.save_pretrained(folder)  # what is between two bf16 numbers is rounded otherwise here
    return model, {n: p for n, p in model.named_parameters() if p.dtype == torch.float32}


def train(family, **options):
    """Losses and masters; each step is evaluated as well."""
    model, said = tiny_model(family), []
    with make_engine(model, precision="bf16", verify="step", **options) as engine:
        for step in make_steps(model.config)[:2]:
            said += [engine.step(step).loss, engine.evaluate(step[:1])]
        return said, masters(engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_from_pretrained(family, tmp_path):
    model, wide = from_folder(family, tmp_path)
    [step, *_] = make_steps(model.config)
    optimizer = AdamW(lr=RATE * RATE, eps=RATE, weight_decay=0.0)
    options = {"precision": "bf16", "max_grad_norm": None, "device": "cpu"}
    with Engine(tmp_path, optimizer=optimizer, **options) as engine:
        before = masters(engine)
        assert wide and all(torch.equal(before[name], value) for name, value in wide.items())
        result = engine.step(step)
        after = masters(engine)
    assert result.loss == pytest.approx(accumulate(model, step), rel=1e-6)
    for name, value in wide.items():
        if value.grad is not None:
            gradient = (before[name].double() - after[name].double()) / RATE
            off = (gradient - value.grad).norm() / value.grad.norm()
            assert off <= (0.02 if value.numel() > 1 else 0.05), (name, off)
        elif not value.requires_grad:
            assert torch.equal(after[name], value), name


@pytest.mark.parametrize(
    ("family", "placement"), few([(f, p) for p in PLACEMENTS for f in ("hy_v4", "ernie4_5_moe")], 4)
)
def test_no_placement_changes_a_bit(family, placement, monkeypatch):
    wanted = train(family)
    sized(monkeypatch, sink, PIECE=500)
    sized(monkeypatch, disk, PIECE=BLOCK // 2)
    said, after = train(family, placement=PLACEMENTS[placement], device=LateDevice())
    assert said == wanted[0] and same(after, wanted[1])


@pytest.mark.parametrize("rule", few(["adamw int8", "adamw", "muon"]))
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(rule, tmp_path):
    model = tiny_model("ernie4_5_moe")
    first, *rest = make_steps(model.config)
    placement = Placement(resident=("layer 1",), disk_remainder=9)
    with make_engine(model, precision="bf16", rule=rule) as engine:
        engine.step(first)
        resumes(engine, tmp_path / "saved", rest, placement=placement, disk=tmp_path)


def test_exports_have_the_types_of_save_pretrained_and_all_bits(tmp_path):
    model, wide = from_folder("ernie4_5_moe", tmp_path / "given")
    model.save_pretrained(tmp_path / "plain")
    engine = make_engine(tmp_path / "plain", precision="bf16")
    engine.step(make_steps(model.config)[0])
    after = masters(engine)
    engine.save_pretrained(tmp_path / "exported")
    types = [
        {name: value.dtype for name, value in load_file(each / "model.safetensors").items()}
        for each in (tmp_path / "plain", tmp_path / "exported")
    ]
    assert types[0] == types[1] and torch.float32 in types[0].values()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.bfloat16)
    assert all(torch.equal(dict(again.named_parameters())[n], after[n]) for n in wide)


def test_an_adapter_on_a_packed_base_leaves_them_in_fp32(tmp_path):
    """From a base that is frozen, so that no master is beside its weights; and on to inference."""
    model, wide = from_folder("hunyuan_v1_moe", tmp_path / "base")
    steps = make_steps(model.config)
    with Engine(tmp_path / "base", optimizer=None, precision="bf16", device="cpu") as engine:
        assert engine.evaluate(steps[0]) == pytest.approx(accumulate(model, steps[0]), rel=1e-6)
    options = {"precision": "bf16", "adapter": LORA, "base": "nf4"}
    with make_engine(tmp_path / "base", **options) as engine:
        kept = {e.name: e for _, e in store_of(engine).entries() if e.packed is not None}
        held = masters(engine)
        assert all(torch.equal(held[f"{_held(name, held)}"], v) for name, v in wide.items())
        assert {e.packed.name for e in kept.values()} == {"nf4", "fp32"}
        engine.step(steps[0])
        resumes(engine, tmp_path / "saved", steps[1:2])
    with Engine.load(tmp_path / "saved", device="cpu") as engine:
        types = {program_of(engine).type_of(_held(name, held)) for name in wide}
    assert types == {torch.float32}


def _held(name, names):
    return next(each for each in names if each.endswith(name))


def test_a_table_of_rows_is_refused_by_name():
    with mock.patch.object(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"embed_tokens"}):
        model = tiny_model("llama")
        with pytest.raises(InputError, match="embed_tokens.weight in float32 .* precision to fp32"):
            make_engine(model, precision="bf16")


@pytest.mark.exhaustive
def test_a_tower_s_are_computed_in_fp32(tmp_path):
    model = tiny_multimodal("voxtral")
    [step, *_] = media_steps(model, "voxtral")
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    assert torch.float32 in {p.dtype for p in plain.model.audio_tower.parameters()}
    with make_engine(model, precision="bf16") as engine:
        assert engine.step(step).loss == pytest.approx(accumulate(plain, step), rel=1e-6)
