"""Makes the units of a step that computes nothing."""

from dataclasses import dataclass

from megatrain.device import Device
from megatrain.engine.ferry import Ferry
from megatrain.engine.head import HeadMath
from megatrain.engine.layer import Layer
from megatrain.engine.ranges import Rows
from megatrain.forecast.measure import Measured
from megatrain.forecast.opaque import OpaqueHead, OpaqueProgram, OpaqueRows
from megatrain.forecast.opaque_layer import OpaqueLayer
from megatrain.forecast.tally import Tally
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
