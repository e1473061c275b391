"""Every kernel in plain torch: what the native library must reproduce, and what runs without it.

All functions work in place on flat contiguous CPU tensors of any length, and raise ValueError if a
tensor has another dtype, size or layout. They take the native functions' `threads` argument and
leave the choice to torch, whose pool is a process-wide setting.
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
after every operation, wait for each other only now and then."""

SUMMED_BYTES = 1 << 18
"""Bytes of a plane that have a checksum of their own."""

_SIDE = 256  # words of a row, where those of a block are a matrix

_PAGE_BYTES = 4096
"""The smallest page of the supported systems: touching more often than needed does no harm."""


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    yield from zip(*(tensor.split(UPDATE_BLOCK) for tensor in tensors), strict=True)


def split(master_fp32: Tensor, weights: Tensor, remainder: Tensor, *, threads: int = 1) -> None:
    """Take fp32 numbers apart into bf16 weights and a remainder: 16 bits of it lose nothing.

    With `u` the 32 bits of a number, the weights are `(u + 0x8000) >> 16`: rounded to nearest, ties
    away from zero because the remainder is signed; the remainder is the low half of `u`, or the
    upper byte of that. With a byte, numbers are rounded to 24 bits first, to nearest, ties away
    from zero. The largest finite numbers therefore stream as infinity and still join back exactly,
    but for those that have no 24 bits.

    A NaN keeps its sign and the upper six bits of its payload, becomes quiet, and loses the
    lower sixteen: its weight is a NaN, its remainder zero. Every other pattern is kept bit for bit.

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
    """`split` of a small range, on any device.

    Args: `added`: what rounds to 24 bits, if the remainder has a byte: up, where the other eight
    and this are 256 or more.
    """
    is_nan, short = master.isnan(), remainder.dtype == torch.int8
    bits = master.view(torch.int32) + (added if short else 0)
    # In int32 the sums wrap only for NaNs, and the narrowing keeps the low part.
    rounded = (bits + 0x8000) >> 16
    quiet = (master.view(torch.int32) >> 16) | 0x40
    weights.view(torch.int16).copy_(torch.where(is_nan, quiet, rounded))
    remainder.copy_((bits >> 8 if short else bits).masked_fill(is_nan, 0))


def join(weights: Tensor, remainder: Tensor, master_fp32: Tensor, *, threads: int = 1) -> None:
    """Put bf16 weights and remainder together again: `fp32 = (weights << 16) + remainder`.

    Args:
        weights: [N] bfloat16, read.
        remainder: [N] int16, read; or int8, which stands for 256 times as much.
        master_fp32: [N] float32, written.
    """
    states.check_planes(master=master_fp32, weights=weights, remainder=remainder)
    for high, low, master in _blocks(weights, remainder, master_fp32):
        join_block(high, low, master)


def join_block(weights: Tensor, remainder: Tensor, master: Tensor) -> None:
    """`join` of a small range, on any device."""
    low = remainder.int() << 8 if remainder.dtype == torch.int8 else remainder
    torch.add(weights.view(torch.int16).int() << 16, low, out=master.view(torch.int32))


def checksum(bytes_uint8: Tensor, blocks: Tensor, at: int, *, threads: int = 1) -> None:
    """Add the checksums of `bytes_uint8`, the first of which is byte `at` of a plane, to `blocks`.

    A block is SUMMED_BYTES of the plane. Its two numbers are the sum of its 64-bit words, and of
    each times its place in the block, modulo 2^64: whatever the ranges are, in whatever order, the
    checksums of all of them add up to those of the plane.

    Args: `blocks`: [blocks, 2] int64, on the device of the bytes.
    """
    done, count = 0, 0
    while done < len(bytes_uint8):
        block, first = divmod(at + done, SUMMED_BYTES)
        unread = len(bytes_uint8) - done
        count = 1 if first or unread < SUMMED_BYTES else unread // SUMMED_BYTES
        part = bytes_uint8[done : done + count * SUMMED_BYTES - first]
        done += len(part)
        if len(part) < count * SUMMED_BYTES:
            part = pad(part, (first, SUMMED_BYTES - first - len(part)))
        words = part.view(torch.int64).view(count, -1, _SIDE)
        rows, columns = words.sum(2), words.sum(1)
        number = torch.arange(_SIDE, device=words.device)
        weighted = (rows * number[: rows.shape[1]]).sum(1) * _SIDE + (columns * number).sum(1)
        blocks[block : block + count] += torch.stack((rows.sum(1), weighted), 1)


def update(rule: str, tile: TileRange, by: Scalars, options: UpdateOptions) -> None:
    """Update a range by one of `RULES`, in place, on any device.

    Args: `by`: the rule's scalars.

    Raises ValueError: on the CPU: as all functions here, or `options.at` is no multiple of GROUP
    with AdamW.
    """
    if tile.weights.is_cpu:
        states.check_update(rule, tile, options)
    for part, param, g in _masters(tile, options):
        groups = slice(part.start // states.GROUP, part.stop // states.GROUP)
        moments = [plane[part] for plane in tile.states[:2]]
        moments += [plane[groups] for plane in tile.states[2:]]  # scales
        RULES[rule](param, g, moments, by, options._replace(at=options.at + part.start))


def _masters(tile: TileRange, options: UpdateOptions) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each block's slice, its fp32 master (to be changed in place), its scaled gradient."""
    for start in range(0, tile.weights.numel(), UPDATE_BLOCK):
        part = slice(start, start + UPDATE_BLOCK)
        w, r = tile.weights[part], None if tile.remainder is None else tile.remainder[part]
        param = w if r is None else torch.empty_like(w, dtype=torch.float32)
        if r is not None:
            join_block(w, r, param)
        yield part, param, tile.grad[part].float() * options.grad_scale
        if r is not None:
            added: Tensor | int = 0
            if r.dtype == torch.int8:
                place = options.at + start
                added = states.random8(place, len(param), options.step, param.device)
            split_block(param, w, r, added)


