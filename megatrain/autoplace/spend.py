"""What a candidate's spare memory can buy: resident tiles, weights that stay, kept graphs, passes.

A candidate is a forecast with nothing resident and nothing kept (autoplace/candidates.py). What
each way of spending could bring at best is known from it: no resource does less work than it must.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from megatrain.autoplace.first_tiles import first_tiles, streamed_numel
from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT, DISK_WEIGHTS, UPDATE
from megatrain.engine.assemble import LEAVING, RETURNING
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.cost_model import CostModel
from megatrain.forecast.ledger import ACTIVATIONS
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.machine import Machine
from megatrain.placement import Placement
from megatrain.tile import TileKind, TileLayout

# Of a budget; the rest is for what forecasts are wrong by (3 %) and for fragmentation.
_USED = 0.95

# Besides what a forecast counts, a share of the driver's context (840 MiB on an H200): what
# torch.compile tries kernels out with. 0.5B in a limit of 1600 MiB took 46 MiB more than foretold.
_LIBRARIES = 0.08

_HOPELESS = 1.2  # times the seconds of the fastest, and likely: a way is not followed


@dataclass(frozen=True)
class Budget:
    """Memory that a machine lends."""

    machine: Machine

    @property
    def device(self) -> int:
        """Bytes of the device that may be used."""
        total = self.machine.device_memory_bytes
        return min(int(_USED * total), total - self._libraries)

    @property
    def _libraries(self) -> int:
        return int(_LIBRARIES * self.machine.device_context_bytes)

    @property
    def host(self) -> int:
        """Bytes of host memory that may be used."""
        return int(_USED * self.machine.host_memory_bytes)

    def spare(self, found: Forecast) -> int:
        """Device bytes left; negative: it does not fit."""
        return self.device - found.device_peak_bytes

    def host_spare(self, found: Forecast) -> int:
        """Host bytes left; negative: it does not fit."""
        return self.host - found.host_peak_bytes

    def fits(self, found: Forecast) -> bool:
        """Whether device and host have room for a forecast."""
        return self.spare(found) >= 0 and self.host_spare(found) >= 0

    def raised(self, device: int, host: int) -> Machine:
        """The machine, with its memory raised to hold so many bytes where it has less."""
        there = self.machine
        on_device, on_host = there.device_memory_bytes, there.host_memory_bytes
        if device > self.device:
            on_device = max(int(device / _USED), device + self._libraries) + 2
        if host > self.host:
            on_host = int(host / _USED) + 2
        return replace(there, device_memory_bytes=on_device, host_memory_bytes=on_host)


@dataclass(frozen=True)
class MemoryPlan:
    """A candidate and what its spare memory is spent on; it takes `seconds` at least.

    It will likely take `likely`.
    """

    candidate: Forecast
    resident: tuple[str, ...]
    staying: int
    passes: int
    graphs: "Graphs"
    seconds: float
    likely: float

    def promises(self, best: Forecast) -> bool:
        """Whether it may be faster: what is likely has been at most a sixth too much."""
        return self.seconds < best.seconds and self.likely < _HOPELESS * best.seconds

    def placement(self, graphs: "Graphs") -> Placement:
        """The candidate's placement, spent this way, with `graphs` kept."""
        return replace(
            self.candidate.placement,
            resident=self.resident,
            keep_weights=self.staying,
            passes=self.passes,
            save_activations=graphs.kept,
            save_all=graphs.whole,
            offload_activations=graphs.offloaded,
        )


class Graphs(NamedTuple):
    """Layers whose graph waits: on the device, whole ones among these, on the host."""

    kept: int
    whole: int
    offloaded: int


