"""Host kernels: those of the native library if it was built, else of the plain-torch reference.

`MEGATRAIN_KERNELS=native` or `=reference` in the environment forces the choice.
"""

import logging
import os
from types import ModuleType
from typing import Any

from torch import Tensor

from megatrain.compat.torch import can_compile
from megatrain.errors import InputError, explained
from megatrain.kernels import reference
from megatrain.kernels.states import Scalars, TileRange, UpdateOptions

_log = logging.getLogger(__name__)


def _choose() -> tuple[ModuleType, str]:
    choice = os.environ.get("MEGATRAIN_KERNELS", "")
    if choice not in ("", "native", "reference"):
        raise InputError(f"MEGATRAIN_KERNELS is {choice!r}; set it to native or reference")
    if choice == "reference":
        return reference, "reference (asked for)"
    try:
        from megatrain.kernels import native
    except ImportError as error:
        if choice == "native":
            raise InputError(f"MEGATRAIN_KERNELS is native, but {error}") from error
        _log.warning("Using the slower reference kernels: no native library: %s", error)
        return reference, f"reference (no native library: {error})"
    return native, f"native ({native.instruction_set()})"


_chosen, implementation = _choose()
is_native = _chosen is not reference


def update(rule: str, tile: TileRange, scalars: Scalars, options: UpdateOptions) -> None:
    """Update a range of a tile on the device of its planes: see `reference.update`."""
    if tile.weights.is_cpu:
        _chosen.update(rule, tile, scalars, options)
    elif tile.weights.is_cuda and rule == "adamw":
        problem = "tiles that rest on the device are updated by a Triton kernel"
        with explained(problem, "leave placement.resident empty", of=ImportError):
            from megatrain.kernels import gpu
        gpu.adamw(tile, scalars, options)
    else:
        reference.update(rule, tile, scalars, options)


def add(sums: Tensor, gradient: Tensor) -> None:
    """Add a gradient to its fp32 sums, in place.

    On a GPU by a Triton kernel: torch's for two dtypes reaches some 60 % of the bandwidth.
    """
    if sums.is_cuda and sums.dtype != gradient.dtype and gradient.is_contiguous() and can_compile():
        from megatrain.kernels import gpu

        gpu.add(sums, gradient)
    else:
        sums.add_(gradient)


def checksum(bytes_uint8: Tensor, blocks: Tensor, at: int, *, threads: int = 1) -> None:
    """Compute `reference.checksum` on the device of the bytes."""
    aligned = 0 if at % 8 else len(bytes_uint8) // 8 * 8
    if bytes_uint8.is_cuda and aligned:
        try:
            from megatrain.kernels import gpu
        except ImportError:  # no Triton: the reference is slower, with the same result
            aligned = 0
        else:
            gpu.checksum(bytes_uint8[:aligned], blocks, at)
        bytes_uint8 = bytes_uint8[aligned:]
        at += aligned
    on_host = is_native and bytes_uint8.is_cpu and at % 8 == 0
    (_chosen if on_host else reference).checksum(bytes_uint8, blocks, at, threads=threads)


split = _chosen.split
join = _chosen.join
gather_rows = _chosen.gather_rows
scatter_rows = _chosen.scatter_rows
first_touch = _chosen.first_touch
fill_zero = _chosen.fill_zero
copy = _chosen.copy
move_file = _chosen.move_file
