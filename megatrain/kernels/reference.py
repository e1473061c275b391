"""Every kernel in plain torch: the native library's results, bit for bit, and its stand-in.

All functions work in place on flat contiguous CPU tensors of any length, and raise ValueError if a
tensor has another dtype, size or layout. They ignore the native functions' argument `threads`:
torch has one pool of threads for the process.
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatrain.kernels import states
from megatrain.kernels.states import Scalars, TileRange, UpdateOptions

UPDATE_BLOCK = 1 << 21
"""Elements worked on at a time: temporaries stay under 100 MiB, and torch's threads, which meet
after each operation, meet seldom."""

SUMMED_BYTES = 1 << 18
"""Bytes of a plane that share a checksum: a block."""

_SIDE = 256  # words of a row in the matrix of a block's words

_PAGE_BYTES = 4096
"""The smallest page of the supported systems; with larger ones pages are touched several times."""


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    yield from zip(*(tensor.split(UPDATE_BLOCK) for tensor in tensors), strict=True)


def split(master_fp32: Tensor, weights: Tensor, remainder: Tensor, *, threads: int = 1) -> None:
    """Split fp32 numbers into bf16 weights and a remainder, which is exact if it has 16 bits.

    With `u` the 32 bits of a number, the weights are `(u + 0x8000) >> 16`: rounded to nearest, ties
    away from zero because the remainder is signed. The remainder is the low half of `u`, or its
    upper byte, for which numbers are first rounded to 24 bits, to nearest, ties away from zero. So
    the largest finite numbers stream as infinity and still join back exactly, unless rounding to 24
    bits makes them infinite. A NaN becomes quiet and keeps its sign and the upper six bits of its
    payload: its remainder is zero. With 16 bits, `join` returns all other numbers bit for bit.

    Args:
        master_fp32: [N] float32, read.
        weights: [N] bfloat16, written.
        remainder: [N] int16 or int8, written.
    """
    states.check_planes(master=master_fp32, weights=weights, remainder=remainder)
    for master, high, low in _blocks(master_fp32, weights, remainder):
        split_block(master, high, low)


def split_block(
    master: Tensor, weights: Tensor, remainder: Tensor, added: Tensor | int = 0x80
) -> None:
    """Split a small range, as `split` does, on any device.

    Args: `added`: with a remainder of one byte, the number added to the lowest byte, whose carry
    rounds to 24 bits: 0x80 to nearest, a random one stochastically.
    """
    is_nan, has_byte = master.isnan(), remainder.dtype == torch.int8
    bits = master.view(torch.int32) + (added if has_byte else 0)
    # In int32 the sums wrap only for NaNs, and the narrowing keeps the low part.
    rounded = (bits + 0x8000) >> 16
    quiet_nan = (master.view(torch.int32) >> 16) | 0x40
    weights.view(torch.int16).copy_(torch.where(is_nan, quiet_nan, rounded))
    remainder.copy_((bits >> 8 if has_byte else bits).masked_fill(is_nan, 0))


def join(weights: Tensor, remainder: Tensor, master_fp32: Tensor, *, threads: int = 1) -> None:
    """Join bf16 weights and their remainder: `fp32 = (weights << 16) + remainder`; on any device.

    Args:
        weights: [N] bfloat16, read.
        remainder: [N] int16, read; or int8, to be multiplied by 256.
        master_fp32: [N] float32, written.
    """
    if master_fp32.is_cpu:
        states.check_planes(master=master_fp32, weights=weights, remainder=remainder)
    for high, low, master in _blocks(weights, remainder, master_fp32):
        join_block(high, low, master)


def join_block(weights: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Join a small range, as `join` does, on any device."""
    low = remainder.int() << 8 if remainder.dtype == torch.int8 else remainder
    torch.add(weights.view(torch.int16).int() << 16, low, out=master.view(torch.int32))


