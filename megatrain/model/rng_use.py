"""Which computations draw random numbers: tried, not read off their settings."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor


def draws(function: Callable[[], Any], tensors: Mapping[str, Tensor]) -> bool:
    """True if a call draws torch's random numbers; their state is put back.

    Args:
        tensors: some that it computes with, for their device.
    """
    generators = [(torch.get_rng_state, torch.set_rng_state)]
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    if device.type not in ("cpu", "meta"):
        there = torch.get_device_module(device)
        get, put = there.get_rng_state, there.set_rng_state
        generators.append((partial(get, device), partial(put, device=device)))
    before = [get() for get, _ in generators]
    try:
        with torch.no_grad():
            function()
        after = [get() for get, _ in generators]
    finally:
        for (_, put), state in zip(generators, before, strict=True):
            put(state)
    return not all(map(torch.equal, before, after))
