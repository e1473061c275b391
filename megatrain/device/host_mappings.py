"""Host memory as exact-size anonymous mappings, first touched by all cores.

Not torch's pinned allocator: that one rounds sizes up to powers of two and touches pages with one
thread. A range lives as long as any tensor that views it.
"""

import torch
from torch import Tensor

from megatrain import kernels
from megatrain.base import huge_pages
from megatrain.base.units import size
from megatrain.errors import DoesNotFit
from megatrain.telemetry.host import host_available_bytes, usable_cores

_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux 4.14, for which Python has no name


def host_range(name: str, numel: int, dtype: torch.dtype, limit_bytes: int | None = None) -> Tensor:
    """`numel` zeros of `dtype` in a mapping of their own, every page present.

    Args:
        limit_bytes: that the process may take in all; None: what the machine allows.

    Raises:
        DoesNotFit: there is not so much memory, or the system does not give it.
    """
    num_bytes = max(numel, 1) * dtype.itemsize
    free_bytes = host_available_bytes(limit_bytes)
    remedy = "close other programs or train a smaller model"
    if limit_bytes is not None:
        remedy = f"raise host_memory ({size(limit_bytes)}), {remedy}"
    if num_bytes > free_bytes:  # Linux would give the mapping and kill the process that fills it
        raise DoesNotFit(
            f"no host memory for {name}: {size(num_bytes)} wanted, {size(free_bytes)} free; "
            f"{remedy}"
        )
    try:
        mapping = huge_pages.mapping(num_bytes)
    except OSError as error:
        raise DoesNotFit(
            f"no host memory for {name}: {size(num_bytes)} wanted ({error.strerror}); {remedy}"
        ) from error
    # Pinned pages would be copied for a child that is forked. It has zeros at this address instead:
    # were nothing there, the child's own memory might be, which goes when it drops the tensor.
    mapping.madvise(_WIPE_ON_FORK)
    flat = torch.frombuffer(mapping, dtype=torch.uint8)
    kernels.first_touch(flat, threads=usable_cores())
    return flat.view(dtype)[:numel]
