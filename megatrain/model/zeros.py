"""Zeros that take no memory, for forwards of which only the structure matters."""

import math
import mmap
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatrain.base import huge_pages

_SMALL = 1 << 16

# Allows mappings larger than the machine's memory. Not every Python has the name.
_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def zero_pages(shape: Sequence[int], *, requires_grad: bool = False) -> Tensor:
    """fp32 zeros to read: the system maps one page of zeros everywhere.

    `torch.zeros` would write its memory, 13 GiB for a 72B model's tables and one layer.
    """
    numel = math.prod(shape)
    if numel < _SMALL:
        return torch.zeros(tuple(shape), requires_grad=requires_grad)
    pages = huge_pages.mapping(4 * numel, _UNRESERVED)
    zeros = torch.frombuffer(pages, dtype=torch.float32).view(*shape)
    return zeros.requires_grad_(requires_grad)


class ZeroProducts(TorchFunctionMode):
    """Within this context linear layers whose weight is all zeros skip the multiplication.

    The result is that of the multiplication: zero, or NaN where the input is not finite. The
    products with all weights of one layer of 120B would take half a second.
    """

    def __init__(self, zeros: Iterable[Tensor], beginning: int = 0) -> None:
        super().__init__()
        self._beginning = beginning  # so many first values of a weight may be other than zero
        self._zeros = {id(weight): weight for weight in zeros if weight.numel() > beginning}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and len(args) >= 2 and id(args[1]) in self._zeros:
            rows = -(-self._beginning // args[1].shape[-1])
            product = _product_with_zeros(rows, *args, **(kwargs or {}))
            if product is not None:
                return product
        return func(*args, **(kwargs or {}))


def _product_with_zeros(
    rows: int, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor | None:
    """The product plus the bias; None: torch would refuse it, or the weight is one row `[I]`."""
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:]:
        return None
    if any(operand.dtype != weight.dtype for operand in (x, bias) if operand is not None):
        return None
    zeros = (x * 0).sum(-1, keepdim=True).expand(*x.shape[:-1], len(weight) - rows)
    product = torch.cat([F.linear(x, weight[:rows]), zeros], -1) if rows else zeros.contiguous()
    return product if bias is None else product + bias
