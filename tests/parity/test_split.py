"""Layers and heads too large for a slot are streamed in slices, and give what whole ones give.

A layer is taken some experts at a time, a head in ranges of its table's rows.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_moe import Qwen3MoeForCausalLM

from megatrain import AdamW, Engine, InputError, Placement
from megatrain.base.units import align
from megatrain.engine.assemble import Assembly
from megatrain.engine.layer import Layer
from megatrain.engine.tile_slice import least_split
from megatrain.engine.vocab_split import LastRows
from megatrain.errors import StepRefused
from megatrain.loss import CROSS_ENTROPY
from megatrain.model.probe import spec
from megatrain.model.rebuilt import emptied
from megatrain.optim import StreamedOptimizer
from megatrain.placement import ActivationPolicy
from megatrain.source.engine_setup import tile_layouts
from tests.families.examine import PASSES
from tests.families.parity import compare
from tests.families.plain import Step
from tests.families.report import documented
from tests.families.tiny import families, tiny_model
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
from tests.sweeps import few, quick, swept

EXPERT = 32 * 24 * 3 * 4  # bytes of one in fp32
CORE = 17000  # and somewhat more than all the rest of a layer
WIDE = 1000  # tokens: the head takes 128000 bytes in fp32, a layer 31744
SPLIT = Placement(max_stream_bytes=33000)  # six ranges of <= 192 rows, each smaller than a layer

pytestmark = pytest.mark.usefixtures("small_pieces")


def mixtral(**changes: Any) -> MixtralForCausalLM:
    """Two experts a token, one computed after the other."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_local_experts": 6, "intermediate_size": 24, **changes}
    config = MixtralConfig(**sizes)
    config._experts_implementation = "eager"
    return noisy(MixtralForCausalLM(config))


def qwen3_moe() -> Qwen3MoeForCausalLM:
    """Three experts a token, all of a slice in one kernel; a dense layer in the middle."""
    torch.manual_seed(0)
    sizes = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    dense = {"mlp_only_layers": [1], "intermediate_size": 4, "head_dim": 8}
    return noisy(Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **sizes, **dense})))


def wide(**changes: Any) -> Any:
    return llama(**{"vocab_size": WIDE, **changes})


def tied(**changes: Any) -> Any:
    return wide(tie_word_embeddings=True, **changes)


def phi() -> PhiForCausalLM:
    """With a bias in its head, which has no weight decay of its own group here."""
    torch.manual_seed(0)
    config = PhiConfig(**{**SIZES, "vocab_size": WIDE, "num_key_value_heads": 4})
    return noisy(PhiForCausalLM(config))


def wide_batches(count: int, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Step]:
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


@dataclass(frozen=True)
class Sliced:
    """A model, how it is cut, what it trains on, and the place of a slice among the units."""

    make: Callable[..., Any]
    placement: Placement
    steps: Callable[[int], list[Step]]
    unit: int


EXPERTS = Sliced(mixtral, Placement(max_stream_bytes=3 * EXPERT), make_batches, 2)
HEAD = Sliced(wide, SPLIT, wide_batches, -1)
TIED = replace(HEAD, make=tied)


def train(
    engine: Engine, steps: list[Step], *, norms: bool = True
) -> tuple[list[float | None], list[Tensor]]:
    """All numbers that a user sees, those of gradients if asked for, and the state at the end."""
    with engine:
        numbers = []
        for step in steps:
            result = engine.step(step)
            numbers += [result.loss, engine.evaluate(step[:1])]
            numbers += [result.grad_norm] if norms else []
        logits = engine.logits({"input_ids": steps[0][0]["input_ids"]})
        return numbers, [logits, *masters(engine).values(), *moments(engine)]


