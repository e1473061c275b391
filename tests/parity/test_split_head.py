"""Heads too large for a slot are streamed in ranges of rows, and give what whole ones give."""

import shutil
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PhiConfig, PhiForCausalLM

from megatrain import Engine, InputError, Placement
from megatrain.engine.assemble import Assembly
from megatrain.engine.vocab_split import LastRows
from megatrain.errors import StepRefused
from megatrain.loss import CROSS_ENTROPY
from megatrain.model.build import emptied
from megatrain.model.probe import spec
from megatrain.units import align
from tests.families.examine import PASSES
from tests.families.parity import compare
from tests.families.plain import Step
from tests.families.report import documented
from tests.families.tiny import families, tiny_model
from tests.parity.cases import (
    SIZES,
    Noting,
    frozen,
    gradients,
    llama,
    make_batches,
    make_engine,
    masters,
    noisy,
    parameters,
    plain_gradients,
    relative_error,
)
from tests.parity.test_split import alike, keeping, mixtral
from tests.parity.test_split import train as trained
from tests.race.late import LateDevice

WIDE = 1000  # tokens: the head takes 128000 bytes in fp32, a layer 31744
SPLIT = Placement(max_stream_bytes=33000)  # six ranges of <= 192 rows, each smaller than a layer
CHOICES: dict[str, dict[str, Any]] = {
    "one slot": {"slots": 1},
    "more of all": {
        "slots": 4,
        "host_grad_buffers": 9,
        "layer_inputs": "host",
        "layer_input_lanes": 3,
    },
    "small": {
        "gradient_lanes": 1,
        "keep_rows": False,
        "layer_inputs": "host",
        "layer_input_lanes": 1,
    },
    "kept graphs": {"save_activations": 2, "offload_activations": 1, "slots": 3},
    "resident": {"resident": ("embedding", "prologue", "layer 1")},
}


pytestmark = pytest.mark.usefixtures("small_pieces")


def wide(**changes: Any) -> Any:
    return llama(**{"vocab_size": WIDE, **changes})


def phi() -> PhiForCausalLM:
    """With a bias in its head, which has no weight decay of its own group here."""
    torch.manual_seed(0)
    config = PhiConfig(**{**SIZES, "vocab_size": WIDE, "num_key_value_heads": 4})
    return noisy(PhiForCausalLM(config))


def steps_of(count: int) -> list[list[dict[str, Tensor]]]:
    """Targets in every range, at their borders, and a micro-batch without a label."""
    steps = make_batches(count)
    for number, step in enumerate(steps):
        for micro in step:
            micro["input_ids"] = micro["input_ids"] * 37 % WIDE
            micro["labels"] = micro["labels"].where(micro["labels"] < 0, micro["input_ids"])
        edges = torch.tensor([0, 191, 192, 383, 384, 575, 576, 959, 960, WIDE - 1])
        step[0]["labels"][number % 2, 1:11] = edges
        step[2]["labels"].fill_(-100)
    return steps


def train(engine: Engine, steps: list[Step]) -> tuple[list[float | None], list[Tensor]]:
    return trained(engine, steps, norms=True)


def num_ranges(engine: Engine) -> int:
    names = [type(unit).__name__ for unit in [*engine._parts.trunk, engine._parts.head]]
    return names.count("VocabShard") + isinstance(engine._parts.head.computed, LastRows)


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize(
    "make", [wide, lambda: wide(tie_word_embeddings=True), phi], ids=["untied", "tied", "bias"]
)
def test_gradients_and_steps_are_plain_torch_s(make: Any, clip: float | None) -> None:
    """Sums over ranges are rounded elsewhere than one over all rows: about 1e-6 of them."""
    steps, model = steps_of(3), make()
    loss, wanted = plain_gradients(make(), steps[0])
    whole = make_engine(model, clip=clip)
    placement = replace(SPLIT, head_tokens=7)
    with make_engine(model, clip=clip, placement=placement) as engine:
        assert num_ranges(engine) == 6
        assert engine.evaluate(steps[0]) == pytest.approx(loss, rel=1e-6)
        result = engine.step(steps[0])
        assert result.loss == pytest.approx(loss, rel=1e-6)
        if clip is not None:
            assert relative_error(gradients(engine), wanted) < 2e-6
        assert result.grad_norm == pytest.approx(whole.step(steps[0]).grad_norm, rel=1e-6)
        for step in steps[1:]:
            assert engine.step(step).loss == pytest.approx(whole.step(step).loss, rel=1e-6)
        assert relative_error(masters(engine), masters(whole), parameters(model)) < 1e-5
        ids = {"input_ids": steps[0][0]["input_ids"]}
        assert torch.allclose(engine.logits(ids), whole.logits(ids), rtol=1e-4, atol=1e-5)


