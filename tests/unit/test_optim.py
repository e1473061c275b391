"""Optimizers: their settings and groups, their rules bit for bit, the codes of small states."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from megatrain import SGD, AdamW, InputError
from megatrain.device import CpuDevice
from megatrain.kernels import reference
from megatrain.kernels.states import (
    GROUP,
    SHARES,
    SMALLEST,
    TileRange,
    UpdateOptions,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
    load_moments,
    random8,
    random16,
    stochastic_round,
)
from megatrain.optim import NO_DECAY, RULES, StreamedOptimizer
from megatrain.parallel.distributed import ALONE
from megatrain.source.tiles import DTYPES
from megatrain.store.store import Store
from megatrain.tile import Entry, TileLayout
from tests.families.plain import PlainSGD
from tests.families.tiny import tiny_model
from tests.inside import sized
from tests.refusals import refused, table
from tests.rules import FLAT, PLAIN, SWEPT
from tests.unit.kernel_cases import (  # noqa: F401
    HYPER,
    adamw,
    assert_same_bits,
    exact_roots,
    flat,
    fuses_like_torch,
    gradient,
    implementations,
    instruction_set,
    joined,
    native,
    needs_native,
    randn,
    split_state,
)

REFUSED = table(__file__, "settings.yaml")["optimizers"]


def test_patterns_without_decay_may_have_capitals_and_must_match():
    """Of a model that has `A_log`, as Mamba has; patterns of one letter take no other case."""
    model = tiny_model("mamba")
    for pattern, end in (("A_log", ".A_log"), (r"\.D$", ".D"), (r"norm_f\.", "norm_f.weight")):
        decaying, others = AdamW(no_decay=[pattern]).groups(model)
        assert {name.endswith(end) for name, _ in others["params"]} == {True}, pattern
        assert not any(name.endswith(end) for name, _ in decaying["params"]), pattern
    norm = torch.nn.ModuleDict({"LayerNorm": torch.nn.Linear(2, 2, bias=False)})
    assert [group["weight_decay"] for group in AdamW().groups(norm)] == [0.0]
    AdamW(no_decay=(*NO_DECAY, "A_log")).groups(model)  # the usual ones need not be there
    with pytest.raises(InputError, match="no_decay: no parameter has 'a_Log' in its"):
        AdamW(no_decay=["a_Log"]).groups(model)


@pytest.mark.parametrize("rule", RULES.values())
@pytest.mark.parametrize("message", REFUSED)
def test_impossible_settings_are_refused_in_one_line(message, rule):
    if REFUSED[message].keys() <= rule.__dataclass_fields__.keys():
        with refused(f"^{rule.__name__} {message}"):
            rule(**REFUSED[message])


def moved():
    """torch's AdamW after a step, with moments."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    return optimizer


def changed(change, *, loads=False):
    """Change the groups themselves, or those of a state that is loaded."""

    def misuse(optimizer):
        state = optimizer.state_dict()
        change(state["param_groups"] if loads else optimizer.param_groups)
        optimizer.load_state_dict(state) if loads else optimizer.check()

    return misuse


FOREIGN, OTHER = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
MISUSED: dict[str, Any] = {
    "parameter that this engine does not train": lambda o: o.add_param_group(
        {"params": [FOREIGN, OTHER]}
    ),
    "a parameter that this engine does not train": changed(
        lambda groups: groups[0]["params"].__setitem__(0, FOREIGN)
    ),
    "'model.embed_tokens.weight' in two groups": changed(
        lambda groups: groups.append(dict(groups[0]))
    ),
    "norm.weight' in no group": changed(lambda groups: groups.pop()),
    "asks for amsgrad, which AdamW does not know, or": changed(
        lambda groups: groups[1].update(amsgrad=True)
    ),
    "AdamW lr is None": changed(lambda groups: groups[1].pop("lr")),
    "call before Engine.step": lambda o: o.register_step_pre_hook(print),
    r"optimizer.step\(\) has nothing to do": lambda o: o.step(),
    "Engine.save": lambda o: o.state[o.param_groups[0]["params"][0]],
    r"Engine\.save": lambda o: o.state.update({}) or o.state.__setitem__(1, {}),
    "brings no moments": lambda o: o.load_state_dict(moved().state_dict()),
    "saved groups of the optimizer have other parameters": changed(
        lambda groups: groups[0]["param_names"].pop(), loads=True
    ),
    "'mine' is a Tensor, which no checkpoint can hold": lambda o: (
        o.param_groups[1].update(mine=torch.zeros(2)) or o.saved_groups()
    ),
    r"embed_tokens.weight' was frozen after the engine was made": changed(
        lambda groups: groups[0]["params"][0].requires_grad_(False)
    ),
    "asks for decoupled_weight_decay=False, which AdamW does not know, or": changed(
        lambda groups: groups[0].update(decoupled_weight_decay=False)
    ),
    "asks for states 'int8', .* which differs from the engine's; make the engine with": changed(
        lambda groups: groups[0].update(states="int8")
    ),
}


