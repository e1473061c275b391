"""The AdamW kernels: bit for bit torch's arithmetic, on every instruction set, length and form."""

import math
from functools import cache, partial
from itertools import product

import pytest
import torch

from megatrain.kernels import reference
from megatrain.kernels.reference import RULES
from megatrain.kernels.states import Scalars, TileRange, UpdateOptions
from tests.unit.kernel_cases import (
    HYPER,
    adamw,
    assert_same_bits,
    flat,
    fuses_like_torch,
    gradient,
    implementations,
    instruction_set,  # noqa: F401  a fixture
    joined,
    native,
    needs_native,
    randn,
    split_state,
    whole_state,
)

SIZES = [*range(19), 31, 33, 63, 64, 65, 70, 1023, 1025, (1 << 16) + 1, 140_003]
STATES = {"split": split_state, "whole": whole_state}
FORMS = STATES | {"24 bits": partial(split_state, remainder=torch.int8)}


def torch_adamw(size, steps, hyper):
    """The state after some steps of torch's own optimizer on the fp32 master."""
    param = torch.nn.Parameter(randn(size, 0) * 0.02)
    optimizer = torch.optim.AdamW(
        [param],
        lr=hyper["lr"],
        betas=(hyper["beta1"], hyper["beta2"]),
        eps=hyper["eps"],
        weight_decay=hyper["weight_decay"],
        foreach=False,
    )
    for step in range(1, steps + 1):
        param.grad = gradient(size, step)
        optimizer.step()
    return {"weights": param.detach(), **optimizer.state[param]}


def test_unpatched_torch_differs_by_its_roots_alone():
    size, steps = 100_003, 5
    expected = torch_adamw(size, steps, HYPER)
    state = whole_state(size)
    for step in range(1, steps + 1):
        adamw(reference, **state, grad=gradient(size, step), **HYPER, step=step)
    assert_same_bits(state["exp_avg"], expected["exp_avg"], "exp_avg")
    assert_same_bits(state["exp_avg_sq"], expected["exp_avg_sq"], "exp_avg_sq")
    # No step is longer than twice the learning rate here. Each may round its root, its quotient
    # and its sum otherwise: a few units of 2^-24 of the step, one of the weight.
    longest = 2 * HYPER["lr"]
    allowed = steps * (2**-22 * longest + 2**-23 * (expected["weights"].abs() + longest))
    assert ((state["weights"] - expected["weights"]).abs() <= allowed).all()


CASES = list(product(FORMS, ["fp32", "bf16", "int8"], [torch.bfloat16, torch.float32]))


@needs_native
@pytest.mark.parametrize(("form", "kind", "grad_dtype"), CASES)
def test_native_is_the_reference_bit_for_bit(instruction_set, form, kind, grad_dtype):  # noqa: F811
    if not fuses_like_torch(instruction_set):
        pytest.skip("torch fuses multiply-adds here; tested below without")
    check_native(form, kind, grad_dtype)


def check_native(form, kind, grad_dtype):
    for size in SIZES:
        found = after_steps(native, form, kind, grad_dtype, size)
        for plane, values in by_reference(form, kind, grad_dtype, size).items():
            assert_same_bits(found[plane], values, f"{plane} of {size}")


def after_steps(kernels, form, kind, grad_dtype, size):
    state = FORMS[form](size, kind)
    for step in (1, 2, 3):
        grad = gradient(size, step).to(grad_dtype)
        grad[128:200] = 0
        arguments = dict(grad=grad, **HYPER, step=step, grad_scale=0.37, at=(9 << 32) - 640)
        adamw(kernels, **state, **arguments, threads=step)
    return flat(state)


by_reference = cache(partial(after_steps, reference))  # the same for all instruction sets