def checksum(bytes_uint8: Tensor, blocks: Tensor, at: int, *, threads: int = 1) -> None:
    """Add the checksums of bytes of a plane, from its byte `at` on, to those of its blocks.

    A block is SUMMED_BYTES of the plane. Its checksum is two sums modulo 2^64: of its 64-bit words,
    and of each word times its place in the block. So the checksums of a plane's ranges add up to
    that of the plane, in any order.

    Args: `blocks`: [blocks, 2] int64, on the device of the bytes.
    """
    done, count = 0, 0
    while done < len(bytes_uint8):
        block, first = divmod(at + done, SUMMED_BYTES)
        unread = len(bytes_uint8) - done
        # Next comes a part of one block, or all the whole blocks that are left.
        count = 1 if first or unread < SUMMED_BYTES else unread // SUMMED_BYTES
        part = bytes_uint8[done : done + count * SUMMED_BYTES - first]
        done += len(part)
        if len(part) < count * SUMMED_BYTES:
            part = pad(part, (first, SUMMED_BYTES - first - len(part)))
        words = part.view(torch.int64).view(count, -1, _SIDE)
        rows, columns = words.sum(2), words.sum(1)
        # The word in row r and column c has place `r * _SIDE + c` in its block.
        number = torch.arange(_SIDE, device=words.device)
        weighted = (rows * number[: rows.shape[1]]).sum(1) * _SIDE + (columns * number).sum(1)
        blocks[block : block + count] += torch.stack((rows.sum(1), weighted), 1)


