"""Candidates of a placement, and the ways to spend the memory that a candidate leaves.

A candidate sets the rows of a micro-batch, the slots, where layer inputs wait, and the tokens of a
head chunk; it keeps nothing on the device. The memory that it leaves can be spent on resident
tiles, weights that stay, kept graphs, or passes: `Spending` estimates the seconds of each way from
the candidate's forecast.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT, DISK_WEIGHTS, UPDATE
from megatrain.engine.assemble import LANES
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.notes import Once
from megatrain.forecast.op_counter import Place
from megatrain.forecast.prices import CostModel
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.machine import Machine
from megatrain.optim import gradient_plane, tile_planes
from megatrain.placement import Placement
from megatrain.store.store import DISK_KINDS, Tier, chosen_for_disk, resting
from megatrain.tile import TileKind, TileLayout

# A plan uses this share of a budget; the rest is for errors of forecasts (3 %) and fragmentation.
_USED = 0.95

# torch.compile tries out kernels in memory that no forecast counts, here as a share of the driver's
# context (840 MiB on an H200): 0.5B in a limit of 1600 MiB took 46 MiB more than forecast.
_LIBRARIES = 0.08

_HOPELESS = 1.2  # a way is not forecast if it likely takes so many times the fastest's seconds

# From the fastest to the most sparing.
_SMALLEST: dict[str, Any] = {"slots": 2, "head_tokens": 512, "gradient_lanes": 2}
_SMALLEST |= {"keep_rows": False}
_CANDIDATES: tuple[dict[str, Any], ...] = (
    {"slots": 3, "head_tokens": 8192},
    {"slots": 3, "head_tokens": 8192, "layer_inputs": "host"},
    {"slots": 2, "head_tokens": 2048},
    {"slots": 2, "head_tokens": 2048, "layer_inputs": "host"},
    {"slots": 2, "head_tokens": 2048, "layer_inputs": "host", "layer_input_lanes": 2},
    _SMALLEST,
    {**_SMALLEST, "layer_inputs": "host", "layer_input_lanes": 2},
)
MOST_SLOTS: int = _CANDIDATES[0]["slots"]

# In rows of so many tokens or more, layers may run in tiles, with attention's results kept:
# attention grows with the square of a row's length, so that computing the tiles again costs less
# than attention does. Layer inputs are large then, and leave in less time than a layer takes:
# candidates with few slots take half the lanes.
_LONG, _TILE = 16384, 8192
_ATTENTION: tuple[Literal["device", "host", "none"], ...] = ("device", "host", "none")

# Tokens of a micro-batch, at most. At the largest number the overhead of calls is negligible; small
# numbers serve rows that are as short.
_TOKENS = (49152, *(2**power for power in range(15, -1, -1)))

_CHUNKS = 64  # of a micro-batch in the head, at most: forecasts count each operation


def sizes_of(workload: Workload) -> list[int]:
    """Rows that a micro-batch may have, largest first."""
    if workload.micro_batch is not None:
        return [workload.micro_batch]
    limits = (max(1, tokens // workload.sequence_length) for tokens in _TOKENS)
    # For each limit, as few micro-batches as hold all rows, of sizes as even as can be.
    return sorted({-(-workload.rows // -(-workload.rows // rows)) for rows in limits}, reverse=True)


def families(workload: Workload, spilled: Mapping[str, Any], rows: int) -> list[list[Placement]]:
    """Lists of candidates, each from the fastest to that of least memory; for long rows also tiled.

    Args: `spilled`: choices of the placement that put planes on a disk.
    """
    fewest_tokens = -(-rows * workload.sequence_length // _CHUNKS)
    is_long = workload.sequence_length >= _LONG
    own_experts = spilled.get("own_experts", False)  # layers with owned experts are whole and eager
    whole: list[Placement] = []
    for choices in _CANDIDATES:
        base = Placement(**choices, **spilled, compile=workload.compile and not own_experts)
        lanes = base.layer_input_lanes // (2 if is_long and base.slots < MOST_SLOTS else 1)
        tokens = max(fewest_tokens, base.head_tokens)
        whole.append(replace(base, head_tokens=tokens, layer_input_lanes=lanes))
    if own_experts or not is_long:
        return [whole]
    tiled = [
        [replace(candidate, chunk_tokens=_TILE, save_attention=where) for candidate in whole]
        for where in _ATTENTION
    ]
    return [whole, *tiled]


class FirstTiles(Once):
    """A model's tiles in the order in which they come to rest on the device.

    `device_bytes[n]` are the bytes of the first `n` tiles there.
    """

    def __init__(
        self, layouts: Sequence[TileLayout], workload: Workload, placement: Placement
    ) -> None:
        """Args: `placement` says what rests on a disk, and how many passes a step has."""
        super().__init__()
        self.tiles = [tile for tile in layouts if tile.kind.in_every_step]
        rule, dtype = workload.rule, workload.dtype
        self.device_bytes, self._host_bytes = [0], [0]
        for tile in self.tiles:
            on_device = on_host = sum(p.num_bytes(tile) for p in tile_planes(rule, dtype))
            gradient = gradient_plane(dtype).num_bytes(tile)
            if tile.ranks > 1:  # each rank has the whole weights beside its shard
                on_device += streamed_numel([tile]) * dtype.itemsize
            has_sums = placement.passes > 1 and not rule.needs_matrices
            if not (has_sums and tile.kind is TileKind.LAYER):  # layers' sums are there anyway
                on_device += gradient
            if workload.clip and not rule.directs(tile):  # else the host has few gradients at once
                on_host += gradient
            self.device_bytes.append(self.device_bytes[-1] + on_device)
            self._host_bytes.append(self._host_bytes[-1] + on_host)
        self._layouts, self._workload, self._placement = layouts, workload, placement

    def spared(self, count: int) -> int:
        """Host bytes, none on a disk, that are free once the first `count` tiles are resident."""
        return self._host_bytes[count] + self.disk_bytes(count) - self.disk_bytes(0)

    def disk_bytes(self, count: int) -> int:
        """Bytes on the disk while the first `count` tiles rest on the device."""

        def added_up() -> int:
            resident = set(self.names(count))
            others = [tile for tile in self._layouts if tile.name not in resident]
            counts = {kind: getattr(self._placement, f"disk_{kind}") for kind in DISK_KINDS}
            return sum(disk_bytes(others, self._workload, kind, n) for kind, n in counts.items())

        return self.once(count, added_up)

    @property
    def host_bytes(self) -> int:
        """Host bytes of all tiles' planes while none is resident, without those on a disk."""
        return self._host_bytes[-1] - self.disk_bytes(0)

    @property
    def sums_bytes(self) -> int:
        """Bytes by which fp32 sums of all tiles exceed those of the largest (a table has none)."""
        tiles = [tile for tile in self.tiles if tile.kind is not TileKind.EMBEDDING]
        summed = [tile.local.trainable_numel for tile in tiles]
        return 4 * (sum(summed) - max(summed))

    def rest(self, count: int) -> list[TileLayout]:
        """Tiles after the first `count` whose weights could stay: the head, then layers."""
        kinds = (TileKind.HEAD, TileKind.LAYER)
        return [tile for kind in kinds for tile in self.tiles[count:] if tile.kind is kind]

    def names(self, count: int) -> tuple[str, ...]:
        return tuple(tile.name for tile in self.tiles[:count])

    def most(self, num_bytes: int) -> int:
        """The most first tiles that fit in `num_bytes` of the device; -1 if that is negative."""
        return sum(needed <= num_bytes for needed in self.device_bytes) - 1

    def fewest(self, lacking: int) -> int:
        """The fewest first tiles that spare the host `lacking` bytes; one too many: none do."""
        most = len(self.tiles)
        if self.spared(most) < lacking:
            return most + 1
        return next(count for count in range(most + 1) if self.spared(count) >= lacking)

    def read_numel(self, placement: Placement) -> int:
        """Elements of weights that a step reads from a disk; slots keep some for the next sweep."""
        if not placement.disk_weights:
            return 0
        streamed = [
            tile.numel if rests.weights is Tier.DISK else 0
            for tile, rests in zip(self.tiles, resting(placement, self.tiles), strict=True)
            if tile.kind is TileKind.LAYER and rests.weights is not Tier.DEVICE and not rests.stays
        ]
        kept_in_slots = streamed[: placement.slots] + streamed[-placement.slots :]
        return placement.passes * (2 * sum(streamed) - sum(kept_in_slots))


