"""AdamW for tiles whose state rests on the GPU: the host kernel's arithmetic, bit for bit.

Written in Triton, which torch brings along on CUDA machines; imported only there.
"""

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

_BLOCK = 2048


@triton.jit
def _update(
    weights, remainder, exp_avg, exp_avg_sq, grad, numel,
    decay, weight1, beta2, weight2, root_correction2, eps, negative_step_size, grad_scale,
    SPLIT: tl.constexpr, SMALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    m = tl.load(exp_avg + at, inside)
    v = tl.load(exp_avg_sq + at, inside)
    g = tl.load(grad + at, inside).to(tl.float32) * grad_scale
    if SPLIT:
        high = tl.load(weights + at, inside).to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(remainder + at, inside).to(tl.int32)
        param = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        param = tl.load(weights + at, inside)
    # Products and sums are fused exactly where the host kernel fuses them (csrc/kernels.cpp).
    param = libdevice.mul_rn(param, decay)
    if SMALL:
        m = tl.fma(weight1, libdevice.sub_rn(g, m), m)
    else:
        m = tl.fma(weight1 - 1.0, libdevice.sub_rn(g, m), g)
    v = tl.fma(libdevice.mul_rn(weight2, g), g, libdevice.mul_rn(v, beta2))
    root = tl.div_rn(tl.sqrt_rn(v), root_correction2)
    step = tl.div_rn(libdevice.mul_rn(negative_step_size, m), libdevice.add_rn(root, eps))
    param = libdevice.add_rn(param, step)
    tl.store(exp_avg + at, m, inside)
    tl.store(exp_avg_sq + at, v, inside)
    if SPLIT:
        bits = param.to(tl.int32, bitcast=True)
        nan = param != param
        high = tl.where(nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
        tl.store(weights + at, high.to(tl.int16).to(tl.bfloat16, bitcast=True), inside)
        tl.store(remainder + at, tl.where(nan, 0, bits).to(tl.int16), inside)
    else:
        tl.store(weights + at, param, inside)


def adamw(
    weights: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    threads: int = 1,
) -> None:
    """`reference.adamw` on flat CUDA tensors, on the current stream; `threads` is not used."""
    numel = weights.numel()
    if numel == 0:
        return
    _update[(triton.cdiv(numel, _BLOCK),)](
        weights, weights if remainder is None else remainder, exp_avg, exp_avg_sq, grad, numel,
        1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, math.sqrt(1 - beta2**step), eps,
        -lr / (1 - beta1**step), grad_scale,
        SPLIT=remainder is not None, SMALL=1 - beta1 < 0.5, BLOCK=_BLOCK,
    )  # fmt: skip