@cache
def plainest(tied: bool, clip: float | None, resident: tuple[str, ...]) -> Any:
    """What the plainest schedule gives; updates of what rests on the device are another code's."""
    placement = replace(SPLIT, resident=resident)
    return train(
        make_engine(wide(tie_word_embeddings=tied), clip=clip, placement=placement), steps_of(2)
    )


@pytest.mark.parametrize(("tied", "clip"), [(False, 0.5), (True, None), (True, 0.5)])
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_schedules_and_lateness_change_no_bit(
    choices: dict[str, Any], tied: bool, clip: float | None
) -> None:
    wanted = plainest(tied, clip, choices.get("resident", ()))
    model, placement = wide(tie_word_embeddings=tied), replace(SPLIT, **choices)
    device = LateDevice(eagerness=0.0 if tied else 0.1)
    engine = make_engine(model, clip=clip, placement=placement, device=device)
    assert num_ranges(engine) == 6
    assert alike(train(engine, steps_of(2)), wanted)


def test_the_loss_of_a_step_is_that_of_an_evaluation() -> None:
    steps = steps_of(1)
    with make_engine(wide(), placement=SPLIT) as engine:
        assert engine.evaluate(steps[0]) == engine.step(steps[0]).loss


def test_in_bf16_only_sums_are_rounded_elsewhere() -> None:
    steps, model = steps_of(2), wide(tie_word_embeddings=True)
    whole = make_engine(model, precision="bf16")
    placement = Placement(max_stream_bytes=16000)
    with make_engine(model, precision="bf16", placement=placement) as engine:
        assert num_ranges(engine) > 1
        rows = engine._parts.head.computed._rows
        hidden, number = torch.zeros(1, 2, 3).bfloat16(), torch.zeros(2)
        values = {rows.hidden: hidden, rows.lse: number, rows.picked: number}
        micro = engine._prepare(steps[0], CROSS_ENTROPY).micro[0]
        micro.targets = torch.zeros(1, 2).long()
        made = rows.gradients(micro, values, 1)
        assert made[rows.hidden].dtype == torch.float32  # summed over ranges
        for step in steps:
            found, wanted = engine.step(step), whole.step(step)
            assert found.loss == pytest.approx(wanted.loss, rel=1e-3)
            assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-2)
        assert relative_error(masters(engine), masters(whole), parameters(model)) < 0.1


@pytest.mark.parametrize("kept", ["lm_head", "norm", "layers"])
def test_frozen_parts_stay_and_the_rest_is_that_of_a_whole_head(kept: str) -> None:
    steps, found = steps_of(1), []
    for placement in (Placement(), SPLIT):
        model = frozen(wide(), lambda name: kept in name)
        with make_engine(model, placement=placement) as engine:
            engine.step(steps[0])
            found.append(masters(engine))
    moved = {n: p for n, p in found[0].items() if kept in n}
    assert relative_error(found[1], moved, parameters(wide())) < 1e-5
    start = parameters(wide())
    assert all(torch.equal(p, start[n]) for n, p in found[1].items() if kept not in n)


def test_a_model_with_experts_is_split_throughout() -> None:
    steps, model = steps_of(2), mixtral(vocab_size=WIDE)
    whole = make_engine(model)
    with make_engine(
        model, placement=Placement(max_stream_bytes=17000, layer_inputs="host")
    ) as engine:
        assert num_ranges(engine) > 5
        for step in steps:
            assert engine.step(step).loss == pytest.approx(whole.step(step).loss, rel=1e-6)
        assert relative_error(masters(engine), masters(whole), parameters(model)) < 1e-5


