"""AdamW, checksums and sums of gradients on the GPU: the host kernels' arithmetic, bit for bit.

These are Triton kernels; torch brings Triton along on CUDA and ROCm machines, and only these import
this file. Results do not depend on the threads of a warp (32, or AMD's 64): each element is
computed by itself, and reductions (largest bits, sums of integers) are the same in any order.
"""

import torch
import triton
import triton.language as tl

from megatrain.kernels import states
from megatrain.kernels.reference import SUMMED_BYTES
from megatrain.kernels.states import Scalars, TileRange, UpdateOptions

OPTIONS = {"enable_fp_fusion": False}  # each operation rounds once, subnormal numbers too

_GROUPS = 32  # groups of elements, each with a scale, in a block

_KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _stochastic_round(value, random):
    bits = value.to(tl.int32, bitcast=True)
    upper = tl.where(value != value, bits | 0x00400000, bits + random.to(tl.int32)) >> 16
    return upper.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _scale(values):
    """Scales [G, 1] of groups of values [G, GROUP], and True [G, 1] for groups that have codes."""
    bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1, keep_dims=True)
    # A group's largest value is from 2**-110 on and finite; smaller ones count as 0.
    has_codes = (bits >= 0x08800000) & (bits < 0x7F800000)
    otherwise = tl.where(bits < 0x08800000, 0.0, float("nan"))
    return tl.where(has_codes, bits.to(tl.float32, bitcast=True), otherwise), has_codes


@triton.jit
def _load(exp_avg, exp_avg_sq, scale1, scale2, at, inside, group, exists, STATES: tl.constexpr):
    m = tl.load(exp_avg + at, inside, other=0).to(tl.float32)
    v = tl.load(exp_avg_sq + at, inside, other=0).to(tl.float32)
    if STATES == "int8":
        m = tl.div_rn(m, 254.0 - tl.abs(m)) * tl.load(scale1 + group, exists, other=0)
        share = tl.load(scale2 + group, exists, other=0) * (1 / 255)
        root = v * share
        v = root * root
    return m, v


@triton.jit
def _store(
    m, v, root, exp_avg, exp_avg_sq, scale1, scale2, at, inside, group, exists, number, seed,
    STATES: tl.constexpr,
):  # fmt: skip
    if STATES == "int8":
        # A sum with 12582912.0, 1.5 * 2**23, has the rounded integer in its lowest bits.
        largest, has_codes = _scale(m)
        inverse = tl.div_rn(tl.full(largest.shape, 32767.0, tl.float32), largest)
        share = m * inverse + 12582912.0 - 12582912.0
        code = tl.div_rn(share * 254.0, tl.abs(share) + 32767.0)
        bits = (code + 12582912.0).to(tl.int32, bitcast=True)
        tl.store(exp_avg + at, tl.where(has_codes, bits, 0).to(tl.int8), inside)
        tl.store(scale1 + group, largest, exists)
        largest, has_codes = _scale(root)
        inverse = tl.div_rn(tl.full(largest.shape, 255.0, tl.float32), largest)
        bits = (root * inverse + 12582912.0).to(tl.int32, bitcast=True) & 255
        bits = tl.maximum(bits, (root > 0).to(tl.int32))
        tl.store(exp_avg_sq + at, tl.where(has_codes, bits, 0).to(tl.uint8), inside)
        tl.store(scale2 + group, largest, exists)
    elif STATES == "bf16":
        number = number + at
        key = _mixed(seed.to(tl.uint32) + (number >> 32).to(tl.uint32))
        random = _mixed(key + number.to(tl.uint32))
        tl.store(exp_avg + at, _stochastic_round(m, random >> 16), inside)
        tl.store(exp_avg_sq + at, _stochastic_round(v, random & 0xFFFF), inside)
    else:
        tl.store(exp_avg + at, m, inside)
        tl.store(exp_avg_sq + at, v, inside)