@needs_native
def test_hyperparameter_extremes_agree():
    cases = [
        {"weight_decay": 0.0},
        {"eps": 0.0},
        {"lr": 0.0},
        {"beta1": 0.0},
        {"beta2": 0.0},
        {"beta1": 0.5},
        {"beta2": 0.999999},
    ]
    if not fuses_like_torch(native.instruction_set()):
        pytest.skip("torch does not fuse multiply-adds here")
    for case in cases:
        hyper = HYPER | case
        found, expected = split_state(1009), split_state(1009)
        for step in (1, 2, 1000):
            grad = gradient(1009, step)
            adamw(native, **found, grad=grad, **hyper, step=step, threads=2)
            adamw(reference, **expected, grad=grad, **hyper, step=step)
        for plane, values in flat(found).items():
            assert_same_bits(values, flat(expected)[plane], f"{plane} with {case}")


@implementations
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_gradient_streams_as_nan_and_stays_where_it_is(kernels, bad):
    size = 100
    state = split_state(size)
    grad = gradient(size, 1)
    grad[41] = bad
    adamw(kernels, **state, grad=grad, **HYPER, step=1, threads=2)
    expected = torch.zeros(size, dtype=torch.bool)
    expected[41] = True
    assert torch.equal(state["weights"].isnan(), expected)
    assert torch.equal(joined(state).isnan(), expected)


@implementations
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_small_steps_are_not_lost_to_bf16(kernels, kind):
    """200 steps at 1e-6: the split master goes where fp32 training goes, bf16 weights stay."""
    size, hyper = 5_003, HYPER | {"lr": 1e-6, "weight_decay": 0.0}
    split, whole = split_state(size, kind), whole_state(size, kind)
    stalled, start = whole_state(size), whole_state(size)["weights"]
    stalled["weights"] = start.bfloat16()
    direction = randn(size, 7).sign()
    for step in range(1, 201):
        grad = (direction + 0.1 * randn(size, 100 + step)).bfloat16()
        arguments = dict(grad=grad, **hyper, step=step)
        adamw(kernels, **split, **arguments, threads=2)
        adamw(kernels, **whole, **arguments, threads=2)
        in_place = stalled | {"weights": stalled["weights"].float()}
        adamw(kernels, **in_place, **arguments, threads=2)
        stalled["weights"] = in_place["weights"].bfloat16()
    assert_same_bits(joined(split), whole["weights"], "master")
    travelled = (whole["weights"] - start).abs()
    assert (travelled > 1.5e-4).all()
    stuck = stalled["weights"] == start.bfloat16()
    assert stuck[start.abs() > 1e-3].all()


BY = Scalars(-3e-3, 0.97, 0.9, 0.3, 0.95, 0.05)


@needs_native
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "adamw"])
def test_native_rules_are_the_reference_s_bit_for_bit(instruction_set, rule):  # noqa: F811
    if not fuses_like_torch(instruction_set) and rule == "direction":
        pytest.skip("torch fuses multiply-adds here; tested above without")
    check_rule(rule)


def check_rule(rule):
    cases = product(FORMS.values(), [torch.bfloat16, torch.float32], [0, 1, 1025, (1 << 16) + 65])
    for make, grad_dtype, size in cases:
        found, expected = make(size), make(size)
        for step in (1, 2):
            grad = gradient(size, step).to(grad_dtype)
            grad[::7], grad[1::40] = -0.0, math.inf
            options = UpdateOptions((9 << 32) - 640, step, 0.37, threads=step)
            by = BY._replace(decay=0.97 * (step < 2))
            for kernels, each in ((native, found), (reference, expected)):
                states = [] if rule in ("sgd", "direction") else [each["exp_avg"]]
                tile = TileRange(each["weights"], each["remainder"], states, grad)
                kernels.update(rule, tile, by, options)
        for plane, values in flat(found).items():
            others = flat(expected)[plane]
            if values.is_floating_point():  # of NaNs only that they are
                values, others = values.nan_to_num(7), others.nan_to_num(7)
            assert_same_bits(values, others, f"{plane} of {size}")