def first_tiles(forecasts: ForecastCache, workload: Workload, placement: Placement) -> FirstTiles:
    """The `FirstTiles` of a placement, kept in the cache by the choices that they depend on."""
    names = ("disk_moments", "disk_remainder", "disk_weights", "passes", "own_experts")
    choices = Placement(**{name: getattr(placement, name) for name in names})
    key = "tiles", workload.rule, workload.ranks, workload.dtype, workload.clip, choices
    layouts = forecasts.model(workload).placed(choices).layouts
    return forecasts.once(key, lambda: FirstTiles(layouts, workload, choices))


def disk_bytes(layouts: Sequence[TileLayout], workload: Workload, kind: str, count: int) -> int:
    """The bytes of `count` tiles' planes of a kind on a disk, for one rank."""
    names = chosen_for_disk(kind, count, layouts) if count else ()
    planes = [p for p in tile_planes(workload.rule, workload.dtype) if p.kind.value == kind]
    return sum(p.num_bytes(tile) for tile in layouts if tile.name in names for p in planes)


def streamed_numel(layouts: Sequence[TileLayout]) -> int:
    """Elements of these tiles' weights, without the embedding, of which only rows are streamed."""
    return sum(tile.local.numel for tile in layouts if tile.kind is not TileKind.EMBEDDING)