@triton.jit(do_not_specialize=["number", "seed"])
def _update(
    weights, remainder, exp_avg, exp_avg_sq, scale1, scale2, grad, numel,
    decay, weight1, beta2, weight2, root_correction2, eps, negative_step_size, grad_scale,
    number, seed,
    REMAINDER_BYTES: tl.constexpr, SMALL: tl.constexpr, STATES: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    at = group * GROUP + tl.arange(0, GROUP)[None, :]
    inside, exists = at < numel, group * GROUP < numel
    m, v = _load(exp_avg, exp_avg_sq, scale1, scale2, at, inside, group, exists, STATES)
    g = tl.load(grad + at, inside, other=0).to(tl.float32) * grad_scale
    if REMAINDER_BYTES:
        high = tl.load(weights + at, inside, other=0).to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(remainder + at, inside, other=0).to(tl.int32)
        if REMAINDER_BYTES == 1:
            low = low << 8
        param = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        param = tl.load(weights + at, inside, other=0)
    # Products and sums are fused (tl.fma) exactly where the host kernel does (csrc/kernels.cpp).
    param = param * decay
    # With weight1 below 0.5, like torch's lerp, start from the nearer end.
    m = tl.fma(weight1, g - m, m) if SMALL else tl.fma(weight1 - 1.0, g - m, g)
    v = tl.fma(weight2 * g, g, v * beta2)
    root = tl.sqrt_rn(v)
    denominator = root
    if STATES == "fp32":  # with int8 and bf16 `eps` and the step size contain the correction
        denominator = tl.div_rn(root, root_correction2)
    denominator = denominator + eps
    param = param + tl.div_rn(negative_step_size * m, denominator)
    _store(
        m, v, root, exp_avg, exp_avg_sq, scale1, scale2, at, inside, group, exists, number, seed,
        STATES,
    )  # fmt: skip
    if REMAINDER_BYTES:
        bits = param.to(tl.int32, bitcast=True)
        nan, quiet = param != param, (bits >> 16) | 0x40
        if REMAINDER_BYTES == 1:
            first, place = number + group * GROUP, tl.arange(0, GROUP)[None, :]
            key = _mixed(seed.to(tl.uint32) + (first >> 32).to(tl.uint32)) + first.to(tl.uint32)
            words = _mixed((key + (place // 4).to(tl.uint32)) ^ 0xFFFFFFFF)
            bits += ((words >> (8 * (place % 4)).to(tl.uint32)) & 0xFF).to(tl.int32)
        high = tl.where(nan, quiet, (bits + 0x8000) >> 16)
        tl.store(weights + at, high.to(tl.int16).to(tl.bfloat16, bitcast=True), inside)
        if REMAINDER_BYTES == 1:
            tl.store(remainder + at, tl.where(nan, 0, bits >> 8).to(tl.int8), inside)
        else:
            tl.store(remainder + at, tl.where(nan, 0, bits).to(tl.int16), inside)
    else:
        tl.store(weights + at, param, inside)


def adamw(tile: TileRange, scalars: Scalars, options: UpdateOptions) -> None:
    """Update CUDA tensors by AdamW, as `reference.update` does, on the current stream."""
    weights, remainder, (exp_avg, exp_avg_sq, *scales), grad = tile
    numel = weights.numel()
    if numel == 0:
        return
    _update[(triton.cdiv(numel, _GROUPS * states.GROUP),)](
        weights, weights if remainder is None else remainder, exp_avg, exp_avg_sq,
        *(scales or (exp_avg, exp_avg_sq)), grad, numel,
        scalars.decay, scalars.weight1, scalars.beta2, scalars.weight2, scalars.root_correction2,
        scalars.eps, scalars.negative_step_size, options.grad_scale, options.at,
        states.mixed(options.step),
        REMAINDER_BYTES=0 if remainder is None else remainder.element_size(),
        SMALL=scalars.weight1 < 0.5, STATES=_KINDS[exp_avg.dtype],
        GROUPS=_GROUPS, GROUP=states.GROUP, **OPTIONS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "count"])
def _checksum(words, blocks, first, count, WORDS: tl.constexpr, PART: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    total, weighted = tl.zeros((PART,), tl.int64), tl.zeros((PART,), tl.int64)
    for begin in range(0, WORDS, PART):
        place = begin + tl.arange(0, PART).to(tl.int64)
        at = block * WORDS + place - first
        word = tl.load(words + at, (at >= 0) & (at < count), other=0)
        total += word
        weighted += word * place
    to = blocks + 2 * block
    tl.store(to, tl.load(to) + tl.sum(total))
    tl.store(to + 1, tl.load(to + 1) + tl.sum(weighted))


def checksum(bytes_uint8: torch.Tensor, blocks: torch.Tensor, at: int) -> None:
    """Compute `reference.checksum` of CUDA tensors of whole 64-bit words; 8 divides `at`."""
    words = bytes_uint8.view(torch.int64)
    begin, first = divmod(at, SUMMED_BYTES)
    count = triton.cdiv(first + len(bytes_uint8), SUMMED_BYTES)
    _checksum[(count,)](
        words, blocks[begin:], first // 8, len(words), WORDS=SUMMED_BYTES // 8, PART=2048
    )


@triton.jit
def _add(sums, gradient, numel, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < numel
    total = tl.load(sums + at, inside) + tl.load(gradient + at, inside).to(tl.float32)
    tl.store(sums + at, total, inside)


def add(sums: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a dense gradient to its fp32 sums, on the current stream."""
    numel = sums.numel()
    _add[(triton.cdiv(numel, 4096),)](sums, gradient, numel, SIZE=4096)
