"""Operations that round once, by the names of CUDA's libdevice: HIP's has none of them.

Kernels that use these are compiled without fusing products and sums.
"""

import triton


@triton.jit
def add_rn(x, y):
    """The sum, to the nearest number."""
    return x + y


@triton.jit
def sub_rn(x, y):
    """The difference, to the nearest number."""
    return x - y


@triton.jit
def mul_rn(x, y):
    """The product, to the nearest number."""
    return x * y