def update(rule: str, tile: TileRange, scalars: Scalars, options: UpdateOptions) -> None:
    """Update a range by one of `RULES` and its scalars, in place, on any device.

    Raises ValueError on the CPU: a bad tensor, or with AdamW an `options.at` that GROUP does not
    divide.
    """
    if tile.weights.is_cpu:
        states.check_update(rule, tile, options)
    for start in range(0, tile.weights.numel(), UPDATE_BLOCK):
        block, at = slice(start, start + UPDATE_BLOCK), options.at + start
        groups = slice(block.start // states.GROUP, block.stop // states.GROUP)
        moments = [plane[block] for plane in tile.states[:2]]
        moments += [plane[groups] for plane in tile.states[2:]]  # scales
        high, low = tile.weights[block], None if tile.remainder is None else tile.remainder[block]
        param = high if low is None else torch.empty_like(high, dtype=torch.float32)
        if low is not None:
            join_block(high, low, param)
        grad = tile.grad[block].float() * options.grad_scale
        RULES[rule](param, grad, moments, scalars, options._replace(at=at))
        if low is not None:
            added: Tensor | int = 0
            if low.dtype == torch.int8:
                added = states.random8(at, len(param), options.step, param.device)
            split_block(param, high, low, added)


# In all rules an operation rounds once or is fused: no bit depends on how torch groups elements.


def _adamw(
    param: Tensor, g: Tensor, moments: Sequence[Tensor], scalars: Scalars, options: UpdateOptions
) -> None:
    """AdamW with the operations of `torch.optim.AdamW(foreach=False)`.

    Source: `_single_tensor_adam` in torch/optim/adam.py of torch 2.13. One operation is better: the
    root is rounded correctly, while MKL's in torch's CPU builds is one unit in the last place off
    for every fifth number.
    """
    m, v = states.load_moments(moments)
    param.mul_(scalars.decay)
    m.lerp_(g, scalars.weight1)
    v.mul_(scalars.beta2).addcmul_(g, g, value=scalars.weight2)
    denominator = (states.exact_sqrt(v) / scalars.root_correction2).add_(scalars.eps)
    param.addcdiv_(m, denominator, value=scalars.negative_step_size)
    states.store_moments((m, v), moments, at=options.at, step=options.step)


def _lion(param: Tensor, g: Tensor, moments: Sequence[Tensor], scalars: Scalars, *_: Any) -> None:
    [momentum] = moments
    mixed = (momentum * scalars.beta1).add_(g * scalars.weight1)
    # torch's sign of a NaN is 0, which would hide the NaN.
    direction = torch.where(mixed.isnan(), mixed, mixed.sign())
    param.mul_(scalars.decay).add_(direction.mul_(scalars.negative_step_size))
    momentum.mul_(scalars.beta2).add_(g.mul_(scalars.weight2))


def _sgd(
    param: Tensor, g: Tensor, moments: Sequence, scalars: Scalars, *_: Any, nesterov: bool = False
) -> None:
    """SGD: `decay` is weight decay, `beta1` the momentum, `weight1` 1 minus the dampening."""
    if scalars.decay:
        g.add_(param * scalars.decay)
    for momentum in moments:  # one, or none
        momentum.mul_(scalars.beta1).add_(g * scalars.weight1)
        g = g.add_(momentum * scalars.beta1) if nesterov else momentum
    param.add_(g * scalars.negative_step_size)


def _direction(param: Tensor, g: Tensor, moments: Sequence, scalars: Scalars, *_: Any) -> None:
    """Apply a direction of Muon, with the roundings of torch.optim.Muon."""
    param.mul_(scalars.decay).add_(g, alpha=scalars.negative_step_size)


RULES: dict[str, Callable[..., None]] = {
    "adamw": _adamw,
    "lion": _lion,
    "sgd": _sgd,
    "sgd momentum": _sgd,
    "sgd nesterov": partial(_sgd, nesterov=True),
    "direction": _direction,
}
"""The rules of `update`, in the order of csrc/kernels.h."""


def gather_rows(table_2d: Tensor, row_ids: Tensor, out_2d: Tensor, *, threads: int = 1) -> None:
    """`out[i] = table[row_ids[i]]`, of a table `[rows, width]` of any 2- or 4-byte dtype.

    Args: `row_ids`: [N] int64; the caller has checked that they lie inside the table.
    """
    states.check_rows(table_2d, row_ids, out_2d)
    torch.index_select(table_2d, 0, row_ids, out=out_2d)


def scatter_rows(table_2d: Tensor, row_ids: Tensor, rows_2d: Tensor, *, threads: int = 1) -> None:
    """`table[row_ids[i]] = rows[i]`, as in `gather_rows`; if an id is repeated, any row stays."""
    states.check_rows(table_2d, row_ids, rows_2d)
    table_2d.index_copy_(0, row_ids, rows_2d)


def first_touch(bytes_uint8: Tensor, *, threads: int = 1) -> None:
    """Write a zero to one byte of every page of a mapping, so that the system allocates it now."""
    states.check_tensor("bytes", bytes_uint8, (torch.uint8,))
    bytes_uint8[::_PAGE_BYTES].zero_()


def move_file(
    file: int, offset: int, bytes_uint8: Tensor, *, writes: bool, piece: int, threads: int
) -> None:
    """Read or write the bytes of a file from `offset` on, whole blocks of 4096.

    Args: `bytes_uint8`: [N] uint8, filled or written.

    Raises OSError: the system's; or ENODATA if the file ends, or no more bytes are moved.
    """
    states.check_tensor("bytes", bytes_uint8, (torch.uint8,))
    data, call = bytes_uint8.numpy().data, os.pwritev if writes else os.preadv
    while len(data) > 0:
        # After a short read or write the next request begins with a whole block again.
        count = call(file, [data], offset) // _PAGE_BYTES * _PAGE_BYTES
        if count == 0:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        data, offset = data[count:], offset + count


def fill_zero(tensor: Tensor, *, threads: int = 1) -> None:
    """Set every byte of a contiguous tensor of any shape and dtype to zero."""
    states.check_tensor("tensor", tensor, None)
    tensor.zero_()


def copy(to_uint8: Tensor, from_uint8: Tensor, *, threads: int = 1) -> None:
    """Copy [N] bytes to other memory."""
    states.check_copy(to_uint8, from_uint8)
    to_uint8.copy_(from_uint8)