@pytest.mark.parametrize("message", MISUSED)
def test_what_has_no_effect_is_refused_in_one_line(message):
    optimizer = StreamedOptimizer(AdamW(), tiny_model("llama"))
    with refused(message):
        MISUSED[message](optimizer)
    assert optimizer.num_steps == 0


SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "lion": {"lr": 3e-4, "betas": (0.9, 0.99), "weight_decay": 0.5},
    "sgd": {"lr": 3e-3, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "sgd plain": {"lr": 3e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.1},
    "sgd nesterov": {"lr": 3e-3, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1},
}
SETTINGS |= {"adamw bf16": SETTINGS["adamw"], "adamw int8": SETTINGS["adamw"]}


@pytest.mark.parametrize("grad_scale", [1.0, 0.37])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", FLAT)
@pytest.mark.usefixtures("exact_roots")
def test_a_rule_s_update_is_its_plain_form_s_bit_for_bit(name, precision, grad_scale, monkeypatch):
    sized(monkeypatch, reference, UPDATE_BLOCK=1024)
    hyper = dict(SETTINGS[name])
    if "betas" in hyper and grad_scale < 1:
        hyper["betas"] = (0.3, 0.95)  # torch's lerp has a formula for either side of 0.5
    rule, dtype, size = SWEPT[name](**hyper), DTYPES[precision], 3001
    tile = Store(CpuDevice(), [TileLayout("t", [Entry("a", (size,), 0, 0)])], dtype, rule=rule)
    [tile], master = tile.tiles, torch.nn.Parameter(randn(size, 0))
    tile.write_master(tile.layout.entries[0], master.detach())
    plain = PLAIN[name]([master], **hyper)
    planes = [tile.weights.data, None if tile.remainder is None else tile.remainder.data]
    states = [buffer.data for buffer in tile.states.values()]
    pieces = [slice(0, 1024), slice(1024, len(tile.weights.data))]  # an update is cut anywhere
    for step in range(1, 6):
        grad = torch.zeros(len(tile.weights.data))
        grad[:size] = gradient(size, step)
        for part in pieces:
            own = [None if plane is None else plane[part] for plane in planes]
            found = [b.data[p.place(part.start, part.stop)] for p, b in tile.states.items()]
            options = UpdateOptions(part.start, step, grad_scale)
            rule.update(TileRange(*own, found, grad[part]), hyper, options)
        master.grad = grad[:size] * grad_scale
        plain.step()
    assert torch.equal(tile.whole_master(tile.layout.entries[0], ALONE), master)
    kept = [value for value in plain.state[master].values() if value.shape == master.shape]
    if "states" in rule.choices:
        states = load_moments(states)
    assert len(kept) == len(states)
    assert all(
        torch.equal(one[:size].float(), other) for one, other in zip(states, kept, strict=True)
    )


