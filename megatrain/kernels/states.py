"""Formats of 8-bit and bf16 optimizer states, and stochastic rounding, in plain torch.

The 8-bit codes are those of FlashOptim (arXiv 2602.23349, section 3): groups with a scale each,
softsign companding of the first moment, a square-root code of the second.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 64
"""Elements that share a scale. Groups begin at multiples of GROUP in a tile, as must ranges."""

SHARES = 32767
"""A first moment is rounded to multiples of its group's scale / SHARES before it becomes a code."""

SMALLEST = 2.0**-110
"""The smallest scale: 1e-33 of first moments; as a root it is 1e-66 of second ones, 0 in fp32."""


class Scalars(NamedTuple):
    """The scalars of an update, in the order of the native library's arguments.

    Each rule of reference.RULES uses some of them. With moments other than fp32, AdamW need not
    equal torch's bit for bit, and saves the division by `root_correction2`: this is 1, and `eps`
    and `negative_step_size` contain it as a factor.
    """

    negative_step_size: float
    decay: float = 1.0
    beta1: float = 0.0
    weight1: float = 1.0
    beta2: float = 0.0
    weight2: float = 1.0
    root_correction2: float = 1.0
    eps: float = 0.0


class TileRange(NamedTuple):
    """A range of a tile's planes, and its gradient: flat and contiguous, on one device."""

    weights: Tensor  # [N] bfloat16 (then `remainder` has the rest of the master) or float32
    # [N] int16; int8: masters are rounded to 24 bits stochastically; None: float32
    remainder: Tensor | None
    # the rule's states, changed in place: [N] float32. AdamW's two moments may also be bfloat16,
    # rounded stochastically, or int8 and uint8 codes, which are followed by their scales, [ceil(N /
    # GROUP)] float32.
    states: Sequence[Tensor]
    grad: Tensor  # [N] bfloat16 or float32, read


class Checksums(NamedTuple):
    """Tensors to which an update adds checksums (`reference.checksum`) of its reads and writes.

    Each attribute has an item for each plane, in the order of TileRange; None: no checksum.
    """

    # read, written: [blocks, 2] int64 of the planes before the update and after it
    read: Sequence[Tensor | None]
    written: Sequence[Tensor | None]
    first: Sequence[int]  # the range's first byte in each plane


class UpdateOptions(NamedTuple):
    """The number and place of an update, and how to run it."""

    # number of the range's first element among those of all tiles, the same in every placement: it
    # seeds random numbers
    at: int = 0
    step: int = 1  # number of the update; the first is 1. It seeds random numbers, too.
    grad_scale: float = 1.0  # the clipping factor, by which the gradient is multiplied in fp32
    threads: int = 1  # host threads of native kernels
    sums: Checksums | None = None  # checksums to add to; None: no checksums


def adamw_scalars(moments: torch.dtype, step: int, group: Mapping[str, Any]) -> Scalars:
    """The scalars of an AdamW update, in fp64 from torch's settings; `moments`: their dtype."""
    if step < 1:
        raise ValueError(f"step is {step}, the first update is 1")
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    root_correction2 = math.sqrt(1 - beta2**step)
    step_size, eps = lr / (1 - beta1**step), group["eps"]
    if moments != torch.float32:  # the same update without a division by `root_correction2`
        step_size, eps = step_size * root_correction2, eps * root_correction2
        root_correction2 = 1.0
    return Scalars(
        negative_step_size=-step_size,
        decay=1 - lr * group["weight_decay"],
        beta1=beta1,
        weight1=1 - beta1,
        beta2=beta2,
        weight2=1 - beta2,
        root_correction2=root_correction2,
        eps=eps,
    )


def load_moments(states: Sequence[Tensor]) -> list[Tensor]:
    """Both moments of a range as float32; the same tensors if they are float32 already.

    Args: `states`: both moments, and of 8-bit codes the scales of both.
    """
    first, second, *scales = states
    if not scales:
        return [first.float(), second.float()]
    return [decode_first(first, scales[0]), decode_second(second, scales[1])]


def store_moments(
    values: Sequence[Tensor], states: Sequence[Tensor], *, at: int, step: int
) -> None:
    """Write float32 moments into `states` of any format; `at` and `step` seed the rounding."""
    first, _, *scales = states
    if scales:
        encoded = encode_first(values[0]), encode_second(values[1])
        values = [new for pair in zip(*encoded, strict=True) for new in pair]  # codes, then scales
    elif first.dtype == torch.bfloat16:
        values = [*map(stochastic_round, values, random16(at, len(first), step, first.device))]
    for state, value in zip(states, values, strict=True):
        if state is not value:
            state.copy_(value)