def test_random_numbers_are_those_of_a_whole_head() -> None:
    steps, model = steps_of(2), wide(attention_dropout=0.2)
    losses = [
        train(make_engine(model, placement=placement), steps)[0]
        for placement in (Placement(), SPLIT)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_steps_that_break_off_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of(2)
    wanted = train(make_engine(wide(), placement=SPLIT), steps)
    engine = make_engine(wide(), placement=SPLIT)
    with monkeypatch.context() as patch:
        patch.setattr(engine._parts.trunk[-1], "vjp", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step(steps[0])
    assert alike(train(engine, steps), wanted)


@pytest.mark.parametrize("clip", [1.0, None])
def test_a_loss_that_is_not_finite_changes_nothing(clip: float | None) -> None:
    model, steps = wide(), steps_of(1)
    model.lm_head.weight.data[500] = torch.inf  # in a range in the middle
    with make_engine(model, clip=clip, placement=SPLIT) as engine:
        with pytest.raises(StepRefused, match="the loss is"):
            engine.step(steps[0])
        assert all(torch.equal(p, masters(engine)[n]) for n, p in parameters(model).items())


def test_slots_and_sums_are_no_larger_than_a_layer_needs() -> None:
    taken = {}
    for placement in (Placement(keep_rows=False), replace(SPLIT, keep_rows=False)):
        device = Noting()
        make_engine(wide(), placement=placement, device=device).close()
        taken[placement.max_stream_bytes] = device.taken
    assert taken[None]["slots"] > 4 * 31744 and taken[None]["work room"] > 4 * 31744
    assert taken[33000]["slots"] == 2 * 31744 and taken[33000]["work room"] == 31744


def test_layers_that_keep_their_graphs_are_counted_without_the_head() -> None:
    with make_engine(wide(), placement=replace(SPLIT, save_activations=1)) as engine:
        assert [layer.visit for layer in keeping(engine)] == [2]


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
def test_compiled_ranges_train_as_eager_ones() -> None:
    steps = steps_of(2)
    wanted, found = (
        train(make_engine(wide(), placement=replace(SPLIT, compile=compiled)), steps)[0]
        for compiled in (False, True)
    )
    assert found == pytest.approx(wanted, rel=1e-5)


def test_only_heads_that_are_too_large_are_split_and_resident_ones_never() -> None:
    def ranges(**choices: Any) -> int:
        with make_engine(wide(), placement=Placement(**choices)) as engine:
            return num_ranges(engine)

    whole = 4 * (WIDE * 32 + 128)
    assert ranges(max_stream_bytes=whole) == 0
    assert ranges(max_stream_bytes=whole - 1) == 6  # as small as layers
    assert ranges(max_stream_bytes=32000, resident=("head",)) == 0
    assert ranges(max_stream_bytes=64000, resident=("layer 0", "layer 1", "layer 2")) == 3


def check(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head alone is split, into five ranges or so."""
    monkeypatch.setattr(Assembly, "expert_slices", {})
    model = tiny_model(family)
    found = spec(emptied(model))
    obstacle, rest = found.projection.obstacle, {*found.epilogue} - {*found.projection.names}
    sizes = [align(p.numel(), 128) for n, p in model.named_parameters() if n in rest]
    split = 4000 if obstacle else max(4000, 4 * sum(sizes))
    placement = Placement(max_stream_bytes=split, slots=3, layer_inputs="host", head_tokens=5)
    if not obstacle:
        assert not compare(model, placement).failures
        return
    with pytest.raises(InputError, match=obstacle):
        compare(model, placement)


# Caps and scales of logits; tables tied to the embedding; biases; what cannot be split.
FAMILIES = ["gemma2", "granite", "cohere", "codegen", "xlnet", "roberta"]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_plain_torch_s(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(family, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [f for f in families() if f not in FAMILIES])
def test_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if documented()[family][0] != PASSES:
        pytest.skip("does not pass")
    check(family, monkeypatch)


def test_what_cannot_be_split_is_refused() -> None:
    model = tiny_model("roberta", changes={"vocab_size": 2000})
    with pytest.raises(InputError) as caught:
        make_engine(model, placement=Placement(max_stream_bytes=200_000))
    assert str(caught.value) == (
        "placement.max_stream_bytes is 200000, but the head, which computes with "
        "lm_head.dense.weight before its table, takes 269824 bytes and cannot be split; set it to "
        "that or more"
    )
