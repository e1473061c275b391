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
        visited: the tiles that sweeps visit; not those of embedding tables or unused parameters.
        threads: CPU threads for each piece of work on a host stream.
    """

    device: Device
    program: "ModelProgram"
    store: Store
    dtype: torch.dtype
    placement: Placement
    ranks: Ranks = ALONE
    verify: Verify = "off"

    def __post_init__(self) -> None:
        store, threads_of_rank = self.store, max(1, update_threads() // self.ranks.on_host)
        self.threads = self.placement.update_threads or threads_of_rank
        self.tiles, self.layers = store.tiles, store.of(TileKind.LAYER)
        self.media = store.of(TileKind.MEDIA)  # one tile, or none
        [self.prologue], [self.head] = store.of(TileKind.PROLOGUE), store.of(TileKind.HEAD)
        self.visited = [self.prologue, *self.layers, self.head, *self.media]
        self.collectives = Collectives(self.device, self.ranks)
        self.checks = BitChecks(self.device, self.tiles, self.verify, self.threads)
