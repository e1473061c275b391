"""The least memory that would do: of all frames, with tiles on the device as far as it has room.

A frame is looked at more closely again and again: what lasts as long as an engine, what a layer
works with, a step of few micro-batches, a whole step. A closer look never shows less. So frames
wait in the order of what they lack, the one that lacks least is looked at more closely, and when
that has been followed for a whole step, there is no better one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count

from megatrain.autoplace.candidates import MOST_SLOTS, Frames
from megatrain.autoplace.spend import Budget, FirstTiles
from megatrain.forecast.op_counter import NotForeseeable
from megatrain.forecast.simulate import Forecast
from megatrain.placement import Placement
from megatrain.units import align

# Host bytes that are as hard to come by as one of the device.
_DEVICE_WORTH = 8

# Of what is needed: ways that differ by less are alike, and the fewest micro-batches decide.
_ALIKE = 0.01

# Micro-batches: more of them are looked at only where the device is too small for fewer. A whole
# step of many takes long to follow, and what a layer works with hardly counts any more.
_MANY = 24


@dataclass(frozen=True)
class _Way:
    """A frame as far as it is known.

    Attributes:
        device, host: bytes at least; with nothing resident until it is `found`.
        looks: so many were taken.
    """

    frame: Placement
    rows: int
    device: int
    host: int
    looks: int = 0
    found: Forecast | None = None


class Frugal:
    """Looks for what lacks least of a budget."""

    def __init__(self, frames: Frames, budget: Budget) -> None:
        self._frames, self._budget = frames, budget
        self._looks = (frames.floor, frames.estimate)
        self._tiles = FirstTiles(frames.forecasts.model(frames.workload).layouts, frames.workload)

    def could_fit(self) -> bool:
        """Whether there likely is a way; quicker to tell than what is fastest."""
        return any(map(self._could_fit, self._ways()))

    def hopeful(self, frame: Placement, rows: int) -> bool:
        """Whether a frame can fit at all, told without a whole step; what is quick first."""
        return self._could_fit(_Way(frame, rows, *self._frames.lasting(frame)))

    def _could_fit(self, way: _Way | None) -> bool:
        while way is not None and not any(self._lacks(way)):
            if way.looks == len(self._looks):
                return True
            way = self._looked_at(way)
        return False

    def least(self) -> Forecast:
        """What lacks least, on the machine with the memory that it lacks.

        More host memory is not asked for *and* a larger device where one of them would do.
        """
        ways, number = self._worth_a_look(), count()
        alone = any(way.device <= self._budget.device for way in ways)
        taken = zip(*map(self._taken, ways), strict=True)
        alike = [max(1, int(_ALIKE * min(sizes))) for sizes in taken]

        def ranked(way: _Way) -> tuple[bool, int, int, int, int, _Way]:
            device, host = map(align, self._lacks(way), alike)
            both = alone and device > 0 and host > 0
            lacking = _DEVICE_WORTH * device + host
            return both, lacking, -way.looks, -way.rows, next(number), way

        queue = [ranked(way) for way in ways]
        heapify(queue)
        while True:
            way = heappop(queue)[-1]
            if way.found is not None:
                return replace(way.found, machine=self._budget.raised(way.device, way.host))
            for closer in self._closer(way):
                heappush(queue, ranked(closer))

    def _worth_a_look(self) -> list[_Way]:
        ways, rows = list(self._ways()), self._frames.workload.rows
        few = [way for way in ways if way.rows * _MANY >= rows]
        looked = filter(None, map(self._looked_at, reversed(few)))
        return few if any(way.device <= self._budget.device for way in looked) else ways

    def _ways(self) -> Iterator[_Way]:
        frames = self._frames
        for split in (False, True):
            for rows in frames.sizes():
                for family in frames.families(rows, split=split):
                    for frame in reversed(family):
                        if frame.slots < MOST_SLOTS:
                            yield _Way(frame, rows, *frames.lasting(frame))

    def _lacks(self, way: _Way) -> tuple[int, int]:
        """Bytes of the device and of the host."""
        device, host = self._taken(way)
        return max(0, device - self._budget.device), max(0, host - self._budget.host)

    def _taken(self, way: _Way) -> tuple[int, int]:
        """Bytes of the device and of the host, with tiles moved as far as it helps."""
        if way.found is not None:
            return way.device, way.host
        moved, tiles = self._moved(way), self._tiles
        return way.device + tiles.device_bytes(moved), way.host - tiles.host_bytes(moved)

    def _moved(self, way: _Way) -> int:
        """How many tiles rest on the device because the host lacks room."""
        room = self._tiles.most(self._budget.device - way.device)
        return max(0, min(room, self._tiles.fewest(way.host - self._budget.host)))

    def _looked_at(self, way: _Way) -> _Way | None:
        """The way after one more look that is no whole step; None: it cannot be foreseen."""
        try:
            device, host = self._looks[way.looks](way.frame, way.rows)
        except NotForeseeable:
            if way.frame.chunk_tokens is None:
                raise
            return None  # these layers cannot be foreseen in tiles
        most = max(way.device, device), max(way.host, host)
        return _Way(way.frame, way.rows, *most, way.looks + 1)

    def _closer(self, way: _Way) -> list[_Way]:
        """The way after one more look; where the device does not hold its tiles, with fewer too."""
        if way.looks < len(self._looks):
            closer = self._looked_at(way)
            return [] if closer is None else [closer]
        moved, tiles, room = self._moved(way), self._tiles, self._budget.device
        found = self._frames.of(replace(way.frame, resident=tiles.names(moved)), way.rows)
        device, host = self._taken(way)
        most = max(device, found.device_peak_bytes), max(host, found.host_peak_bytes)
        known = _Way(way.frame, way.rows, *most, way.looks + 1, found)
        if not moved or found.device_peak_bytes <= room:
            return [known]
        return [known, replace(way, device=room - tiles.device_bytes(moved) + 1)]
