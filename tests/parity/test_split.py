"""Heads too large for a slot are streamed in ranges of rows, and give what whole ones give."""

import shutil
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM

from megatrain import InputError, Placement
from megatrain.base.units import align
from megatrain.engine.vocab_split import VocabRows
from megatrain.errors import StepRefused
from megatrain.model.probe import spec
from megatrain.model.rebuilt import emptied
from tests.families.examine import PASSES
from tests.families.parity import compare
from tests.families.report import documented
from tests.families.tiny import families, tiny_model
from tests.inside import parts_of
from tests.parity.cases import (
    SHAPES,
    SIZES,
    Noting,
    frozen,
    gradients,
    llama,
    make_batches,
    make_engine,
    masters,
    moments,
    noisy,
    parameters,
    plain_gradients,
    relative_error,
)
from tests.race.late import LateDevice
from tests.sweeps import quick, swept

WIDE = 1000  # tokens: the head takes 128000 bytes in fp32, a layer 31744
SPLIT = Placement(max_stream_bytes=33000)  # six ranges of <= 192 rows, each smaller than a layer

pytestmark = pytest.mark.usefixtures("small_pieces")


def wide(**changes):
    return llama(**{"vocab_size": WIDE, **changes})


def tied(**changes):
    return wide(tie_word_embeddings=True, **changes)


def phi():
    """With a bias in its head, which has no weight decay of its own group here."""
    torch.manual_seed(0)
    config = PhiConfig(**{**SIZES, "vocab_size": WIDE, "num_key_value_heads": 4})
    return noisy(PhiForCausalLM(config))


def wide_batches(count, shapes=SHAPES):
    """Targets in every range, at their borders, and a micro-batch without a label."""
    steps = make_batches(count, shapes)
    for number, step in enumerate(steps):
        for micro in step:
            micro["input_ids"] = micro["input_ids"] * 37 % WIDE
            micro["labels"] = micro["labels"].where(micro["labels"] < 0, micro["input_ids"])
        edges = torch.tensor([0, 191, 192, 383, 384, 575, 576, 959, 960, WIDE - 1])
        step[0]["labels"][number % 2, 1:11] = edges
        step[2]["labels"].fill_(-100)
    return steps


def train(engine, steps):
    """All numbers that a user sees, and the state at the end."""
    with engine:
        numbers = []
        for step in steps:
            result = engine.step(step)
            numbers += [result.loss, engine.evaluate(step[:1]), result.grad_norm]
        logits = engine.logits({"input_ids": steps[0][0]["input_ids"]})
        return numbers, [logits, *masters(engine).values(), *moments(engine)]