class MemoryPlans:
    """The ways to spend the memory that one candidate leaves, in a number of passes."""

    def __init__(
        self,
        forecasts: ForecastCache,
        workload: Workload,
        candidate: Forecast,
        budget: Budget,
        passes: int = 1,
    ) -> None:
        self._forecasts, self._workload, self._frame = forecasts, workload, candidate
        self._budget, self._passes = budget, passes
        self._layers = len(forecasts.spec.layers)
        self._micro = -(-workload.rows // candidate.micro_batch)
        self._at_once = -(-self._micro // passes)
        measured = forecasts.measured(workload, candidate.placement.chunk_tokens)
        self._work = measured.layer(0, candidate.micro_batch)
        placement = replace(candidate.placement, passes=passes)
        self._first = first_tiles(forecasts, workload, placement)
        self._tiles = self._first.tiles
        self._costs = CostModel(budget.machine, workload.rule)

    @property
    def _graph(self) -> int:
        """Bytes of a layer's graph."""
        return self._work.keeping.kept_bytes * self._at_once

    @property
    def _rest(self) -> int:
        """Bytes that a whole graph takes beyond the half that `save_activations` keeps."""
        return self._work.again.kept_bytes * self._at_once - self._graph

    def _more(self, where: Literal["device", "host"]) -> int:
        """Bytes that a graph takes there beyond the attention results that wait without it."""
        kept = self._frame.placement.save_attention == where
        return max(1, self._graph - kept * self._work.again.attention_bytes * self._at_once)

    def _held(self, num_bytes: int, offload: int) -> Graphs:
        """The graphs that fit in so many bytes of the device, as many as wanted on the host."""
        kept = min(self._layers, num_bytes // self._more("device"))
        offload = max(0, min(offload, self._layers - kept))
        left = num_bytes - kept * self._more("device") if kept == self._layers else 0
        return Graphs(kept, min(kept, left // self._rest) if self._rest > 0 else 0, offload)

    @property
    def _spare(self) -> int:
        """Device bytes that the candidate leaves in this number of passes."""
        spare = self._budget.spare(self._frame)
        if self._passes == 1:
            return spare
        waiting = self._frame.device_bytes.get(ACTIVATIONS, 0)
        less = waiting * (self._micro - self._at_once) // self._micro
        return spare - self._first.sums_bytes + less

    def all(self) -> Iterator[MemoryPlan]:
        """Every way that is worth a look."""
        first = self._first
        spare, host_spare = self._spare, self._budget.host_spare(self._frame)
        least, fitting = first.fewest(-host_spare), first.most(spare)
        if least > len(self._tiles):
            return  # the host has no room even if every tile leaves it
        begin = 1 + [tile.kind for tile in self._tiles].index(TileKind.LAYER)
        parts = (least + (fitting - least) * part // 4 for part in (0, 1, 2, 3, 4))
        for count in sorted({0, begin, *parts}):
            if not least <= count <= fitting or (count and not self._tiles[count - 1].numel):
                continue  # too few, too many, or one that brings nothing
            left, left_on_host = first.device_bytes(count), first.host_bytes(count)
            rest = first.rest(count)
            for staying in sorted({0, min(1, len(rest)), len(rest) * (self._passes > 1)}):
                weights = self._workload.dtype.itemsize * streamed_numel(rest[:staying])
                room = spare - left - weights, host_spare + left_on_host
                yield from self._graphs(count, staying, *room)

    def _graphs(
        self, count: int, staying: int, spare: int, host_spare: int
    ) -> Iterator[MemoryPlan]:
        """Ways with `count` resident tiles and the weights of `staying` other tiles."""
        if spare < 0:
            return
        resident = self._first.names(count)
        told = set()
        for offload in self._offloads(host_spare):
            lanes = (LEAVING + RETURNING) * self._work.keeping.kept_bytes if offload else 0
            if lanes > spare:
                continue
            graphs = self._held(spare - lanes, offload)
            if graphs in told:
                continue  # as many are left by those that stay on the device
            told.add(graphs)
            times = self._times(count, staying, graphs)
            yield MemoryPlan(self._frame, resident, staying, self._passes, graphs, *times)

    def _offloads(self, host_spare: int) -> list[int]:
        """Numbers of graphs on the host: none, all that it holds, those that leave unnoticed."""
        if not self._graph:
            return [0]
        most = min(self._layers, host_spare // self._more("host"))
        unnoticed = int(self._forward() / self._leaving())
        found = {0, most, min(most, unnoticed), min(most, unnoticed) // 2}
        return sorted(count for count in found if count >= 0)

    def _forward(self) -> float:
        """Seconds of the layers' forward."""
        return self._layers * self._micro * self._costs.seconds(self._work.forward)

    def _leaving(self) -> float:
        """Seconds that a graph takes to the host."""
        return self._costs.copy(COPY_OUT, self._graph)

    def _times(self, count: int, staying: int, graphs: Graphs) -> tuple[float, float]:
        """Seconds that the busiest resource takes at least, and those that the step likely takes.

        What compute waits for in the candidate are tiles on their way or in their updates, which no
        bound tells; it waits less as fewer are streamed. With clipping, updates run beside the
        first pass's forward alone. In a forward weights cross twice as fast as in a backward. A
        head that takes the slots of layers, and the layer after it, come while nothing computes.
        """
        all_tiles, gone = self._tiles, self._tiles[:count]
        left = 1 - sum(t.numel for t in gone) / sum(t.numel for t in all_tiles)
        crossing = 1 - streamed_numel(gone) / streamed_numel(all_tiles)
        bounds, compute = self._frame.bounds, self._compute(graphs) + self._updating(gone)
        crossed = graphs.offloaded * self._passes  # a graph of a pass each
        returning = self._costs.copy(COPY_IN, self._graph)
        rest = self._first.rest(count)
        stays = streamed_numel(rest[:staying]) / streamed_numel(all_tiles)
        arriving = bounds[COPY_IN] * ((crossing - stays) * self._passes + stays / 2)
        late = max(0.0, arriving / 2 - self._forward()) if self._passes > 1 else 0.0
        itemsize = self._workload.dtype.itemsize
        exposed = self._costs.copy(COPY_IN, itemsize * streamed_numel(rest[:2]))
        late += exposed * (self._passes - 1) if rest and not staying else -exposed
        alone = 0.0
        if self._passes > 1 and self._workload.clip:
            alone = max(0.0, bounds[UPDATE] * left - self._forward() / self._passes)
        spent = replace(self._frame.placement, resident=self._first.names(count))
        spent = replace(spent, keep_weights=staying, passes=self._passes)
        read = self._costs.copy(DISK_WEIGHTS, itemsize * self._first.read_numel(spent))
        least = max(
            compute + alone,
            bounds[UPDATE] * left,
            arriving + crossed * returning,
            bounds[COPY_OUT] * crossing + crossed * self._leaving(),
            read,
        )
        waited = self._frame.seconds - bounds[COMPUTE]
        # The candidate waits for a disk once; other passes do again.
        again = read * (1 - 1 / self._passes)
        return least, max(least, compute + late + max(waited * left, alone) + again)

    def _updating(self, resident: Sequence[TileLayout]) -> float:
        """Seconds of the device's updates, where the rule has no kernel for them."""
        rule = self._workload.rule
        numel = sum(
            entry.numel / tile.ranks
            for tile in resident
            for entry in tile.trainable
            if not rule.directing or rule.directed(entry)  # the others are AdamW's
        )
        return self._costs.launching_updates(numel)

    def _compute(self, graphs: Graphs) -> float:
        """Seconds of computing, and of waiting for lanes to the host."""
        work, seconds = self._work, self._costs.seconds
        saved = sum(map(seconds, work.computed_twice))
        if self._frame.placement.save_attention != "none":
            saved -= seconds(work.again) - seconds(work.again._replace(attention_flops=0))
        halves = seconds(work.keeping) + seconds(work.kept_backward)
        whole = halves - seconds(work.again) - seconds(work.backward)
        late = max(0.0, graphs.offloaded * self._passes * self._leaving() - self._forward())
        spared = (graphs.kept + graphs.offloaded) * max(0.0, saved - halves) * self._micro
        spared += graphs.whole * max(0.0, whole) * self._micro
        return self._frame.bounds[COMPUTE] - spared + late

    def spent(self, plan: MemoryPlan) -> Forecast | None:
        """The forecast of a way; fewer graphs are kept if it does not fit, more if it leaves room.

        None: it does not fit without any. Where no graph is on the host, the host holds as much
        however many wait on the device: one that has no room then has none for other graphs.
        """
        graphs, best = plan.graphs, None
        alone = self._budget.machine, self._workload, plan.placement(Graphs(0, 0, 0))
        if self._forecasts.least_host_bytes(*alone) > self._budget.host:
            return None
        for _ in range(3):
            placement = plan.placement(graphs)
            found = self._forecasts.of(
                self._budget.machine, placement, self._workload, plan.candidate.micro_batch
            )
            if self._budget.fits(found) and (best is None or found.seconds < best.seconds):
                best = found
            if self._budget.host_spare(found) < 0 and not graphs.offloaded:
                break
            held = graphs.kept * self._more("device") + graphs.whole * max(0, self._rest)
            room = held + self._budget.spare(found)
            more_on_host = min(0, self._budget.host_spare(found) // self._more("host"))
            before, graphs = graphs, self._held(room, graphs.offloaded + more_on_host)
            if room < 0 or graphs == before:
                break
        return best