def alike(one: tuple[list, list[Tensor]], other: tuple[list, list[Tensor]]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def num_ranges(engine: Engine) -> int:
    names = [type(unit).__name__ for unit in [*engine._parts.trunk, engine._parts.head]]
    return names.count("VocabShard") + isinstance(engine._parts.head.computed, LastRows)


@cache
def whole_experts() -> tuple[list, list[Tensor]]:
    return train(make_engine(mixtral(), clip=None), make_batches(2), norms=False)


@pytest.mark.parametrize(
    ("max_stream_bytes", "choices"),
    few(
        [
            (CORE, {}),
            (2 * EXPERT, {"layer_inputs": "host", "slots": 3}),
            (3 * EXPERT, {"slots": 1}),
        ],
        1,
    ),
)
def test_two_experts_a_token_change_no_bit(max_stream_bytes: int, choices: dict[str, Any]) -> None:
    """The sum of two does not depend on their order. (Clipped, the norm of all is summed anew.)"""
    placement = Placement(max_stream_bytes=max_stream_bytes, **choices)
    engine = make_engine(mixtral(), clip=None, placement=placement)
    assert alike(train(engine, make_batches(2), norms=False), whole_experts())


@pytest.mark.parametrize(
    ("make", "max_stream_bytes"),
    few([(mixtral, CORE), (qwen3_moe, CORE), (qwen3_moe, 3 * EXPERT)], 2),
)
def test_with_experts_gradients_and_steps_are_plain_torch_s(
    make: Any, max_stream_bytes: int
) -> None:
    """Clipped and not, the sums of three or more experts are rounded elsewhere: 1e-6 of them."""
    steps, model = make_batches(2), make()
    loss, wanted = plain_gradients(make(), steps[0])
    whole = make_engine(model)
    placement = Placement(max_stream_bytes=max_stream_bytes, layer_inputs="host")
    with make_engine(model, placement=placement) as engine:
        result = engine.step(steps[0])
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert relative_error(gradients(engine), wanted) < 2e-6
        for step in steps:
            whole.step(step)
        for step in steps[1:]:
            engine.step(step)
        assert relative_error(masters(engine), masters(whole), parameters(model)) < 1e-5


@swept(together=0, make=[wide, tied, phi], clip=[1.0, None])
def test_of_a_head_gradients_and_steps_are_plain_torch_s(make: Any, clip: float | None) -> None:
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
    "three slots": {"slots": 3, "layer_inputs": "host"},
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
OF_EXPERTS = ("one slot", "three slots")  # the others: `test_what_split_layers_cannot_keep_...`
SCHEDULES = [
    *((EXPERTS, name, clip) for clip in (0.5, None) for name in OF_EXPERTS),
    *((HEAD, name, 0.5) for name in CHOICES if name != "three slots"),
    *((TIED, name, None) for name in CHOICES if name != "three slots"),
    (TIED, "resident", 0.5),
]
REPEATED = [
    *((EXPERTS, "one slot", 0.5), (EXPERTS, "three slots", None), (TIED, "resident", None)),
    *((HEAD, name, 0.5) for name in ("more of all", "kept graphs")),
    *((TIED, name, None) for name in ("one slot", "small")),
]


@cache
def plainest(sliced: Sliced, clip: float | None, resident: tuple[str, ...]) -> Any:
    """What the plainest schedule gives; updates of what rests on the device are another code's."""
    placement = replace(sliced.placement, resident=resident)
    return train(make_engine(sliced.make(), clip=clip, placement=placement), sliced.steps(2))


@pytest.mark.parametrize(
    ("sliced", "name", "clip"),
    [
        pytest.param(*each, marks=[pytest.mark.exhaustive] if each in REPEATED else [])
        for each in SCHEDULES
    ],
)
def test_schedules_and_lateness_change_no_bit(
    sliced: Sliced, name: str, clip: float | None
) -> None:
    choices = CHOICES[name]
    wanted = plainest(sliced, clip, choices.get("resident", ()))
    device = LateDevice(eagerness=0.1 if (clip is None) == (sliced is EXPERTS) else 0.0)
    engine = make_engine(
        sliced.make(), clip=clip, placement=replace(sliced.placement, **choices), device=device
    )
    assert num_ranges(engine) == (0 if sliced is EXPERTS else 6)
    assert alike(train(engine, sliced.steps(2)), wanted)


def test_the_loss_of_a_step_is_that_of_an_evaluation() -> None:
    steps = wide_batches(1)
    with make_engine(wide(), placement=SPLIT) as engine:
        assert engine.evaluate(steps[0]) == engine.step(steps[0]).loss


def check_experts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few experts at a time as there can be."""
    model = tiny_model(family)
    found = spec(emptied(model))
    if not any(layer.kind.experts for layer in found.layers):
        pytest.skip("has no experts that could be taken some at a time")
    groups = StreamedOptimizer(AdamW(), found.capture.model).group_of()
    least = least_split(found, tile_layouts(found, groups), 4)
    placement = Placement(max_stream_bytes=least, layer_inputs="host", layer_input_lanes=1, slots=3)
    assert not compare(model, placement).failures


def check_head(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


# Shared experts; biases of experts; norms after the experts, whose gradients need their result.
WITH_EXPERTS = ["deepseek_v3", "afmoe"]
# Caps and scales of logits; tables tied to the embedding; biases; what cannot be split.
WITH_HEADS = ["gemma2", "codegen", "roberta"]


@pytest.mark.parametrize(
    ("family", "check"),
    quick(families(), WITH_EXPERTS[:1], experts=check_experts)
    + quick(families(), ("gemma2", "roberta"), head=check_head),
)
def test_families_are_plain_torch_s_in_the_smallest_slices(
    family: str, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family not in WITH_EXPERTS + WITH_HEADS and documented()[family][0] != PASSES:
        pytest.skip("does not pass")
    check(family, monkeypatch)


def test_experts_in_bf16_only_have_sums_that_are_rounded_elsewhere() -> None:
    steps, model = make_batches(2), qwen3_moe()
    whole = make_engine(model, precision="bf16")
    placement = Placement(max_stream_bytes=CORE // 2)
    with make_engine(model, precision="bf16", placement=placement) as engine:
        for step in steps:
            assert engine.step(step).loss == pytest.approx(whole.step(step).loss, rel=1e-2)


def test_a_head_in_bf16_only_has_sums_that_are_rounded_elsewhere() -> None:
    steps, model = wide_batches(2), tied()
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


def taken(model: Any, placement: Placement) -> dict[str, int]:
    device = Noting()
    make_engine(model, placement=placement, device=device).close()
    return device.taken


def test_slots_and_sums_are_as_large_as_a_slice() -> None:
    plain, of_model = Placement(keep_rows=False), {"num_local_experts": 32, "vocab_size": 64}
    whole, split = (
        taken(mixtral(**of_model), replace(plain, max_stream_bytes=size))
        for size in (None, 4 * EXPERT)
    )
    assert whole["slots"] > 2 * 32 * EXPERT and split["slots"] == 2 * 4 * EXPERT
    assert whole["scratch arena"] > 32 * EXPERT and split["scratch arena"] == 4 * EXPERT
    whole, split = (taken(wide(), replace(each, keep_rows=False)) for each in (plain, SPLIT))
    assert whole["slots"] > 4 * 31744 and whole["scratch arena"] > 4 * 31744
    assert split["slots"] == 2 * 31744 and split["scratch arena"] == 31744


def test_random_numbers_are_those_of_whole_layers_and_heads() -> None:
    """All but the experts is computed four times in a step, each time with the same dropout."""
    random, steps = {"attention_dropout": 0.2, "router_jitter_noise": 0.1}, make_batches(2)
    whole, split = (
        train(make_engine(mixtral(**random), clip=None, placement=each), steps, norms=False)
        for each in (Placement(), EXPERTS.placement)
    )
    assert alike(whole, split) and not alike(whole, whole_experts())
    whole, split = (
        train(make_engine(wide(attention_dropout=0.2), placement=each), wide_batches(2))
        for each in (Placement(), SPLIT)
    )
    assert split[0] == pytest.approx(whole[0], rel=1e-6)


def test_frozen_experts_and_frozen_rest() -> None:
    steps = make_batches(1)
    for part in ("experts", "attn"):
        losses = []
        for placement in (Placement(), Placement(max_stream_bytes=CORE)):
            model = frozen(mixtral(), lambda name, part=part: part not in name)
            engine = make_engine(model, clip=None, placement=placement)
            losses.append(train(engine, steps, norms=False))
        assert alike(*losses)


@pytest.mark.parametrize("kept", ["lm_head", "norm", "layers"])
def test_frozen_parts_stay_and_the_rest_is_that_of_a_whole_head(kept: str) -> None:
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


def test_a_model_with_experts_is_split_throughout() -> None:
    steps, model = wide_batches(2), mixtral(vocab_size=WIDE)
    whole = make_engine(model)
    placement = Placement(max_stream_bytes=CORE, layer_inputs="host")
    with make_engine(model, placement=placement) as engine:
        assert num_ranges(engine) > 5
        for step in steps:
            assert engine.step(step).loss == pytest.approx(whole.step(step).loss, rel=1e-6)
        assert relative_error(masters(engine), masters(whole), parameters(model)) < 1e-5


def test_only_layers_that_are_too_large_are_split_and_resident_ones_never() -> None:
    model = tiny_model("deepseek_v3")  # the first layer is dense, there are shared experts

    def stages(**choices: Any) -> list[str]:
        with make_engine(model, placement=Placement(**choices)) as engine:
            return [type(unit).__name__[0] for unit in engine._parts.trunk]

    sizes = [sum(p.numel() for p in layer.parameters()) * 4 for layer in model.model.layers]
    assert stages(max_stream_bytes=max(sizes) + 4096) == list("PLLL")
    assert stages(max_stream_bytes=sizes[0] + 2048) == list("PLBGABGA")
    assert stages(max_stream_bytes=sizes[0] + 2048, resident=("layer 1",)) == list("PLLBGA")


def test_only_heads_that_are_too_large_are_split_and_resident_ones_never() -> None:
    def ranges(**choices: Any) -> int:
        with make_engine(wide(), placement=Placement(**choices)) as engine:
            return num_ranges(engine)

    whole = 4 * (WIDE * 32 + 128)
    assert ranges(max_stream_bytes=whole) == 0
    assert ranges(max_stream_bytes=whole - 1) == 6  # as small as layers
    assert ranges(max_stream_bytes=32000, resident=("head",)) == 0
    assert ranges(max_stream_bytes=64000, resident=("layer 0", "layer 1", "layer 2")) == 3


IGNORED: list[tuple[Any, dict[str, Any]]] = [
    (mixtral, {"save_activations": 1}),
    (mixtral, {"offload_activations": 1}),
    (mixtral, {"save_attention": "device"}),
    (mixtral, {"save_attention": "host", "resident": ("layer 1",)}),
    (mixtral, {"offload_activations": 2, "resident": ("layer 0",)}),
    (qwen3_moe, {"save_activations": 2}),
    (qwen3_moe, {"save_activations": 2, "resident": ("layer 0",), "offload_activations": 1}),
]


@pytest.mark.parametrize(("make", "choices"), IGNORED)
def test_what_split_layers_cannot_keep_is_refused(make: Any, choices: dict[str, Any]) -> None:
    device = Noting()
    with pytest.raises(InputError) as told:
        make_engine(make(), placement=Placement(max_stream_bytes=CORE, **choices), device=device)
    name = next(iter(choices))
    assert str(told.value).startswith(f"placement.{name} is {choices[name]!r}, but placement.max")
    assert "of 3 layers" in str(told.value) and "\n" not in str(told.value)
    assert not device.taken


def keeping(engine: Engine) -> list[int]:
    """The layers whose graphs wait on the device."""
    layers = [unit for unit in engine._parts.trunk if isinstance(unit, Layer)]
    policy = ActivationPolicy("graph", "device")
    return [layer.visit for layer in layers if layer.policy == policy]


@pytest.mark.parametrize(
    ("choices", "kept"),
    few(
        [
            ({"offload_activations": 1, "save_activations": 1, "resident": ("layer 0",)}, [1]),
            ({"save_activations": 1}, [1]),
            ({"save_activations": 2, "resident": ("layer 2",)}, [1, 2]),
        ]
    ),
)
def test_whole_layers_beside_split_ones_keep_their_graphs(
    choices: dict[str, Any], kept: list[int]
) -> None:
    """Of three layers the one in the middle is dense."""
    steps = make_batches(2)
    resident = {name: choices[name] for name in choices if name == "resident"}
    wanted = make_engine(qwen3_moe(), placement=Placement(max_stream_bytes=CORE, **resident))
    engine = make_engine(qwen3_moe(), placement=Placement(max_stream_bytes=CORE, **choices))
    assert keeping(engine) == kept
    assert alike(train(engine, steps), train(wanted, steps))


def test_layers_that_keep_their_graphs_are_counted_without_the_head() -> None:
    with make_engine(wide(), placement=replace(SPLIT, save_activations=1)) as engine:
        assert keeping(engine) == [2]


@pytest.mark.parametrize("sliced", [EXPERTS, HEAD], ids=["experts", "head"])
def test_steps_that_break_off_leave_nothing(
    sliced: Sliced, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = sliced.steps(2)
    engine = make_engine(sliced.make(), clip=0.5, placement=sliced.placement)
    with monkeypatch.context() as patch:
        patch.setattr(engine._parts.trunk[sliced.unit], "vjp", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step(steps[0])
    assert alike(train(engine, steps), plainest(sliced, 0.5, ()))


@pytest.mark.parametrize("clip", [1.0, None])
def test_a_loss_that_is_not_finite_changes_nothing(clip: float | None) -> None:
    model, steps = wide(), wide_batches(1)
    model.lm_head.weight.data[500] = torch.inf  # in a range in the middle
    with make_engine(model, clip=clip, placement=SPLIT) as engine:
        with pytest.raises(StepRefused, match="the loss is"):
            engine.step(steps[0])
        assert all(torch.equal(p, masters(engine)[n]) for n, p in parameters(model).items())


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
def test_compiled_ranges_train_as_eager_ones() -> None:
    steps = wide_batches(2)
    wanted, found = (
        train(make_engine(wide(), placement=replace(SPLIT, compile=compiled)), steps)[0]
        for compiled in (False, True)
    )
    assert found == pytest.approx(wanted, rel=1e-5)


def refusals() -> Iterator[tuple[PreTrainedModel, int, str]]:
    yield llama(), 20000, "layer 0, which has no experts that could be taken some at a time, takes"
    yield mixtral(), 14000, "all but the experts of layer 0 takes 14336 bytes"
    yield mixtral(intermediate_size=48), CORE + 512, "an expert of layer 0 takes 18432 bytes"
    roberta = tiny_model("roberta", changes={"vocab_size": 2000})
    before = "the head, which computes with lm_head.dense.weight before its table, takes 269824"
    yield roberta, 200_000, before


@pytest.mark.parametrize(("model", "max_stream_bytes", "message"), list(refusals()))
def test_what_cannot_be_split_is_refused(model: Any, max_stream_bytes: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make_engine(model, placement=Placement(max_stream_bytes=max_stream_bytes))
    text = str(caught.value)
    assert text.startswith(f"placement.max_stream_bytes is {max_stream_bytes}, but {message}")
    assert text.endswith("and cannot be split; set it to that or more")
