"""Zeros that take no memory, for runs of which only the structure is wanted."""

import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain import huge_pages

_SMALL = 1 << 16

# Room for more than the machine's memory. Not every Python has the name.
_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def zero_pages(shape: Sequence[int], *, requires_grad: bool = False) -> Tensor:
    """fp32 zeros that nobody writes: the system shows one page of zeros in all places.

    `torch.zeros` fills its memory, which for a 72B model's tables and one layer takes 13 GiB.
    """
    numel = math.prod(shape)
    if numel < _SMALL:
        return torch.zeros(*shape, requires_grad=requires_grad)
    pages = huge_pages.mapping(4 * numel, _UNRESERVED)
    zeros = torch.frombuffer(pages, dtype=torch.float32).view(*shape)
    return zeros.requires_grad_(requires_grad)
