"""Makes the units of a step that computes nothing."""

from dataclasses import dataclass

from megatrain.device import Device
from megatrain.engine.head import HeadMath
from megatrain.engine.host_offload import HostOffload
from megatrain.engine.layer import Layer
from megatrain.engine.vocab_split import VocabSplit
from megatrain.forecast.meta_layer import MetaLayer
from megatrain.forecast.meta_program import MetaHead, MetaProgram, MetaVocabSplit
from megatrain.forecast.op_counter import OpCounter
from megatrain.forecast.profile import Profile
from megatrain.placement import ActivationPolicy, Placement
from megatrain.store import Tile
from megatrain.tile import TileLayout


@dataclass(frozen=True)
class MetaMakers:
    """Of a model of which only works and shapes are known; `layout` is its head's."""

    measured: Profile
    program: MetaProgram
    layout: TileLayout
    counter: OpCounter

    def layer(
        self,
        device: Device,
        tile: Tile,
        visit: int,
        policy: ActivationPolicy,
        offload: HostOffload | None,
    ) -> Layer:
        given = device, self.program, tile, visit, policy, offload
        return MetaLayer(*given, self.measured, self.counter)

    def head(self, placement: Placement) -> HeadMath:
        return MetaHead(placement.head_tokens, self.measured, self.layout, self.counter)

    def rows(self, placement: Placement) -> VocabSplit:
        return MetaVocabSplit(placement.head_tokens, self.measured, self.counter)
