"""The values that the parts of a step share."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatrain.device import Device
from megatrain.device.collectives import Collectives
from megatrain.engine.bit_checks import BitChecks
from megatrain.placement import Placement
from megatrain.store.store import Tile


@dataclass(frozen=True)
class Shared:
    """The values that the parts of a step share.

    Attributes:
        tiles: all of them.
        visited: those that sweeps visit; the others are looked up by rows, or unused.
        dtype: that layers compute in.
        threads: of each piece of work on a host stream.
    """

    device: Device
    placement: Placement
    tiles: Sequence[Tile]
    visited: Sequence[Tile]
    dtype: torch.dtype
    collectives: Collectives
    checks: BitChecks
    threads: int
