"""Adafactor's kernels: bit for bit the plain form, on every instruction set, shape and type."""

import math

import pytest
import torch

from megatrain.kernels import factored, reference
from megatrain.kernels.factored import Factors, by_halves
from megatrain.kernels.states import TileRange, UpdateOptions
from tests.unit.kernel_cases import (
    assert_same_bits,
    gradient,
    instruction_set,  # noqa: F401  a fixture
    native,
    needs_native,
    randn,
)

# Rows and columns below, at and above what is added by halves, groups and blocks of rows.
SHAPES = [(3, 1, 1), (2, 7, 3), (1, 128, 512), (2, 129, 513), (1, 300, 1600), (3, 1, 1025)]


def planes(shape: tuple[int, ...], split: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    numel = math.prod(shape)
    master = randn(numel, 0) * 0.02
    if not split:
        return master.view(shape), None
    weights, remainder = master.bfloat16(), torch.empty(numel, dtype=torch.int16)
    reference.split(master, weights, remainder)
    return weights.view(shape), remainder.view(shape)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    if found.is_floating_point():  # of NaNs only that they are
        found, expected = found.nan_to_num(7), expected.nan_to_num(7)
    assert_same_bits(found, expected)


@needs_native
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_native_passes_are_the_plain_ones_bit_for_bit(
    shape, split, grad_dtype, instruction_set, monkeypatch  # noqa: F811
):  # fmt: skip
    monkeypatch.setattr(factored, "_BLOCK", 1 << 16)  # which no bit may depend on
    count, rows, columns = shape
    grad = gradient(math.prod(shape), 1).view(shape).to(grad_dtype)
    grad.view(-1)[5::1999] = math.inf
    by_row, by_column = (randn(n, n).abs() for n in (count * rows, count * columns))
    by_row[3::50], by_column[1::70] = math.inf, 0.0
    factors = Factors(by_row.view(count, rows), by_column.view(count, columns), 1.5)
    move = {"decay": 0.97, "size": torch.tensor(3e-3)}
    made = [planes(shape, split) for _ in range(2)]
    results = []
    for kernels, own in zip((native, factored), made, strict=True):
        tile, options = TileRange(*own, (), grad), UpdateOptions(grad_scale=0.37, threads=2)
        sums = kernels.factored_sums(tile, options)
        changes = kernels.factored_changes(tile, factors, options)
        kernels.factored_move(tile, factors, options, **move)
        results.append([*sums, changes, *(plane for plane in own if plane is not None)])
    for found, expected in zip(*results, strict=True):
        same(found, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 500, 512, 1000])
def test_sums_are_sums(size):
    values = randn(3 * size, 0).view(3, size)
    expected = values.double().sum(1).float()
    torch.testing.assert_close(by_halves(values), expected, rtol=1e-6, atol=1e-5)
    shape = (2, 5, size)
    values = randn(10 * size, 1).view(shape)
    tile = TileRange(values, None, (), values)
    sums = factored.factored_sums(tile, UpdateOptions(grad_scale=2.0))
    squares = 4 * values.double().square()
    for found, expected in (
        (sums.rows, squares.sum(2)),
        (sums.columns, squares.sum(1)[:, None]),
        (sums.masters, squares.sum(2) / 4),
    ):
        torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=0)


@needs_native
def test_wrong_planes_are_named():
    weights, remainder = planes((2, 3, 4), split=True)
    tile, options = TileRange(weights, remainder, (), weights), UpdateOptions()
    with pytest.raises(ValueError, match="remainder is torch.int8, expected torch.int16"):
        native.factored_sums(tile._replace(remainder=remainder.to(torch.int8)), options)
    with pytest.raises(ValueError, match="grad has 12 elements, expected 24"):
        native.factored_sums(tile._replace(grad=weights[:1]), options)
    with pytest.raises(ValueError, match="a factor has 6 elements, expected 8"):
        wrong = Factors(torch.ones(2, 3), torch.ones(2, 3), 1.0)
        native.factored_changes(tile, wrong, options)