# Each operation rounds once, or is fused everywhere: no bit depends on how torch groups elements.


def _adamw(
    param: Tensor, g: Tensor, moments: Sequence[Tensor], by: Scalars, options: UpdateOptions
) -> None:
    """Operation for operation `torch.optim.AdamW(foreach=False)`.

    Source: `_single_tensor_adam` in torch/optim/adam.py of torch 2.13. One operation is better
    than there: the root is correctly rounded, where torch's CPU builds call MKL's, which is one
    unit in the last place off for every fifth number.
    """
    m, v = states.load_moments(moments)
    param.mul_(by.decay)
    m.lerp_(g, by.weight1)
    v.mul_(by.beta2).addcmul_(g, g, value=by.weight2)
    denominator = (states.exact_sqrt(v) / by.root_correction2).add_(by.eps)
    param.addcdiv_(m, denominator, value=by.negative_step_size)
    states.store_moments((m, v), moments, at=options.at, step=options.step)


def _lion(param: Tensor, g: Tensor, moments: Sequence[Tensor], by: Scalars, *_: Any) -> None:
    [momentum] = moments
    mixed = (momentum * by.beta1).add_(g * by.weight1)
    # A NaN has no sign for torch, and would go unseen.
    direction = torch.where(mixed.isnan(), mixed, mixed.sign())
    param.mul_(by.decay).add_(direction.mul_(by.negative_step_size))
    momentum.mul_(by.beta2).add_(g.mul_(by.weight2))


def _sgd(
    param: Tensor, g: Tensor, states: Sequence[Tensor], by: Scalars, *_: Any, nesterov: bool = False
) -> None:
    """Adds `decay` times the parameter to the gradient; `weight1` times that to the momentum."""
    if by.decay:
        g.add_(param * by.decay)
    for buffer in states:
        buffer.mul_(by.beta1).add_(g * by.weight1)
        g = g.add_(buffer * by.beta1) if nesterov else buffer
    param.add_(g * by.negative_step_size)


def _direction(param: Tensor, g: Tensor, kept: Sequence[Tensor], by: Scalars, *_: Any) -> None:
    """Apply a direction of Muon's, rounded as torch.optim.Muon rounds it."""
    param.mul_(by.decay).add_(g, alpha=by.negative_step_size)


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
    """`table[row_ids[i]] = rows[i]`, as of `gather_rows`; of an id twice, either row may stay."""
    states.check_rows(table_2d, row_ids, rows_2d)
    table_2d.index_copy_(0, row_ids, rows_2d)


def first_touch(bytes_uint8: Tensor, *, threads: int = 1) -> None:
    """Write a zero to one byte of every page of a mapping, so that the system allocates it now."""
    states.check_tensor("bytes", bytes_uint8, (torch.uint8,))
    bytes_uint8[::_PAGE_BYTES].zero_()


def move_file(
    file: int, offset: int, bytes_uint8: Tensor, *, writes: bool, piece: int, threads: int
) -> None:
    """Read or write bytes of a file, whole blocks of 4096.

    Args:
        bytes_uint8: [N] uint8, which the bytes from `offset` on go to or come from.

    Raises OSError: the system's; or ENODATA, where the file ends or nothing more is moved.
    """
    states.check_tensor("bytes", bytes_uint8, (torch.uint8,))
    data, call = bytes_uint8.numpy().data, os.pwritev if writes else os.preadv
    while len(data) > 0:
        # What remains of a request cut short begins with a whole block again.
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
