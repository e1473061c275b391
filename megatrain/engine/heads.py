"""Who makes what computes with a head."""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

from megatrain.engine.head import HeadMath, WholeHead
from megatrain.engine.ranges import Rows
from megatrain.loss import Loss, Summed, range_gradient, range_statistics
from megatrain.model.compiled import compile_and_tell
from megatrain.model.program import ModelProgram
from megatrain.placement import Placement


class Heads(Protocol):
    """Makes what computes with a head: with a whole one, or with rows of its table."""

    def whole(self, placement: Placement) -> HeadMath:
        """Of a head that is streamed as a whole."""

    def rows(self, placement: Placement) -> Rows:
        """Of one that is streamed in ranges of rows."""


@dataclass(frozen=True)
class TorchHeads:
    """Heads that compute, compiled where the placement says so."""

    program: ModelProgram

    def whole(self, placement: Placement) -> HeadMath:
        summed = cache(_compiled) if placement.compile else _as_it_is
        return WholeHead(self.program, placement.head_tokens, summed)

    def rows(self, placement: Placement) -> Rows:
        statistics, gradient = range_statistics, range_gradient
        if placement.compile:
            statistics = compile_and_tell(statistics, "the loss of some rows")
            gradient = compile_and_tell(gradient, "the gradient of some rows")
        return Rows(self.program, placement.head_tokens, statistics, gradient)


def _compiled(loss: Loss) -> Summed:
    return compile_and_tell(loss.summed, "the loss")


def _as_it_is(loss: Loss) -> Summed:
    return loss.summed