def alike(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def num_ranges(engine):
    names = [type(unit).__name__ for unit in [*parts_of(engine).trunk, parts_of(engine).head]]
    return names.count("VocabShard") + isinstance(parts_of(engine).head.computed, VocabRows)


@swept(together=0, make=[wide, tied, phi], clip=[1.0, None])
def test_gradients_and_steps_are_plain_torch_s(make, clip):
    """Sums over ranges are rounded elsewhere than one over all rows: about 1e-6 of them."""
    steps, model = wide_batches(2), make()
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
SCHEDULES: list[tuple[Any, str, float | None]] = [
    *((wide, name, 0.5) for name in CHOICES),
    *((tied, name, None) for name in CHOICES),
    (tied, "resident", 0.5),
]
REPEATED = [
    *((wide, name, 0.5) for name in ("more of all", "kept graphs")),
    *((tied, name, None) for name in ("one slot", "small", "resident")),
]


@cache
def plainest(make, clip, resident):
    """Results of the plainest schedule; updates of what rests on the device are another code's."""
    placement = replace(SPLIT, resident=resident)
    return train(make_engine(make(), clip=clip, placement=placement), wide_batches(2))


@pytest.mark.parametrize(
    ("make", "name", "clip"),
    [
        pytest.param(*each, marks=[pytest.mark.exhaustive] if each in REPEATED else [])
        for each in SCHEDULES
    ],
)
def test_schedules_and_lateness_change_no_bit(make, name, clip):
    choices = CHOICES[name]
    wanted = plainest(make, clip, choices.get("resident", ()))
    device = LateDevice(eagerness=0.0 if clip is None else 0.1)
    engine = make_engine(make(), clip=clip, placement=replace(SPLIT, **choices), device=device)
    assert num_ranges(engine) == 6
    assert alike(train(engine, wide_batches(2)), wanted)


# Caps and scales of logits; tables tied to the embedding; biases; what cannot be split.
WITH_HEADS = ["gemma2", "codegen", "roberta"]


@pytest.mark.parametrize("family", quick(families(), ("gemma2", "roberta")))
def test_families_are_plain_torch_s_with_their_head_in_ranges(family):
    """About five; layers rest on the device, so that they may be larger."""
    if family not in WITH_HEADS and documented()[family][0] != PASSES:
        pytest.skip("does not pass")
    model = tiny_model(family)
    found = spec(emptied(model))
    obstacle, rest = found.projection.obstacle, {*found.epilogue} - {*found.projection.names}
    sizes = [align(p.numel(), 128) for n, p in model.named_parameters() if n in rest]
    placement = Placement(
        max_stream_bytes=4000 if obstacle else max(4000, 4 * sum(sizes)),
        slots=3,
        layer_inputs="host",
        head_tokens=5,
        resident=tuple(f"layer {visit}" for visit in range(len(found.layers))),
    )
    if not obstacle:
        assert not compare(model, placement).failures
        return
    with pytest.raises(InputError, match=obstacle):
        compare(model, placement)


def taken(model, placement):
    device = Noting()
    make_engine(model, placement=placement, device=device).close()
    return device.taken


def test_slots_and_sums_are_as_large_as_a_slice():
    whole, split = (taken(wide(), replace(p, keep_rows=False)) for p in (Placement(), SPLIT))
    assert whole["slots"] > 4 * 31744 and whole["scratch arena"] > 4 * 31744
    assert split["slots"] == 2 * 31744 and split["scratch arena"] == 31744


def test_random_numbers_are_those_of_whole_heads():
    whole, split = (
        train(make_engine(wide(attention_dropout=0.2), placement=each), wide_batches(2))
        for each in (Placement(), SPLIT)
    )
    assert split[0] == pytest.approx(whole[0], rel=1e-6)


@pytest.mark.parametrize("kept", ["lm_head", "norm", "layers"])
def test_frozen_parts_stay_and_the_rest_is_that_of_a_whole_head(kept):
    steps, found = wide_batches(1), []
    for placement in (Placement(), SPLIT):
        model = frozen(wide(), lambda name: kept in name)
        with make_engine(model, placement=placement) as engine:
            engine.step(steps[0])
            found.append(masters(engine))
    moved = {n: p for n, p in found[0].items() if kept in n}
    start = parameters(wide())
    assert relative_error(found[1], moved, start) < 1e-5
    assert all(torch.equal(p, start[n]) for n, p in found[1].items() if kept not in n)


def test_only_heads_that_are_too_large_are_split_and_resident_ones_never():
    def ranges(**choices):
        with make_engine(wide(), placement=Placement(**choices)) as engine:
            return num_ranges(engine)

    whole = 4 * (WIDE * 32 + 128)
    assert ranges(max_stream_bytes=whole) == 0
    assert ranges(max_stream_bytes=whole - 1) == 6  # as small as layers
    assert ranges(max_stream_bytes=32000, resident=("head",)) == 0
    assert ranges(max_stream_bytes=64000, resident=("layer 0", "layer 1", "layer 2")) == 3


@pytest.mark.parametrize("clip", [1.0, None])
def test_a_loss_that_is_not_finite_changes_nothing(clip):
    model, steps = wide(), wide_batches(1)
    model.lm_head.weight.data[500] = torch.inf  # in a range in the middle
    with make_engine(model, clip=clip, placement=SPLIT) as engine:
        with pytest.raises(StepRefused, match="the loss is"):
            engine.step(steps[0])
        assert all(torch.equal(p, masters(engine)[n]) for n, p in parameters(model).items())


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
def test_compiled_ranges_train_as_eager_ones():
    steps = wide_batches(2)
    wanted, found = (
        train(make_engine(wide(), placement=replace(SPLIT, compile=compiled)), steps)[0]
        for compiled in (False, True)
    )
    assert found == pytest.approx(wanted, rel=1e-5)


def refusals():
    yield llama(), 20000, "layer 0 takes 31744"
    yield tiny_model("mixtral"), 20000, "layer 0 takes"
    roberta = tiny_model("roberta", changes={"vocab_size": 2000})
    before = "the head, which computes with lm_head.dense.weight before its table, takes 269824"
    yield roberta, 200_000, before


@pytest.mark.parametrize(("model", "max_stream_bytes", "message"), list(refusals()))
def test_what_cannot_be_split_is_refused(model, max_stream_bytes, message):
    with pytest.raises(InputError) as caught:
        make_engine(model, placement=Placement(max_stream_bytes=max_stream_bytes))
    text = str(caught.value)
    assert text.startswith(f"placement.max_stream_bytes is {max_stream_bytes}, but {message}")
    assert text.endswith("and cannot be split; set it to that or more")
