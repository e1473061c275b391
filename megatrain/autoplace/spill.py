"""The fastest placement, with as few planes on a disk as the host's memory makes necessary."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megatrain.autoplace.first_tiles import disk_bytes
from megatrain.autoplace.search import Search
from megatrain.errors import DoesNotFit
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.machine import Machine
from megatrain.placement import Placement
from megatrain.tile import TileKind, TileLayout

_TRIED = 3  # of the ways that likely fit, from the least on


@dataclass(frozen=True)
class Spill:
    """Choices of a placement that put so many bytes on a disk."""

    choices: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0


def fastest(
    forecasts: ForecastCache, machine: Machine, workload: Workload, *, thorough: bool = True
) -> Forecast:
    """The fastest forecast that fits; nothing is on the disk unless nothing fits without.

    Args:
        machine: its memory and disk space are the budgets.
        thorough: as `Search` takes it.

    Raises:
        DoesNotFit: nothing does.
    """
    ways = _ways(forecasts, machine, workload)

    def search(spill: Spill) -> Search:
        choices = spill.choices
        return Search(forecasts, machine, workload, thorough=thorough, spilled=choices)

    if len(ways) == 1:
        return search(ways[0]).best()
    first = bisect_left(ways, True, key=lambda spill: search(spill).could_fit())
    for spill in ways[first : first + _TRIED]:
        with suppress(DoesNotFit):
            return search(spill).best()
    return search(_least(forecasts, machine, workload)[0]).best()


def least(forecasts: ForecastCache, machine: Machine, workload: Workload) -> Forecast:
    """What lacks least memory, on the machine with the memory that it lacks besides."""
    return _least(forecasts, machine, workload)[1]


def _least(
    forecasts: ForecastCache, machine: Machine, workload: Workload
) -> tuple[Spill, Forecast]:
    """What is on a disk (all that can be, if the host lacks memory, else nothing); the forecast."""
    ways = _ways(forecasts, machine, workload)
    without = Search(forecasts, machine, workload)
    if len(ways) == 1 or not without.host_is_short():
        found = without.least()
        if len(ways) == 1 or found.machine.host_memory_bytes <= machine.host_memory_bytes:
            return ways[0], found
    return ways[-1], Search(forecasts, machine, workload, spilled=ways[-1].choices).least()


def could_fit(forecasts: ForecastCache, machine: Machine, workload: Workload) -> bool:
    """Whether there likely is a way; quicker to tell than what is fastest."""
    last = _ways(forecasts, machine, workload)[-1]
    return Search(forecasts, machine, workload, spilled=last.choices).could_fit()


def _ways(forecasts: ForecastCache, machine: Machine, workload: Workload) -> list[Spill]:
    """Nothing on a disk; and where there is one, more and more of what it has room for."""
    there = machine.disk_space_bytes or 0
    if not there:
        return [Spill()]
    layouts = forecasts.model(workload).layouts
    key = "spills", workload.rule, workload.ranks, workload.dtype
    spills = forecasts.once(key, lambda: [*_spills(layouts, workload)])
    return [Spill(), *(spill for spill in spills if spill.num_bytes <= there)]


def _spills(layouts: Sequence[TileLayout], workload: Workload) -> Iterator[Spill]:
    """What may be on a disk: moments of one tile more each time, then remainders, then weights."""
    layers = sum(each.kind is TileKind.LAYER for each in layouts)
    tiles = sum(each.trainable_numel > 0 for each in layouts)
    moments: list[dict[str, Any]] = [{"disk_moments": count + 1} for count in range(tiles)]
    remainders = [{"disk_moments": tiles, "disk_remainder": count + 1} for count in range(tiles)]
    rest = {"disk_moments": tiles, "disk_remainder": tiles}
    weights = [rest | {"disk_weights": count + 1} for count in range(layers)]
    ways = [*moments, *remainders, *weights]
    yield from map(Spill, ways, disk_bytes(layouts, workload, (Placement(**way) for way in ways)))
