"""Puts together a step that computes nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatrain.device import Buffer, Device
from megatrain.disk_staging import DiskStaging, Lane, own_numel
from megatrain.engine.assemble import Assembly
from megatrain.engine.head import HeadMath
from megatrain.engine.host_offload import HostOffload
from megatrain.engine.layer import Layer
from megatrain.engine.sink import PIECE, GradAccumulator, Sink
from megatrain.engine.stream import Unpack
from megatrain.engine.vocab_split import VocabSplit
from megatrain.forecast.meta_layer import MetaLayer
from megatrain.forecast.meta_program import MetaHead, MetaVocabSplit
from megatrain.forecast.op_counter import OpCounter, Work
from megatrain.forecast.profile import Profile
from megatrain.optim import Plane
from megatrain.placement import ActivationPolicy
from megatrain.store import Tile
from megatrain.tile import TileLayout
from megatrain.units import align

_PIECES = 8  # of a tile: many more take long to follow, and take as long in the step
_GROWTH = 8  # of a piece that is followed as one: it is rounded while the one before it leaves


class CoarseSink(Sink):
    """Sends as many bytes through as much device memory, a gradient in a few pieces."""

    def _most_at_once(self, layer: int, lanes: int | None) -> int:
        """All of a layer's pieces have lanes, which take as much as if there were more of them."""
        return PIECE if lanes else max(PIECE, -(-align(layer, PIECE) // _PIECES))

    def _pieces(self, numel: int) -> Iterator[tuple[int, int]]:
        """The first and the last, one for each lane, are as they are; others leave together."""
        size, most = self._piece, len(self._lanes) * self._piece
        start, stop = 0, min(size, numel)
        yield start, stop
        while stop < numel:
            together = _GROWTH * (stop - start) // size * size if stop >= most else size
            start, stop = stop, min(stop + max(size, min(together, numel - most - stop)), numel)
            yield start, stop

    def _round(self, room: GradAccumulator, part: slice, to: Buffer) -> None:
        """A lane counts as large as what it is given."""
        data = torch.empty(part.stop - part.start, dtype=to.data.dtype, device="meta")
        super()._round(room, part, Buffer(to.name, data))


@dataclass(kw_only=True)
class MetaAssembly(Assembly):
    """The assembly of a model of which only works and shapes are known."""

    measured: Profile
    counter: OpCounter
    sinks: ClassVar[type[Sink]] = CoarseSink

    def layer(self, visit: int, policy: ActivationPolicy, offload: HostOffload | None) -> Layer:
        given = self.device, self.program, self.layers[visit], visit, policy, offload
        return MetaLayer(*given, self.measured, self.counter)

    def unpack(self) -> Unpack:
        def count(layout: TileLayout, stored: Tensor, out: Tensor) -> None:
            touched = layout.numel + layout.unpacked.numel
            kernels = sum(entry.packed is not None for entry in layout.entries)
            self.counter.add(Work(touched_bytes=touched * self.dtype.itemsize, kernels=kernels))

        return count

    def whole_head(self) -> HeadMath:
        tokens, layout = self.placement.head_tokens, self.head.layout
        return MetaHead(tokens, self.measured, layout, self.counter)

    def vocab_split(self) -> VocabSplit:
        return MetaVocabSplit(self.placement.head_tokens, self.measured, self.counter)

    def disk_staging(self, *, whole: bool) -> DiskStaging:
        return CoarseDiskStaging(self.device, self.store.tiles, whole=whole)


class CoarseDiskStaging(DiskStaging):
    """Moves as many bytes through as much host memory, a tile in a few pieces."""

    def __init__(self, device: Device, tiles: Sequence[Tile], *, whole: bool = False) -> None:
        super().__init__(device, tiles, whole=whole)
        largest = max(map(own_numel, tiles), default=0)
        self._piece = max(self._piece, align(-(-largest // _PIECES), self._piece))

    def _rooms(self, lane: Lane, parts: Mapping[Plane, Buffer]) -> dict[Plane, Buffer]:
        """Rooms of the parts' own sizes: a lane holds less at a time."""
        return {plane: Buffer(lane.buffer.name, part.data) for plane, part in parts.items()}
