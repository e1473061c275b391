"""Adafactor's three passes over matrices in plain torch: what the native library must reproduce.

Sums are taken in one order everywhere, in fp32. `BY_HALVES` numbers of a row become one by adding
their second half to the first, again and again, and these are added one after the other; so are the
numbers of `ROWS` rows in each column, and what comes of these is left to the caller.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatrain.kernels.reference import join_block, split_block
from megatrain.kernels.states import TileRange, UpdateOptions

BY_HALVES, ROWS = 512, 64

_BLOCK = 1 << 21
"""Elements worked on at a time: their temporaries take 40 MiB."""


class Factors(NamedTuple):
    """What a gradient is multiplied by: `min(rows * columns, most)`.

    Attributes:
        rows: [count, rows] float32.
        columns: [count, columns] float32.
        most: a float32 number.
    """

    rows: Tensor
    columns: Tensor
    most: float


class Sums(NamedTuple):
    """Sums of squares, float32.

    Attributes:
        rows: [count, rows] of each row's gradients.
        columns: [count, ceil(rows / ROWS), columns] of the gradients of some rows.
        masters: [count, rows] of each row's masters.
    """

    rows: Tensor
    columns: Tensor
    masters: Tensor


def empty_sums(weights: Tensor) -> Sums:
    """Memory for the sums of weights [count, rows, columns], on their device."""
    count, rows, columns = weights.shape
    shapes = (count, rows), (count, -(-rows // ROWS), columns), (count, rows)
    return Sums(*(weights.new_empty(shape, dtype=torch.float32) for shape in shapes))


def by_halves(values: Tensor, dim: int = -1) -> Tensor:
    """The sum along a dimension, which is not empty: the second half is added to the first."""
    while (size := values.shape[dim]) > 1:
        half = 1 << (size - 1).bit_length() - 1
        first, second = values.split([half, size - half], dim)
        if size < 2 * half:
            first = first.clone()
            first.narrow(dim, 0, size - half).add_(second)
        else:
            first = first + second
        values = first
    return values.squeeze(dim)


def factored_sums(tile: TileRange, options: UpdateOptions) -> Sums:
    """Sums of the squares of gradients times `grad_scale`, and of those of masters.

    Args:
        tile: weights, remainder (int16) and gradient of matrices [count, rows, columns].
    """
    sums = empty_sums(tile.weights)
    for at in _blocks(tile.weights.shape):
        squares = _gradient(tile, options, at).square_()
        sums.rows[at] = _of_rows(squares)
        some = slice(at[1].start // ROWS, -(-at[1].stop // ROWS))
        sums.columns[at[0], some] = _of_columns(squares)
        sums.masters[at] = _of_rows(_masters(tile, at).square())
    return sums


def factored_changes(tile: TileRange, factors: Factors, options: UpdateOptions) -> Tensor:
    """[count, rows] float32: sums of the squares of gradients times scale and factors."""
    sums = torch.empty_like(factors.rows)
    for at in _blocks(tile.grad.shape):
        sums[at] = _of_rows(_change(tile, factors, options, at).square_())
    return sums


def factored_move(
    tile: TileRange, factors: Factors, options: UpdateOptions, *, decay: float, size: Tensor
) -> None:
    """Masters times `decay`, less gradients times scale, factors and `size`, a float32 number."""
    for at in _blocks(tile.weights.shape):
        master = _masters(tile, at)
        master.mul_(decay).sub_(_change(tile, factors, options, at).mul_(size))
        if tile.remainder is not None:
            split_block(master, tile.weights[at], tile.remainder[at])


_At = tuple[slice, slice]


def _blocks(shape: torch.Size) -> Iterator[_At]:
    """Some whole matrices, or some rows of one."""
    count, rows, columns = shape
    matrices, some = max(1, _BLOCK // (rows * columns)), max(1, _BLOCK // (ROWS * columns)) * ROWS
    for number in range(0, count, matrices):
        for start in range(0, rows, some):
            yield slice(number, number + matrices), slice(start, min(start + some, rows))


def _gradient(tile: TileRange, options: UpdateOptions, at: _At) -> Tensor:
    return tile.grad[at].float() * options.grad_scale


def _change(tile: TileRange, factors: Factors, options: UpdateOptions, at: _At) -> Tensor:
    by = factors.rows[at][..., None] * factors.columns[at[0]][:, None]
    return by.clamp_(max=factors.most).mul_(_gradient(tile, options, at))


def _masters(tile: TileRange, at: _At) -> Tensor:
    """fp32 masters of a range; fp32 weights themselves, to be changed in place."""
    weights = tile.weights[at]
    if tile.remainder is None:
        return weights
    master = torch.empty_like(weights, dtype=torch.float32)
    join_block(weights, tile.remainder[at], master)
    return master


def _of_rows(squares: Tensor) -> Tensor:
    return _in_turn([by_halves(part) for part in squares.split(BY_HALVES, -1)])


def _of_columns(squares: Tensor) -> Tensor:
    padded = pad(squares, (0, 0, 0, -squares.shape[1] % ROWS))
    return _in_turn(padded.unflatten(1, (-1, ROWS)).unbind(2))


def _in_turn(values: Sequence[Tensor]) -> Tensor:
    total = values[0].clone()
    for each in values[1:]:
        total.add_(each)
    return total
