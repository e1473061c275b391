"""Makes the units of a step that computes nothing."""

from dataclasses import dataclass

from megatrain.device import Device
from megatrain.engine.head import HeadMath
from megatrain.engine.host_offload import Ferry
from megatrain.engine.layer import Layer
from megatrain.engine.vocab_split import Rows
from megatrain.forecast.meta_layer import OpaqueLayer
from megatrain.forecast.meta_program import OpaqueHead, OpaqueProgram, OpaqueRows
from megatrain.forecast.op_counter import Tally
from megatrain.forecast.profile import Measured
from megatrain.placement import ActivationPolicy, Placement
from megatrain.store import Tile
from megatrain.tile import TileLayout


@dataclass(frozen=True)
class OpaqueMakers:
    """Of a model of which only works and shapes are known; `layout` is its head's."""

    measured: Measured
    program: OpaqueProgram
    layout: TileLayout
    tally: Tally

    def layer(
        self, device: Device, tile: Tile, visit: int, policy: ActivationPolicy, ferry: Ferry | None
    ) -> Layer:
        given = device, self.program, tile, visit, policy, ferry
        return OpaqueLayer(*given, self.measured, self.tally)

    def head(self, placement: Placement) -> HeadMath:
        return OpaqueHead(placement.head_tokens, self.measured, self.layout, self.tally)

    def rows(self, placement: Placement) -> Rows:
        return OpaqueRows(placement.head_tokens, self.measured, self.tally)
