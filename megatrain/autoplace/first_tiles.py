"""A model's tiles in the order in which they come to rest on the device, and their bytes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import add, mul

from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.workload import Workload
from megatrain.optim import gradient_plane, tile_planes
from megatrain.placement import Placement
from megatrain.store.store import Tier, on_disk, resting
from megatrain.tile import TileKind, TileLayout


class FirstTiles:
    """A model's tiles from the first one on, in which order they come to rest on the device."""

    def __init__(
        self, layouts: Sequence[TileLayout], workload: Workload, placement: Placement
    ) -> None:
        """Args: `placement` says what rests on a disk, and how many passes a step has."""
        self.tiles = [each for each in layouts if each.kind is not TileKind.UNUSED]
        rule, dtype = workload.rule, workload.dtype
        kept = [sum(p.num_bytes(t) for p in tile_planes(rule, dtype)) for t in self.tiles]
        gradients = [gradient_plane(dtype).num_bytes(tile) for tile in self.tiles]
        # Of what is cut between ranks, each has the weights whole beside its block.
        whole = [streamed_numel([t]) * dtype.itemsize * (t.ranks > 1) for t in self.tiles]
        # Of gradients that do not wait for the norm the host holds only those that are in flight.
        held = [workload.clip and not rule.directs(tile) for tile in self.tiles]
        # Of layers that rest there in passes it holds the sums in any case.
        summed = placement.passes > 1 and not rule.needs_matrices
        layers = [summed and t.kind is TileKind.LAYER for t in self.tiles]
        there = [0 if layer else num for layer, num in zip(layers, gradients, strict=True)]
        self._on_device = [0, *accumulate(map(add, map(add, kept, whole), there))]
        self._on_host = [0, *accumulate(map(add, kept, map(mul, gradients, held)))]
        # What leaves the disk for the device spares the host nothing.
        if placement.disk_moments or placement.disk_weights:
            counts = range(len(self.tiles) + 1)
            moved = [replace(placement, resident=self.names(count)) for count in counts]
            first, *_ = there = [*disk_bytes(layouts, workload, moved)]
            self._on_host = [
                n - (first - left) for n, left in zip(self._on_host, there, strict=True)
            ]

    @property
    def sums_bytes(self) -> int:
        """What fp32 sums take that all stay, beyond the room of the largest (a table has rows)."""
        tiles = [each for each in self.tiles if each.kind is not TileKind.EMBEDDING]
        summed = [each.trainable_numel for each in tiles]
        return 4 * (sum(summed) - max(summed))

    def rest(self, count: int) -> list[TileLayout]:
        """The tiles after the first `count` whose weights could stay on the device; the head first.

        Of layers any do.
        """
        kinds = (TileKind.HEAD, TileKind.LAYER)
        return [each for kind in kinds for each in self.tiles[count:] if each.kind is kind]

    def names(self, count: int) -> tuple[str, ...]:
        """Names of the first `count` tiles."""
        return tuple(each.name for each in self.tiles[:count])

    def device_bytes(self, count: int) -> int:
        """Device bytes of the first `count` tiles."""
        return self._on_device[count]

    def host_bytes(self, count: int) -> int:
        """Host bytes that moving the first `count` tiles spares."""
        return self._on_host[count]

    def most(self, room: int) -> int:
        """The number of first tiles that fit in `room` device bytes; -1 if `room` is negative."""
        return sum(num_bytes <= room for num_bytes in self._on_device) - 1

    def fewest(self, lacking: int) -> int:
        """The least number of first tiles whose move spares the host `lacking` bytes.

        One more than there are if all together spare less.
        """
        return sum(num_bytes < lacking for num_bytes in self._on_host)

    def read_numel(self, placement: Placement) -> int:
        """Elements of weights that a step at least reads from a disk.

        Both sweeps of a pass read a layer, except where slots may hold it as the sweeps turn.
        """
        if not placement.disk_weights:
            return 0
        each = zip(self.tiles, resting(placement, self.tiles), strict=True)
        crossing = [
            tile.numel * (rests.weights is Tier.DISK)
            for tile, rests in each
            if tile.kind is TileKind.LAYER and rests.weights is not Tier.DEVICE and not rests.stays
        ]
        turned = crossing[: placement.slots] + crossing[-placement.slots :]
        return placement.passes * (2 * sum(crossing) - sum(turned))


def first_tiles(forecasts: ForecastCache, workload: Workload, placement: Placement) -> FirstTiles:
    """`FirstTiles` for what a placement says of the disk and of passes; the rest is no matter."""
    names = ("disk_moments", "disk_remainder", "disk_weights", "passes")
    alike = Placement(**{name: getattr(placement, name) for name in names})
    key = "tiles", workload.rule, workload.ranks, workload.dtype, workload.clip, alike
    layouts = forecasts.model(workload).layouts
    return forecasts.once(key, lambda: FirstTiles(layouts, workload, alike))


def disk_bytes(
    layouts: Sequence[TileLayout], workload: Workload, placements: Iterable[Placement]
) -> Iterator[int]:
    """What each of some placements puts on a disk, of one rank."""
    sizes: Counter[tuple[str, str]] = Counter()
    for plane in tile_planes(workload.rule, workload.dtype):
        sizes.update({(plane.kind.value, t.name): plane.num_bytes(t) for t in layouts})
    for placement in placements:
        elsewhere = [t for t in layouts if t.name not in placement.resident]
        there = on_disk(placement, elsewhere).items()
        yield sum(sizes[kind, name] for kind, names in there for name in names)


def streamed_numel(layouts: Sequence[TileLayout]) -> int:
    """Elements of these tiles that cross the bus as a whole; of the embedding only rows do."""
    return sum(each.numel for each in layouts if each.kind is not TileKind.EMBEDDING)
