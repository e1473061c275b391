"""Layers too large for a slot are streamed some experts at a time, and give what they gave."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers.models.qwen3_moe import Qwen3MoeForCausalLM

from megatrain import AdamW, Engine, InputError, Placement
from megatrain.engine.assemble import tile_layouts
from megatrain.engine.layer import Layer
from megatrain.engine.tile_slice import least_split
from megatrain.model.build import emptied
from megatrain.model.probe import spec
from megatrain.optim import StreamedOptimizer
from megatrain.placement import ActivationPolicy
from tests.families.examine import PASSES
from tests.families.parity import compare
from tests.families.plain import Step
from tests.families.report import documented
from tests.families.tiny import families, tiny_model
from tests.parity.cases import (
    SIZES,
    Noting,
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

EXPERT = 32 * 24 * 3 * 4  # bytes of one in fp32
CORE = 17000  # and somewhat more than all the rest of a layer

# Portions of 1, 2 and 3 experts, of six.
SPLITS = [CORE, 2 * EXPERT, 3 * EXPERT]


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


def train(
    engine: Engine, steps: list[Step], *, norms: bool = False
) -> tuple[list[float | None], list[Tensor]]:
    """All numbers that a user sees, those of gradients if asked for, and the state at the end."""
    with engine:
        numbers = []
        for step in steps:
            result = engine.step(step)
            numbers += [result.loss, engine.evaluate(step), *([result.grad_norm] if norms else [])]
        logits = engine.logits({"input_ids": steps[0][0]["input_ids"]})
        return numbers, [logits, *masters(engine).values(), *moments(engine)]


def alike(one: tuple[list, list[Tensor]], other: tuple[list, list[Tensor]]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize(
    ("max_stream_bytes", "choices"),
    list(zip(SPLITS, [{}, {"layer_inputs": "host", "slots": 3}, {"slots": 1}], strict=True)),
)
def test_two_experts_a_token_change_no_bit(max_stream_bytes: int, choices: dict[str, Any]) -> None:
    """The sum of two does not depend on their order. (Clipped, the norm of all is summed anew.)"""
    steps = make_batches(3)
    wanted = train(make_engine(mixtral(), clip=None), steps)
    placement = Placement(max_stream_bytes=max_stream_bytes, **choices)
    assert alike(train(make_engine(mixtral(), clip=None, placement=placement), steps), wanted)


@pytest.mark.parametrize(
    ("make", "max_stream_bytes"), [(mixtral, CORE), (qwen3_moe, CORE), (qwen3_moe, 3 * EXPERT)]
)
def test_gradients_and_steps_are_plain_torch_s(make: Any, max_stream_bytes: int) -> None:
    """Clipped and not, the sums of three or more experts are rounded elsewhere: 1e-6 of them."""
    steps, model = make_batches(3), make()
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


# Shared experts; biases of experts; norms after the experts, whose gradients need their result.
FAMILIES = ["deepseek_v3", "gpt_oss", "afmoe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_plain_torch_s_in_the_smallest_portions(family: str) -> None:
    check(family)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [f for f in families() if f not in FAMILIES])
def test_every_family_in_the_smallest_portions(family: str) -> None:
    if documented()[family][0] != PASSES:
        pytest.skip("does not pass")
    check(family)


def check(family: str) -> None:
    model = tiny_model(family)
    found = spec(emptied(model))
    if not any(layer.kind.experts for layer in found.layers):
        pytest.skip("has no experts that could be taken some at a time")
    groups = StreamedOptimizer(AdamW(), found.capture.model).group_of()
    least = least_split(found, tile_layouts(found, groups), 4)
    placement = Placement(max_stream_bytes=least, layer_inputs="host", layer_input_lanes=1, slots=3)
    assert not compare(model, placement).failures


def test_in_bf16_only_sums_are_rounded_elsewhere() -> None:
    steps, model = make_batches(2), qwen3_moe()
    whole = make_engine(model, precision="bf16")
    with make_engine(
        model, precision="bf16", placement=Placement(max_stream_bytes=CORE // 2)
    ) as engine:
        for step in steps:
            assert engine.step(step).loss == pytest.approx(whole.step(step).loss, rel=1e-2)


@pytest.mark.parametrize(("clip", "eagerness"), [(0.5, 0.0), (None, 0.1)])
@pytest.mark.parametrize("choices", [{"layer_inputs": "host", "slots": 3}, {"slots": 1}])
def test_lateness_changes_no_bit(
    choices: dict[str, Any], clip: float | None, eagerness: float
) -> None:
    steps = make_batches(2)
    placement = Placement(max_stream_bytes=3 * EXPERT, **choices)
    wanted = train(make_engine(mixtral(), clip=clip, placement=placement), steps)
    device = LateDevice(eagerness=eagerness)
    engine = make_engine(mixtral(), clip=clip, placement=placement, device=device)
    assert alike(train(engine, steps), wanted)


def test_slots_and_sums_are_as_large_as_a_portion() -> None:
    taken = {}
    for max_stream_bytes in (None, 4 * EXPERT):
        device = Noting()
        placement = Placement(max_stream_bytes=max_stream_bytes, keep_rows=False)
        model = mixtral(num_local_experts=32, vocab_size=64)
        make_engine(model, placement=placement, device=device).close()
        taken[max_stream_bytes] = device.taken
    tile_slice = 4 * EXPERT
    assert taken[None]["slots"] > 2 * 32 * EXPERT
    assert taken[4 * EXPERT]["slots"] == 2 * tile_slice
    assert taken[None]["work room"] > 32 * EXPERT
    assert taken[4 * EXPERT]["work room"] == tile_slice


def test_random_numbers_are_those_of_whole_layers() -> None:
    """All but the experts is computed four times in a step, each time with the same dropout."""
    steps, random = make_batches(2), {"attention_dropout": 0.2, "router_jitter_noise": 0.1}
    wanted = train(make_engine(mixtral(**random), clip=None), steps)
    assert not alike(wanted, train(make_engine(mixtral(), clip=None), steps))
    placement = Placement(max_stream_bytes=3 * EXPERT)
    split = make_engine(mixtral(**random), clip=None, placement=placement)
    assert alike(train(split, steps), wanted)


def test_frozen_experts_and_frozen_rest() -> None:
    steps = make_batches(1)
    for part in ("experts", "attn"):
        losses = []
        for placement in (Placement(), Placement(max_stream_bytes=CORE)):
            model = mixtral()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(part not in name)
            losses.append(train(make_engine(model, clip=None, placement=placement), steps))
        assert alike(*losses)


def test_only_layers_that_are_too_large_are_split_and_resident_ones_never() -> None:
    model = tiny_model("deepseek_v3")  # the first layer is dense, there are shared experts

    def stages(**choices: Any) -> list[str]:
        with make_engine(model, placement=Placement(**choices)) as engine:
            return [type(unit).__name__[0] for unit in engine._parts.trunk]

    sizes = [sum(p.numel() for p in layer.parameters()) * 4 for layer in model.model.layers]
    assert stages(max_stream_bytes=max(sizes) + 4096) == list("PLLL")
    assert stages(max_stream_bytes=sizes[0] + 2048) == list("PLBGABGA")
    assert stages(max_stream_bytes=sizes[0] + 2048, resident=("layer 1",)) == list("PLLBGA")


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


def keeping(engine: Engine) -> list[Layer]:
    """The layers whose graphs wait on the device."""
    layers = [unit for unit in engine._parts.trunk if isinstance(unit, Layer)]
    return [layer for layer in layers if layer.policy == ActivationPolicy("graph", "device")]


@pytest.mark.parametrize(
    ("choices", "kept"),
    [
        ({"save_activations": 1}, [1]),
        ({"save_activations": 2, "resident": ("layer 2",)}, [1, 2]),
        ({"offload_activations": 1, "save_activations": 1, "resident": ("layer 0",)}, [1]),
    ],
)
def test_whole_layers_beside_split_ones_keep_their_graphs(
    choices: dict[str, Any], kept: list[int]
) -> None:
    """Of three layers the one in the middle is dense."""
    steps = make_batches(2)
    resident = {name: choices[name] for name in choices if name == "resident"}
    wanted = make_engine(qwen3_moe(), placement=Placement(max_stream_bytes=CORE, **resident))
    engine = make_engine(qwen3_moe(), placement=Placement(max_stream_bytes=CORE, **choices))
    assert [layer.visit for layer in keeping(engine)] == kept
    assert alike(train(engine, steps), train(wanted, steps))


def test_steps_that_break_off_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = make_batches(2)
    placement = Placement(max_stream_bytes=SPLITS[1])
    wanted = train(make_engine(mixtral(), placement=placement), steps)
    engine = make_engine(mixtral(), placement=placement)
    group = engine._parts.trunk[2]
    with monkeypatch.context() as patch:
        patch.setattr(group, "vjp", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step(steps[0])
    assert alike(train(engine, steps), wanted)


def refusals() -> Iterator[tuple[PreTrainedModel, int, str]]:
    yield llama(), 20000, "layer 0, which has no experts that could be taken some at a time, takes"
    yield mixtral(), 14000, "all but the experts of layer 0 takes 14336 bytes"
    yield mixtral(intermediate_size=48), CORE + 512, "an expert of layer 0 takes 18432 bytes"


@pytest.mark.parametrize(("model", "max_stream_bytes", "message"), list(refusals()))
def test_what_cannot_be_split_is_refused(model: Any, max_stream_bytes: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make_engine(model, placement=Placement(max_stream_bytes=max_stream_bytes))
    text = str(caught.value)
    assert text.startswith(f"placement.max_stream_bytes is {max_stream_bytes}, but {message}")
    assert text.endswith("and cannot be split; set it to that or more")
