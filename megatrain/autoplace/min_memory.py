"""The least memory that would do: of all candidates, with tiles on the device where it has room.

A candidate is looked at more closely again and again: what lasts as long as an engine, what a layer
works with, a step of few micro-batches, a whole step. A closer look never shows less. So candidates
wait in the order of what they lack, and the one that lacks least is looked at more closely. It is
taken when a whole step of it shows hardly more than the look before: no other is clearly better.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count

from megatrain.autoplace.candidates import MOST_SLOTS, Candidates
from megatrain.autoplace.spend import Budget
from megatrain.base.units import align
from megatrain.forecast.op_counter import NotForeseeable
from megatrain.forecast.simulate import Forecast
from megatrain.placement import Placement
from megatrain.telemetry.known_gpus import most_memory

# Host bytes that are as hard to come by as one of the device.
_DEVICE_WORTH = 8

# Of what is needed: ways that differ by less are alike, and the fewest micro-batches decide.
_ALIKE = 0.01

# Of what a layer works with and what lasts: all else of a step came to at most 0.15 in 30 forecasts
# of whole layers (of layers in tiles to more).
_ELSE = 0.2

# Micro-batches: more of them are looked at only where the device is too small for fewer. A whole
# step of many takes long to follow, and what a layer works with hardly counts any more.
_MANY = 24


@dataclass(frozen=True)
class _Estimate:
    """What is known of a candidate.

    Attributes:
        device, host: bytes at least; with nothing resident until it is `found`.
        looks: so many were taken.
    """

    candidate: Placement
    rows: int
    device: int
    host: int
    looks: int = 0
    found: Forecast | None = None


class MinMemory:
    """Looks for what lacks least of a budget."""

    def __init__(self, candidates: Candidates, budget: Budget) -> None:
        self._candidates, self._budget = candidates, budget
        self._looks = (candidates.min_bytes, candidates.one_step_bytes)
        self._tiles = candidates.tiles

    def could_fit(self) -> bool:
        """Whether there likely is a way; quicker to tell than what is fastest.

        The largest micro-batches are what a search begins with, the smallest take least.
        """
        most, *_, least = [*(sizes := self._candidates.sizes()), sizes[-1]]
        return any(map(self._could_fit, self._estimates(dict.fromkeys((most, least)))))

    def host_is_short(self) -> bool:
        """Whether the host lacks memory in every way, whatever rests on the device."""
        estimates = self._estimates(self._candidates.sizes()[-1:])
        return all(self._lacks(estimate)[1] > 0 for estimate in estimates)

    def hopeful(self, candidate: Placement, rows: int) -> bool:
        """Whether a candidate can fit at all, told without a whole step; what is quick first.

        One that is short of host memory is followed for a step: what tiles spare hardly ever does.
        """
        estimate = _Estimate(candidate, rows, *self._candidates.static_bytes(candidate))
        return self._could_fit(estimate, looks=2 if estimate.host > self._budget.host else 1)

    def _could_fit(self, estimate: _Estimate | None, looks: int = 2) -> bool:
        while estimate is not None and not any(self._lacks(estimate)):
            whole = estimate.candidate.chunk_tokens is None
            most = self._taken(estimate)[0] + _ELSE * estimate.device
            ample = estimate.looks and whole and most <= self._budget.device
            if ample or estimate.looks == looks:
                return True
            estimate = self._looked_at(estimate)
        return False

    def least(self) -> Forecast:
        """What lacks least, on the machine with the memory that it lacks.

        More host memory is not asked for *and* a larger device where one of them would do. A device
        that is larger than any would not.
        """
        estimates, number = self._worth_a_look(), count()
        alone = any(estimate.device <= self._budget.device for estimate in estimates)
        taken = zip(*map(self._taken, estimates), strict=True)
        alike = [max(1, int(_ALIKE * min(sizes))) for sizes in taken]
        largest = max(self._budget.device, most_memory())

        def ranked(
            estimate: _Estimate,
        ) -> tuple[bool, bool, int, int, int, int, int, int, _Estimate]:
            device, host = map(align, self._lacks(estimate), alike)
            both = alone and device > 0 and host > 0
            lacking = _DEVICE_WORTH * device + host
            chunk, lanes = estimate.candidate.head_tokens, estimate.candidate.layer_input_lanes
            fast = -estimate.looks, -estimate.rows, -chunk, -lanes
            return estimate.device > largest, both, lacking, *fast, next(number), estimate

        queue = [ranked(estimate) for estimate in estimates]
        heapify(queue)
        while True:
            estimate = heappop(queue)[-1]
            for closer in self._closer(estimate):
                if closer.found is not None and self._hardly_more(closer, estimate):
                    machine = self._budget.raised(closer.device, closer.host)
                    return replace(closer.found, machine=machine)
                heappush(queue, ranked(closer))

    def _hardly_more(self, closer: _Estimate, before: _Estimate) -> bool:
        """Whether `closer` lacks at most 1 % more, and nothing that `before` did not lack."""
        lacks = zip(self._lacks(closer), self._lacks(before), self._taken(before), strict=True)
        return all(now <= then + (then and _ALIKE * taken) for now, then, taken in lacks)

    def _worth_a_look(self) -> list[_Estimate]:
        candidates = self._candidates
        estimates, rows = list(self._estimates(candidates.sizes())), candidates.workload.rows
        few = [estimate for estimate in estimates if estimate.rows * _MANY >= rows]
        looked = filter(None, map(self._looked_at, reversed(few)))
        return (
            few if any(estimate.device <= self._budget.device for estimate in looked) else estimates
        )

    def _estimates(self, sizes: Iterable[int]) -> Iterator[_Estimate]:
        candidates = self._candidates
        for split in (False, True):
            for rows in sizes:
                for family in candidates.families(rows, split=split):
                    for candidate in reversed(family):
                        if candidate.slots < MOST_SLOTS:
                            yield _Estimate(candidate, rows, *candidates.static_bytes(candidate))

    def _lacks(self, estimate: _Estimate) -> tuple[int, int]:
        """Bytes of the device and of the host."""
        device, host = self._taken(estimate)
        if estimate.found is None:
            host += self._arriving(estimate, self._moved(estimate))
        return max(0, device - self._budget.device), max(0, host - self._budget.host)

    def _taken(self, estimate: _Estimate) -> tuple[int, int]:
        """Bytes of the device and of the host, with tiles moved as far as it helps."""
        if estimate.found is not None:
            return estimate.device, estimate.host
        moved, tiles = self._moved(estimate), self._tiles
        return estimate.device + tiles.device_bytes(moved), estimate.host - tiles.host_bytes(moved)

    def _moved(self, estimate: _Estimate) -> int:
        """How many tiles rest on the device because the host lacks room."""
        room = self._tiles.most(self._budget.device - estimate.device)
        lacking = estimate.host - self._budget.host
        moved = max(0, min(room, self._tiles.fewest(lacking)))
        more = self._arriving(estimate, moved)
        return max(moved, min(room, self._tiles.fewest(lacking + more))) if more else moved

    def _arriving(self, estimate: _Estimate, moved: int) -> int:
        """Host bytes of large tiles on their way to the device, at most before a step begins."""
        if not moved:
            return 0
        placement = replace(estimate.candidate, resident=self._tiles.names(moved))
        host = self._candidates.static_bytes(placement)[1]
        return max(0, host - (estimate.host - self._tiles.host_bytes(moved)))

    def _looked_at(self, estimate: _Estimate) -> _Estimate | None:
        """The way after one more look that is no whole step; None: it cannot be foreseen."""
        try:
            device, host = self._looks[estimate.looks](estimate.candidate, estimate.rows)
        except NotForeseeable:
            if estimate.candidate.chunk_tokens is None:
                raise
            return None  # these layers cannot be foreseen in tiles
        most = max(estimate.device, device), max(estimate.host, host)
        return _Estimate(estimate.candidate, estimate.rows, *most, estimate.looks + 1)

    def _closer(self, estimate: _Estimate) -> list[_Estimate]:
        """The way after one more look; where the device does not hold its tiles, with fewer too.

        One that was followed for a whole step stays as it is.
        """
        if estimate.found is not None:
            return [estimate]
        if estimate.looks < len(self._looks):
            closer = self._looked_at(estimate)
            return [] if closer is None else [closer]
        moved, tiles, room = self._moved(estimate), self._tiles, self._budget.device
        found = self._candidates.of(
            replace(estimate.candidate, resident=tiles.names(moved)), estimate.rows
        )
        device, host = self._taken(estimate)
        most = max(device, found.device_peak_bytes), max(host, found.host_peak_bytes)
        known = _Estimate(estimate.candidate, estimate.rows, *most, estimate.looks + 1, found)
        if not moved or found.device_peak_bytes <= room:
            return [known]
        return [known, replace(estimate, device=room - tiles.device_bytes(moved) + 1)]
