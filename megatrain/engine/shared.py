"""The values that the parts of a step share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatrain.device import Device
from megatrain.device.collectives import Collectives
from megatrain.engine.bit_checks import BitChecks
from megatrain.parallel.distributed import ALONE, Ranks
from megatrain.placement import Placement, Verify
from megatrain.store.store import Store
from megatrain.telemetry.host import update_threads
from megatrain.tile import TileKind

if TYPE_CHECKING:
    from megatrain.model.program import ModelProgram


@dataclass
class Shared:
    """The values that the parts of a step share.

    Attributes:
        dtype: that layers compute in.
        tiles: all of them.
        visited: those that sweeps visit; the others are looked up by rows, or unused.
        threads: of each piece of work on a host stream.
    """

    device: Device
    program: "ModelProgram"
    store: Store
    dtype: torch.dtype
    placement: Placement
    ranks: Ranks = ALONE
    verify: Verify = "off"

    def __post_init__(self) -> None:
        of, threads = self.store.of, max(1, update_threads() // self.ranks.on_host)
        self.tiles, self.threads = self.store.tiles, self.placement.update_threads or threads
        self.layers, self.media = of(TileKind.LAYER), of(TileKind.MEDIA)  # one of media, or none
        [self.prologue], [self.head] = of(TileKind.PROLOGUE), of(TileKind.HEAD)
        self.visited = [self.prologue, *self.layers, self.head, *self.media]
        self.collectives = Collectives(self.device, self.ranks)
        self.checks = BitChecks(self.device, self.tiles, self.verify, self.threads)