@pytest.mark.parametrize("name", FLAT)
def test_a_bad_gradient_is_seen_in_its_weights(name):
    rule, weights = SWEPT[name](), torch.ones(4)
    states = [torch.zeros(-(-4 // p.group_size), dtype=p.dtype) for p in rule.state_planes]
    grad = torch.tensor([math.nan, 1.0, -1.0, 0.0])
    rule.update(TileRange(weights, None, states, grad), vars(rule), UpdateOptions(step=1))
    assert weights.isnan().tolist() == [True, False, False, False]
    rule.update(TileRange(weights, None, states, 0 * weights), vars(rule), UpdateOptions(step=2))
    assert weights[0].isnan()


def test_a_group_that_asks_for_other_state_is_refused():
    for first, later in ((0.9, 0.0), (0.0, 0.9)):
        optimizer = StreamedOptimizer(SGD(momentum=first), tiny_model("llama"))
        optimizer.param_groups[1]["momentum"] = later
        with pytest.raises(InputError, match="asks for other state .* differs from the engine's"):
            optimizer.check()


@pytest.mark.parametrize("hyper", [each for name, each in SETTINGS.items() if "sgd" in name])
def test_the_plain_sgd_is_torch_s(hyper):
    """Which multiplies and adds at once where the machine can."""
    ours, theirs = (torch.nn.Parameter(randn(100, 0)) for _ in range(2))
    nesterov = hyper["dampening"] == 0 < hyper["momentum"]
    kinds = PlainSGD, torch.optim.SGD
    optimizers = [
        k([p], **hyper, nesterov=nesterov) for k, p in zip(kinds, (ours, theirs), strict=True)
    ]
    for step in range(1, 6):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient(100, step)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


# The codes of 8-bit states and the rounding of bf16 ones: bounds, order, zero, NaN.


# Of a share of the largest: half a code's width, and what rounding in fp32 adds.
MOST_FIRST, MOST_SECOND = 1 / 127, 1 / 255

finite = st.floats(-(2.0**126), 2.0**126, width=32)
groups = st.lists(finite, min_size=1, max_size=2 * GROUP + 3).map(torch.tensor)


def of_groups(values):
    """The largest magnitude of each element's group."""
    parts = [part.abs().max().expand(len(part)) for part in values.split(GROUP)]
    return torch.cat(parts)


@given(groups)
@example(torch.tensor([1e-38, 1e-45, 0.0]))
@example(torch.full((GROUP,), 3.4e38))
def test_a_first_moment_is_off_by_less_than_a_share_of_its_group_s_largest(values):
    codes, scales = encode_first(values)
    found, largest = decode_first(codes, scales), of_groups(values)
    assert ((found - values).abs() <= MOST_FIRST * largest + SMALLEST).all()
    assert ((found - values).abs() <= values.abs() / 9 + largest / 400 + SMALLEST).all()
    kept = largest >= SMALLEST
    assert torch.equal(
        found[kept & (values.abs() == largest)], values[kept & (values.abs() == largest)]
    )
    assert (found[values == 0] == 0).all() and (found * values >= 0).all()


@given(groups.map(torch.abs))
def test_a_second_moment_s_root_is_off_by_less_than_a_code(values):
    codes, scales = encode_second(values)
    roots, largest = values.double().sqrt(), of_groups(values).double().sqrt()
    found = codes.double() / 255 * scales.double().repeat_interleave(GROUP)[: len(values)]
    assert (
        (found - roots).abs() <= (MOST_SECOND / 2 + 1e-6) * largest + (codes == 1) * largest / 255
    ).all()
    assert torch.equal(codes == 0, values == 0)
    assert torch.allclose(decode_second(codes, scales).double(), found**2, rtol=1e-6, atol=1e-44)


def test_a_group_that_only_decays_keeps_its_codes():
    """The row of a rare token fades as a whole, however close to 1 a beta is, to zero."""
    values = torch.randn(GROUP, generator=torch.Generator().manual_seed(0))
    faded, squares, largest = values, values.abs(), values.abs().max()
    first, second = encode_first(values)[0], encode_second(squares)[0]
    for _ in range(500):
        codes, scales = encode_first(faded)
        assert torch.equal(codes, first)
        faded = decode_first(codes, scales) * 0.999
        codes, scales = encode_second(squares)
        assert torch.equal(codes, second)
        squares = decode_second(codes, scales) * 0.999
    for left in (faded, squares):
        assert left.abs().max() == pytest.approx(largest.item() * 0.999**500, rel=1e-4)
    assert not decode_first(*encode_first(faded * 1e-39)).any()


def test_chances_round_to_the_mean_and_differ_by_element_step_and_moment():
    values = torch.tensor([1.001, -3.14159, 1e-30, 0.0, 1.5]).repeat_interleave(1 << 16)
    one, two = random16(1 << 33, values.numel(), 7, values.device)
    assert one.min() >= 0 and one.max() < 1 << 16
    found = stochastic_round(values, one).double().view(5, -1).mean(1)
    wanted = values.double().view(5, -1)[:, 0]
    assert torch.allclose(found, wanted, rtol=5e-5, atol=0)
    others = (
        two,
        *(random16(at, len(one), step, one.device)[0] for at, step in ((0, 7), (1 << 33, 8))),
    )
    for other in others:
        assert abs(torch.corrcoef(torch.stack([one, other]).double())[0, 1]) < 0.01
    later, _ = random16((1 << 33) + 640, 640, 7, values.device)
    assert torch.equal(later, one[640:1280])  # however a range is cut
    short = random8(1 << 33, len(one), 7, one.device)
    again = (random8(at, len(one), step, one.device) for at, step in ((0, 7), (1 << 33, 8)))
    for other in (*again, one, two, short.roll(1), short.roll(4), short.roll(GROUP)):
        assert abs(torch.corrcoef(torch.stack([short, other]).double())[0, 1]) < 0.02
    assert short.double().mean() == pytest.approx(127.5, abs=1)
    assert torch.equal(random8((1 << 33) + 640, 640, 7, one.device), short[640:1280])


def all_shares():
    """Int8 states and bf16 gradients whose next first moments have every share of their scale."""
    size, generator = 1 << 20, torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (size,), generator=generator, dtype=torch.int8)
    grad = torch.rand(size, generator=generator).mul_(2).sub_(1).bfloat16()
    second = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return {
        **split_state(size, "int8"),
        **{"exp_avg": codes, "exp_avg_sq": second, "grad": grad},
        "scales": [torch.rand(size // GROUP, generator=generator) for _ in range(2)],
    }


@needs_native
@pytest.mark.usefixtures("instruction_set")
def test_native_codes_are_the_reference_s_for_every_code_and_share():
    """Some builds look codes up, or compute quotients without dividing."""
    if not fuses_like_torch(native.instruction_set()):
        pytest.skip("torch fuses multiply-adds here")
    found, expected = all_shares(), all_shares()
    hyper = HYPER | {"step": 7}
    moment = decode_first(found["exp_avg"], found["scales"][0]).lerp_(found["grad"].float(), 0.1)
    shares = (moment.abs() / of_groups(moment) * SHARES).round()
    assert shares.unique().numel() == SHARES + 1
    adamw(native, **found, **hyper, threads=2)
    adamw(reference, **expected, **hyper)
    for name, plane in flat(expected).items():
        assert_same_bits(flat(found)[name], plane, name)


@needs_native
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.usefixtures("instruction_set")
def test_native_updates_carry_what_is_not_finite_as_the_reference(bad):
    if not fuses_like_torch(native.instruction_set()):
        pytest.skip("torch fuses multiply-adds here")
    grad = torch.ones(3 * GROUP, dtype=torch.bfloat16)
    grad[GROUP + 5] = bad
    states = [split_state(len(grad), "int8") for _ in range(2)]
    for state in states:  # a NaN that rounding would make a zero
        state["weights"][7], state["remainder"][7] = math.nan, -1
    for step in (1, 2):
        for state, kernels in zip(states, (native, reference), strict=True):
            adamw(kernels, **state, grad=grad, **HYPER, step=step)
        found, wanted = map(flat, states)
        for name, plane in wanted.items():
            assert_same_bits(found[name].nan_to_num(7), plane.nan_to_num(7), name)
        assert states[0]["scales"][1].isnan().tolist() == [False, True, False]
    assert states[0]["weights"].isnan().sum() == GROUP + 1


@implementations
def test_24_bits_are_the_nearest_and_come_back(kernels):
    master = torch.cat([randn(20_000, 0), torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])])
    weights, found = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master)
    remainder = torch.empty_like(master, dtype=torch.int8)
    kernels.split(master, weights, remainder)
    kernels.join(weights, remainder, found)
    assert ((found - master).abs() <= master.abs() * 2**-16).logical_or(~master.isfinite()).all()
    assert not (found.view(torch.int32) & 0xFF).any()
    assert torch.equal(found[-5:].nan_to_num(7), master[-5:].nan_to_num(7))
    again = torch.empty_like(found)
    kernels.split(found, weights, remainder)
    kernels.join(weights, remainder, again)
    assert_same_bits(again, found)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_24_bits_move_by_small_learning_rates_what_fp32_moves(kind):
    """Steps of a hundredth of what 24 bits tell apart, which rounding to nearest would lose."""
    size, hyper = 1 << 14, HYPER | {"lr": 1e-6, "weight_decay": 0.0}
    states = [split_state(size, kind, dtype) for dtype in (torch.int16, torch.int8)]
    for state in states:
        state["weights"].fill_(3.0), state["remainder"].zero_()
    for step in range(1, 31):
        for state in states:
            grad = torch.ones(size, dtype=torch.bfloat16)
            adamw(reference, **state, grad=grad, **hyper, step=step)
    exact, short = (joined(state).double() - 3.0 for state in states)
    assert exact.mean() == pytest.approx(-3e-5, rel=0.05)  # fp32 rounds, too
    # The spread of the mean: some 0.4 units of 2**-14 by the root of the size, a hundredth of it.
    assert short.mean() == pytest.approx(exact.mean().item(), rel=0.05)
    assert short.unique().numel() > 1 and not (short * 2**14 % 1).any()