class Budget:
    """The bytes of a machine's `device` and `host` memory that a plan may use."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._libraries = int(_LIBRARIES * machine.device_context_bytes)
        total = machine.device_memory_bytes
        self.device = min(int(_USED * total), total - self._libraries)
        self.host = int(_USED * machine.host_memory_bytes)

    def spare(self, forecast: Forecast) -> int:
        return self.device - forecast.device_peak_bytes

    def host_spare(self, forecast: Forecast) -> int:
        return self.host - forecast.host_peak_bytes

    def fits(self, forecast: Forecast) -> bool:
        return self.spare(forecast) >= 0 and self.host_spare(forecast) >= 0

    def raised(self, device: int, host: int) -> Machine:
        """The machine, its memories enlarged where they do not hold `device` and `host` bytes."""
        on_device, on_host = self.machine.device_memory_bytes, self.machine.host_memory_bytes
        if device > self.device:
            on_device = max(int(device / _USED), device + self._libraries) + 2
        if host > self.host:
            on_host = int(host / _USED) + 2
        return replace(self.machine, device_memory_bytes=on_device, host_memory_bytes=on_host)


class Graphs(NamedTuple):
    """Numbers of layers with a kept graph: on the device, whole ones among these, on the host."""

    kept: int
    whole: int
    offloaded: int


@dataclass(frozen=True)
class Way:
    """A way to spend memory; the step takes `least` seconds or more, and `likely` by estimate."""

    resident: int
    staying: int
    graphs: Graphs
    least: float
    likely: float

    def promises(self, best: Forecast) -> bool:
        """True if it may be faster than `best`: estimates were at most a sixth too high."""
        return self.least < best.seconds and self.likely < _HOPELESS * best.seconds


class Spending:
    """The ways to spend the memory that one candidate leaves, in a number of passes."""

    def __init__(
        self,
        forecasts: ForecastCache,
        workload: Workload,
        candidate: Forecast,
        budget: Budget,
        passes: int = 1,
    ) -> None:
        self._forecasts, self._workload, self._candidate = forecasts, workload, candidate
        self._budget, self._passes = budget, passes
        self._layers = len(forecasts.spec.layers)
        self._micro_batches = -(-workload.rows // candidate.micro_batch)
        at_once = -(-self._micro_batches // passes)
        measured = forecasts.measured(workload, candidate.placement)
        self._work = measured.layer(0, candidate.micro_batch)
        self._first = first_tiles(forecasts, workload, replace(candidate.placement, passes=passes))
        self._costs = CostModel(budget.machine, workload.rule, workload.ranks)
        # Bytes of a layer's graph, and those that a whole one (`save_all`) has beyond it.
        self._graph_bytes = self._work.keeping.kept_bytes * at_once
        self._whole_bytes = max(0, self._work.recompute.kept_bytes * at_once - self._graph_bytes)
        self._attention_bytes = self._work.recompute.attention_bytes * at_once
        self._spare = budget.spare(candidate)
        if passes > 1:
            waiting = candidate.device_bytes.get(Place.ACTIVATIONS, 0)
            freed = waiting * (self._micro_batches - at_once) // self._micro_batches
            self._spare += freed - self._first.sums_bytes

    def _graph_bytes_on(self, where: Literal["device", "host"]) -> int:
        """Bytes that a kept graph adds to a memory, less the attention results that it replaces."""
        is_kept = self._candidate.placement.save_attention == where
        return max(1, self._graph_bytes - is_kept * self._attention_bytes)

    def _fitting_graphs(self, num_bytes: int, offload: int) -> Graphs:
        """The graphs that fit in `num_bytes` of the device, and of other layers `offload`."""
        kept_bytes = self._graph_bytes_on("device")
        kept = min(self._layers, num_bytes // kept_bytes)
        offloaded = max(0, min(offload, self._layers - kept))
        whole = 0
        if kept == self._layers and self._whole_bytes > 0:
            whole = min(kept, (num_bytes - kept * kept_bytes) // self._whole_bytes)
        return Graphs(kept, whole, offloaded)

    def all(self) -> Iterator[Way]:
        """The ways to spend that are worth an estimate."""
        first, tiles = self._first, self._first.tiles
        host_spare = self._budget.host_spare(self._candidate)
        fewest, most = first.fewest(-host_spare), first.most(self._spare)
        if fewest > len(tiles):
            return  # the host lacks memory even if every tile leaves it
        to_first_layer = 1 + [tile.kind for tile in tiles].index(TileKind.LAYER)
        quarters = (fewest + (most - fewest) * quarter // 4 for quarter in range(5))
        for count in sorted({0, to_first_layer, *quarters}):
            brings_nothing = count > 0 and not tiles[count - 1].numel
            if brings_nothing or not fewest <= count <= most:
                continue
            streamed = first.rest(count)
            all_stay = len(streamed) if self._passes > 1 else 0
            for staying in sorted({0, min(1, len(streamed)), all_stay}):
                staying_bytes = self._workload.dtype.itemsize * streamed_numel(streamed[:staying])
                spare = self._spare - first.device_bytes[count] - staying_bytes
                for graphs in self._graphs(spare, host_spare + first.spared(count)):
                    yield Way(count, staying, graphs, *self._seconds(count, staying, graphs))

    def _graphs(self, spare: int, host_spare: int) -> set[Graphs]:
        """Choices of graphs: on the host none, all that fit, or those whose copies are hidden."""
        if spare < 0:
            return set()
        if not self._graph_bytes:
            return {self._fitting_graphs(spare, 0)}
        most_on_host = min(self._layers, host_spare // self._graph_bytes_on("host"))
        copy_seconds = self._costs.copy(COPY_OUT, self._graph_bytes)
        hidden = min(most_on_host, int(self._forward() / copy_seconds))
        lanes_bytes = 2 * LANES * self._work.keeping.kept_bytes
        choices = set()
        for offload in (0, most_on_host, hidden, hidden // 2):
            spare_beside_lanes = spare - lanes_bytes if offload > 0 else spare
            if offload >= 0 and spare_beside_lanes >= 0:
                choices.add(self._fitting_graphs(spare_beside_lanes, offload))
        return choices

    def _forward(self) -> float:
        """Seconds that all layers' forwards compute in a step."""
        return self._layers * self._micro_batches * self._costs.seconds(self._work.forward)

    def _seconds(self, count: int, staying: int, graphs: Graphs) -> tuple[float, float]:
        """Seconds of the busiest resource, which the step takes at least, and the likely seconds.

        In the candidate, compute waits for tiles that are copied or updated; it waits less when
        fewer tiles are streamed. With clipping, updates run beside the first pass's forward alone.
        In a forward, weights are needed twice as fast as in a backward. Nothing computes while the
        head, which takes slots of layers, and the layer after it are copied.
        """
        first, passes, copy = self._first, self._passes, self._costs.copy
        tiles, resident, streamed = first.tiles, first.tiles[:count], first.rest(count)
        itemsize, bounds = self._workload.dtype.itemsize, self._candidate.bounds
        # Of all elements, the share that the host updates. Of the elements that the candidate
        # streams, the share that is still streamed, and the part of this share that then stays.
        host_share = 1 - sum(t.numel for t in resident) / sum(t.numel for t in tiles)
        streamed_share = 1 - streamed_numel(resident) / streamed_numel(tiles)
        staying_share = streamed_numel(streamed[:staying]) / streamed_numel(tiles)
        arriving = bounds[COPY_IN] * ((streamed_share - staying_share) * passes + staying_share / 2)
        weights_waits = max(0.0, arriving / 2 - self._forward()) if passes > 1 else 0.0
        exposed = copy(COPY_IN, itemsize * streamed_numel(streamed[:2]))
        weights_waits += exposed * (passes - 1) if streamed and not staying else -exposed
        alone = 0.0  # seconds of updates beside which nothing computes
        if passes > 1 and self._workload.clip:
            alone = max(0.0, bounds[UPDATE] * host_share - self._forward() / passes)
        crossing_graphs = graphs.offloaded * passes  # each pass has its own graphs
        leaving = crossing_graphs * copy(COPY_OUT, self._graph_bytes)
        compute = self._compute(graphs) + max(0.0, leaving - self._forward())
        # Without a kernel on the device, a rule launches operations to update resident tiles.
        rule = self._workload.rule
        compute += self._costs.launching_updates(
            sum(
                entry.numel / tile.ranks
                for tile in resident
                for entry in tile.trainable
                if not rule.directing or rule.directed(entry)  # the others are AdamW's
            )
        )
        placement = self._placement(count, staying, graphs)
        read = copy(DISK_WEIGHTS, itemsize * first.read_numel(placement))
        least = max(
            compute + alone,
            bounds[UPDATE] * host_share,
            arriving + crossing_graphs * copy(COPY_IN, self._graph_bytes),
            bounds[COPY_OUT] * streamed_share + leaving,
            read,
        )
        candidate_waits = self._candidate.seconds - bounds[COMPUTE]
        # The candidate's seconds have one wait for a disk; further passes wait again.
        reads_again = read * (1 - 1 / passes)
        likely = compute + weights_waits + max(candidate_waits * host_share, alone) + reads_again
        return least, max(least, likely)

    def _compute(self, graphs: Graphs) -> float:
        """Seconds that a step computes when layers keep these graphs."""
        work, seconds, micro_batches = self._work, self._costs.seconds, self._micro_batches
        without_graph = sum(map(seconds, work.computed_twice))
        if self._candidate.placement.save_attention != "none":
            without_attention = work.recompute._replace(attention_flops=0)
            without_graph -= seconds(work.recompute) - seconds(without_attention)
        with_graph = seconds(work.keeping) + seconds(work.kept_backward)
        gain_of_whole = with_graph - seconds(work.recompute) - seconds(work.backward)
        num_graphs = graphs.kept + graphs.offloaded
        spared = num_graphs * max(0.0, without_graph - with_graph) * micro_batches
        spared_by_whole = graphs.whole * max(0.0, gain_of_whole) * micro_batches
        return self._candidate.bounds[COMPUTE] - spared - spared_by_whole

    def _placement(self, count: int, staying: int, graphs: Graphs) -> Placement:
        return replace(
            self._candidate.placement,
            resident=self._first.names(count),
            keep_weights=staying,
            passes=self._passes,
            save_activations=graphs.kept,
            save_all=graphs.whole,
            offload_activations=graphs.offloaded,
        )

    def spent(self, way: Way) -> Forecast | None:
        """The forecast of a way, its number of graphs corrected to fit; None if none fits."""
        graphs, best, rows = way.graphs, None, self._candidate.micro_batch
        for _ in range(3):
            placement = self._placement(way.resident, way.staying, graphs)
            spent = self._forecasts.of(self._budget.machine, placement, self._workload, rows)
            if self._budget.fits(spent) and (best is None or spent.seconds < best.seconds):
                best = spent
            host_spare = self._budget.host_spare(spent)
            if host_spare < 0 and not graphs.offloaded:
                break  # graphs on the device spare the host nothing
            for_graphs = self._budget.spare(spent) + graphs.whole * self._whole_bytes
            for_graphs += graphs.kept * self._graph_bytes_on("device")
            fewer_on_host = min(0, host_spare // self._graph_bytes_on("host"))
            fitting = self._fitting_graphs(for_graphs, graphs.offloaded + fewer_on_host)
            if for_graphs < 0 or fitting == graphs:
                break
            graphs = fitting
        return best
