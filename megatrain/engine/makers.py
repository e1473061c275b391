"""Who makes what computes: with torch, or only says what it takes."""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

from megatrain.device import Device
from megatrain.engine.head import HeadMath, WholeHead
from megatrain.engine.host_offload import HostOffload
from megatrain.engine.layer import Layer
from megatrain.engine.vocab_split import VocabSplit
from megatrain.loss import Loss, Summed, range_gradient, range_statistics
from megatrain.model.compiled import compile_and_tell
from megatrain.model.program import ModelProgram
from megatrain.placement import ActivationPolicy, Placement
from megatrain.store import Tile


class Makers(Protocol):
    """Makes what computes in the units of a step."""

    def layer(
        self,
        device: Device,
        tile: Tile,
        visit: int,
        policy: ActivationPolicy,
        offload: HostOffload | None,
    ) -> Layer:
        """A layer that is streamed as a whole."""

    def head(self, placement: Placement) -> HeadMath:
        """For a head that is streamed as a whole."""

    def rows(self, placement: Placement) -> VocabSplit:
        """For one that is streamed in ranges of its table's rows."""


@dataclass(frozen=True)
class TorchMakers:
    """Makes what computes with torch, compiled where the placement says so."""

    program: ModelProgram

    def layer(
        self,
        device: Device,
        tile: Tile,
        visit: int,
        policy: ActivationPolicy,
        offload: HostOffload | None,
    ) -> Layer:
        return Layer(device, self.program, tile, visit, policy, offload)

    def head(self, placement: Placement) -> HeadMath:
        summed = cache(_compiled) if placement.compile else _as_it_is
        return WholeHead(self.program, placement.head_tokens, summed)

    def rows(self, placement: Placement) -> VocabSplit:
        statistics, gradient = range_statistics, range_gradient
        if placement.compile:
            statistics = compile_and_tell(statistics, "the loss of some rows")
            gradient = compile_and_tell(gradient, "the gradient of some rows")
        return VocabSplit(self.program, placement.head_tokens, statistics, gradient)


def _compiled(loss: Loss) -> Summed:
    return compile_and_tell(loss.summed, "the loss")


def _as_it_is(loss: Loss) -> Summed:
    return loss.summed
