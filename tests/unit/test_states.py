"""The codes of 8-bit states and the rounding of bf16 ones: bounds, order, zero, NaN."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.functional import pad

from megatrain.kernels import reference
from megatrain.kernels.states import (
    GROUP,
    SHARES,
    SMALLEST,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
    random8,
    random16,
    stochastic_round,
)
from tests.unit.kernel_cases import (
    HYPER,
    adamw,
    assert_same_bits,
    flat,
    fuses_like_torch,
    implementations,
    instruction_set,  # noqa: F401  a fixture
    joined,
    native,
    needs_native,
    randn,
    split_state,
    whole_state,
)

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


def beside_largest(shares, largest):
    """Groups of these shares of `largest`, which ends each group."""
    rows = shares[: len(shares) // (GROUP - 1) * (GROUP - 1)].view(-1, GROUP - 1)
    return pad(rows * largest, (0, 1), value=largest).flatten()


@pytest.mark.parametrize("scale", [1.0, 1e-30, 3e38, 7.7e-5])
def test_codes_never_fall_when_values_grow(scale):
    values = beside_largest(torch.linspace(-1, 1, 100 * 1000), scale)
    first = encode_first(values)[0].view(-1, GROUP)[:, :-1].flatten()
    assert (first.int().diff() >= 0).all() and first.unique().numel() == 255
    if scale < 1e30:  # squares, whose roots are spread evenly
        values = beside_largest(torch.linspace(0, 1, 50 * 1000).square(), scale)
        second = encode_second(values)[0].view(-1, GROUP)[:, :-1].flatten()
        assert (second.int().diff() >= 0).all() and second.unique().numel() == 256


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_group_nan_and_no_other(bad):
    values = torch.ones(3 * GROUP)
    values[GROUP + 5] = bad
    for encode, decode in ((encode_first, decode_first), (encode_second, decode_second)):
        found = decode(*encode(values)).view(3, GROUP).isnan()
        assert found[1].all() and not found[[0, 2]].any()


def test_a_group_that_only_decays_keeps_its_codes():
    """The row of a rare token fades as a whole, however close to 1 a beta is, to zero."""
    values = torch.randn(GROUP, generator=torch.Generator().manual_seed(0))
    first, second, largest = (
        encode_first(values)[0],
        encode_second(values.abs())[0],
        values.abs().max(),
    )
    faded, squares = values, values.abs()
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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0])
def test_what_bf16_has_stays(value):
    values = torch.full((1 << 16,), value)
    found = stochastic_round(values, torch.arange(1 << 16, dtype=torch.int32))
    assert torch.equal(found.float().nan_to_num(7), values.nan_to_num(7))


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


def test_what_rounds_to_24_bits_differs_by_element_and_step():
    one = random8(1 << 33, 1 << 16, 7, torch.device("cpu"))
    others = [random8(at, 1 << 16, step, one.device) for at, step in ((0, 7), (1 << 33, 8))]
    moments = random16(1 << 33, 1 << 16, 7, one.device)
    for other in (*others, *moments, one.roll(1), one.roll(4), one.roll(GROUP)):
        assert abs(torch.corrcoef(torch.stack([one, other]).double())[0, 1]) < 0.02
    assert one.double().mean() == pytest.approx(127.5, abs=1)
    assert torch.equal(random8((1 << 33) + 640, 640, 7, one.device), one[640:1280])


def steps_of(gradients, kind):
    """Each update [steps, GROUP] with a learning rate of 1."""
    state = whole_state(GROUP, kind)
    hyper = {"lr": 1.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
    steps = []
    for number, grad in enumerate(gradients, 1):
        state["weights"].zero_()  # so that no step is too small for them
        adamw(reference, **state, grad=grad, **hyper, step=number)
        steps.append(state["weights"].clone())
    return torch.stack(steps)


def longest_steps(gradients, kind):
    """Of each element over these updates."""
    return steps_of(gradients, kind).abs().amax(0)


def test_tiny_gradients_and_rare_ones_move_what_they_move_in_fp32():
    tiny = [torch.full((GROUP,), 1e-20)] * 3  # eps is far larger, and is told from no step
    rare = [torch.zeros(GROUP)] * 30 + [torch.randn(GROUP)] + [torch.zeros(GROUP)] * 30
    for gradients in (tiny, rare):
        found, wanted = (longest_steps(gradients, kind) for kind in ("int8", "fp32"))
        assert (wanted > 0).all()
        assert torch.allclose(found, wanted, rtol=0.1)
