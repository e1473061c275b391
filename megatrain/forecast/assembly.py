"""Puts together a step that computes nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from megatrain.base.units import align
from megatrain.device import Buffer, Device
from megatrain.engine.assemble import Assembly
from megatrain.engine.sink import PIECE, GradAccumulator, Sink
from megatrain.engine.stream import Unpack
from megatrain.forecast.declared import Declared
from megatrain.forecast.profile import Profile
from megatrain.model.program import MicroBatch, Weights
from megatrain.optim import Plane
from megatrain.store.disk_staging import DiskStaging, Lane, own_numel
from megatrain.store.store import Tile

# Of a tile, on its way from the device and to and from a disk: many more take long to follow, and
# as long in the step.
_PIECES, _DISK_PIECES = 3, 8
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

    def _round(self, accumulator: GradAccumulator, part: slice, to: Buffer) -> None:
        """A lane counts as large as what it is given."""
        data = torch.empty(part.stop - part.start, dtype=to.data.dtype, device="meta")
        super()._round(accumulator, part, Buffer(to.name, data))


class UnrunProgram:
    """A program that is only asked which model it is of."""

    def __init__(self, measured: Profile) -> None:
        self.spec, self._measured = measured.spec, measured

    def repeats(self, visit: int, weights: Callable[[], Weights], batch: MicroBatch) -> bool:
        """True if the work of such a graph is known: of layers that would be compiled."""
        return self._measured.layer(visit, len(batch.inputs["input_ids"])).repeating is not None


@dataclass(kw_only=True)
class ForecastAssembly(Assembly):
    """The assembly of a step that computes nothing: it moves as many bytes in fewer pieces."""

    declared: Declared
    sinks: ClassVar[type[Sink]] = CoarseSink

    def unpack(self) -> Unpack:
        return self.declared.unpack

    def disk_staging(self) -> DiskStaging:
        return CoarseDiskStaging(self.device, self.store.tiles)


class CoarseDiskStaging(DiskStaging):
    """Moves as many bytes through as much host memory, a tile in a few pieces."""

    def __init__(self, device: Device, tiles: Sequence[Tile]) -> None:
        super().__init__(device, tiles)
        largest = max(map(own_numel, tiles), default=0)
        self._piece = max(self._piece, align(-(-largest // _DISK_PIECES), self._piece))

    def _rooms(self, lane: Lane, parts: Mapping[Plane, Buffer]) -> dict[Plane, Buffer]:
        """Rooms of the parts' own sizes: a lane holds less at a time."""
        return {plane: Buffer(lane.buffer.name, part.data) for plane, part in parts.items()}