def encode_first(values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode first moments in 8 bits, by their share of the largest in their group.

    The share `x` in [-1, 1], rounded to a multiple of 1 / SHARES, becomes `127 * 2x / (1 + |x|)`,
    rounded to nearest. The error is 0.2 % of the largest near zero, and 0.8 % at most.

    Returns codes [N], int8, and scales [ceil(N / GROUP)], float32: the largest magnitude of each
    group, exactly. One below SMALLEST counts as zero. If a value of the group is NaN or infinite,
    the scale is NaN, and so is the decoded group. In both cases the codes are zero.
    """
    groups = _groups(values)
    scales, has_codes = _scales(groups.abs())
    shares = (groups * _divided(SHARES, scales)[:, None]).round_()
    # Neither a share nor the quotient is ever halfway between two codes.
    codes = torch.where(has_codes, (shares * 254 / (shares.abs() + SHARES)).round_(), 0)
    return codes.to(torch.int8).view(-1)[: values.numel()], scales


def decode_first(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode first moments to [N] float32: `code / (254 - |code|)` times the group's scale."""
    values = codes.float()
    return values.div_(254 - values.abs()).mul_(_by_element(scales, codes.numel()))


def encode_second(values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode second moments in 8 bits, by their root's share of the largest root in their group.

    The share in [0, 1], times 255, is rounded to nearest, ties to even, but only zero becomes zero:
    else a first moment would be divided by eps alone. Codes are [N] uint8, scales
    [ceil(N / GROUP)] float32, as of `encode_first`, but of roots.
    """
    roots = _groups(exact_sqrt(values))
    scales, has_codes = _scales(roots)  # has_codes: False where all codes of a group are 0
    codes = (roots * _divided(255, scales)[:, None]).round_()
    codes = torch.where(has_codes, torch.maximum(codes, (roots > 0).float()), 0)
    return codes.to(torch.uint8).view(-1)[: values.numel()], scales


def decode_second(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode second moments to [N] float32: the square of `code / 255` times the group's scale."""
    return codes.float().mul_(_by_element(scales * (1 / 255), codes.numel())).square_()


def stochastic_round(values: Tensor, random16: Tensor) -> Tensor:
    """Round [N] float32 to bfloat16, up or down so that the mean over `random16` is the value.

    Numbers that bfloat16 has, zero and infinity among them, do not change; a NaN becomes quiet.

    Args: `random16`: [N] int32, 0 to 65535.
    """
    bits = values.view(torch.int32)
    upper = torch.where(values.isnan(), bits | 0x00400000, bits + random16) >> 16
    return upper.to(torch.int16).view(torch.bfloat16)


def random16(at: int, numel: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two random numbers, 0 to 65535 as int32, for each of `numel` elements from number `at` on.

    They are the halves of `mixed(mixed(mixed(step) + high) + low)`, with `high` and `low` the upper
    and lower 32 bits of an element's number.
    """
    number = torch.arange(at, at + numel, device=device)
    random = _mixed(_mixed(mixed(step) + (number >> 32)) + number)
    return (random >> 16).int(), (random & 0xFFFF).int()


def random8(at: int, numel: int, step: int, device: torch.device) -> Tensor:
    """A random number, 0 to 255 as int32, for each of `numel` elements from number `at` on.

    Element `e` of a group whose first number is `g` has byte `e % 4` (0 is the lowest) of
    `mixed(~(mixed(mixed(step) + high) + low + e // 4))`, with the upper and lower 32 bits of `g`.
    """
    number = torch.arange(at, at + numel, device=device)
    place = number % GROUP
    first = number - place
    words = _mixed(~(_mixed(mixed(step) + (first >> 32)) + first + place // 4))
    return ((words >> 8 * (place % 4)) & 0xFF).int()


def mixed(value: int) -> int:
    """Hash 32 bits to 32 bits (a bijection): two rounds of xorshift and multiplication."""
    return int(_mixed(torch.tensor(value)))


def _mixed(values: Tensor) -> Tensor:
    x = values & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _groups(values: Tensor) -> Tensor:
    return pad(values, (0, -values.numel() % GROUP)).view(-1, GROUP)


def _scales(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of each row, and [rows, 1]: True if the row has codes other than zero."""
    largest = magnitudes.amax(1)  # NaN if a magnitude is
    scales = torch.where(largest.isfinite(), largest, torch.nan)
    scales = torch.where(largest < SMALLEST, 0.0, scales)
    return scales, (scales > 0)[:, None]


def _divided(number: float, divisors: Tensor) -> Tensor:
    """`number / divisors`, rounded once; torch might multiply by a rounded inverse instead."""
    return torch.full_like(divisors, number).div_(divisors)


def _by_element(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(GROUP)[:numel]


def exact_sqrt(values: Tensor) -> Tensor:
    """Correctly rounded square roots of float32 numbers, which torch's CPU roots not always are.

    No root of an fp32 number lies within four fp64 units of a midpoint between two fp32 numbers. So
    an fp64 root, off by less than one unit, rounds to the nearest fp32 number.
    """
    return values.double().sqrt_().float()


GRADIENTS = MOMENTS = (torch.bfloat16, torch.float32)
REMAINDERS = (torch.int16, torch.int8)


def check_tensor(
    name: str, value: Tensor, dtypes: tuple[torch.dtype, ...] | None, size: int | None = None
) -> None:
    """Require a contiguous CPU tensor, of one of `dtypes`, of `size` elements."""
    if dtypes is not None and value.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} is {value.dtype}, expected {expected}")
    if not value.is_cpu:
        raise ValueError(f"{name} is on {value.device}, expected the CPU")
    if not value.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
    if size is not None and value.numel() != size:
        raise ValueError(f"{name} has {value.numel()} elements, expected {size}")


def check_copy(to: Tensor, source: Tensor) -> None:
    """Require two ranges of equally many bytes."""
    check_tensor("from", source, (torch.uint8,))
    check_tensor("to", to, (torch.uint8,), source.numel())


def check_planes(*, master: Tensor, weights: Tensor, remainder: Tensor) -> None:
    """Require the three planes of a split master to agree."""
    check_tensor("master", master, (torch.float32,))
    check_tensor("weights", weights, (torch.bfloat16,), master.numel())
    check_tensor("remainder", remainder, REMAINDERS, master.numel())


def check_update(rule: str, tile: TileRange, options: UpdateOptions) -> None:
    """Require the planes of an update to agree in length; AdamW's `at` must begin a group."""
    size = tile.weights.numel()
    in_fp32 = tile.remainder is None
    check_tensor("weights", tile.weights, (torch.float32 if in_fp32 else torch.bfloat16,))
    if tile.remainder is not None:
        check_tensor("remainder", tile.remainder, REMAINDERS, size)
    check_tensor("grad", tile.grad, GRADIENTS, size)
    if rule != "adamw":
        for state in tile.states:
            check_tensor("a state", state, (torch.float32,), size)
        return
    exp_avg, exp_avg_sq, *scales = tile.states
    check_tensor("exp_avg", exp_avg, (torch.int8,) if scales else MOMENTS, size)
    check_tensor("exp_avg_sq", exp_avg_sq, (torch.uint8 if scales else exp_avg.dtype,), size)
    for name, scale in zip(("exp_avg", "exp_avg_sq"), scales, strict=False):
        check_tensor(f"the scale of {name}", scale, (torch.float32,), -(-size // GROUP))
    if options.at % GROUP:
        raise ValueError(f"at is {options.at}, no multiple of {GROUP}")


def check_rows(table: Tensor, row_ids: Tensor, rows_2d: Tensor) -> None:
    """Require a [R, W] table, [N] ids and [N, W] rows of one 2- or 4-byte dtype."""
    check_tensor("table", table, None)
    check_tensor("row_ids", row_ids, (torch.int64,))
    check_tensor("rows", rows_2d, (table.dtype,))
    if table.element_size() not in (2, 4):
        raise ValueError(f"table is {table.dtype}, expected a dtype of 2 or 4 bytes")
    if table.dim() != 2 or rows_2d.shape != (row_ids.numel(), table.shape[-1]):
        raise ValueError(
            f"table {tuple(table.shape)}, row_ids {tuple(row_ids.shape)} and rows "
            f"{tuple(rows_2d.shape)} do not fit: expected [R, W], [N] and [N, W]"
        )
