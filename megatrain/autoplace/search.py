"""The fastest placement by forecast that fits, or the least memory with which one would.

A candidate that fits leaves memory to spend (autoplace/candidates.py). The seconds of each way to
spend it are estimated from the candidate's forecast; the most promising ways are forecast in full.
"""

from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice, product
from operator import le
from typing import Any, NamedTuple

from megatrain.autoplace import candidates
from megatrain.autoplace.candidates import MOST_SLOTS, Budget, Spending
from megatrain.base.units import size
from megatrain.errors import DoesNotFit
from megatrain.forecast.cache import UNSUMMED, ForecastCache
from megatrain.forecast.notes import Once
from megatrain.forecast.op_counter import NotForeseeable
from megatrain.forecast.prices import CostModel
from megatrain.forecast.simulate import STEADY, Forecast
from megatrain.forecast.workload import Workload
from megatrain.loss import JointLoss
from megatrain.machine import Machine, mapping_bytes
from megatrain.placement import Placement
from megatrain.store.store import DISK_KINDS
from megatrain.telemetry.gpu import most_memory
from megatrain.tile import TileKind

# Places of two slower candidates in a family: with layer inputs on the host, and with fewer slots
# and smaller chunks besides. The memory that they leave on the device may buy more than they cost.
_SPARING = (1, 3)
_WAYS_TRIED = 3  # ways to spend that are forecast in full
# Numbers of passes that are tried, beside one pass for each micro-batch, and how many of their ways
# are forecast in full.
_PASSES, _WAYS_TRIED_IN_PASSES = (2, 3, 4, 6, 8, 12, 16), 2
_TOKENS_IN_PASSES = 16384  # tokens of a micro-batch in passes: enough to keep a large GPU busy
_NO_DISK: dict[str, Any] = {f"disk_{kind}": 0 for kind in DISK_KINDS}
_SPILLS_TRIED = 3  # choices of planes on a disk that likely fit, from the fewest planes on
_DEVICE_WORTH = 8  # host bytes that are as hard to come by as one of the device
# Candidates whose needs differ by no more than this share are alike: the fastest of them is taken.
_SIMILAR = 0.01
# Weights are read in place if a step then takes no more than this share of its seconds with copies.
_IN_PLACE = 0.99
# On four H200s steps with owned experts took 1.35 times their forecast, with sharded ones 1.16.
_OWNED_SLOWDOWN = 1.2
# A step may have more micro-batches than this only if the device is too small for fewer: the
# working set of a layer hardly counts any more.
_MANY = 24


def fastest(
    forecasts: ForecastCache, machine: Machine, workload: Workload, *, thorough: bool = True
) -> Forecast:
    """The fastest forecast that fits; it uses the disk only if nothing fits without.

    If not `thorough`, the search stops at the first one. Raises DoesNotFit: nothing fits.
    """
    first_split, *other_splits = machine.splits()
    may_own_experts = workload.may_own and forecasts.can_own(workload)
    fitting: list[Forecast] = []
    for split, own_experts in product(
        (*other_splits, first_split), (True, False) if may_own_experts else (False,)
    ):
        fixed = {"own_experts": True} if own_experts else {}
        try:
            fitting.append(_fastest(forecasts, split, workload, fixed, thorough=thorough))
        except DoesNotFit:
            is_last_hope = not own_experts and not fitting  # owned experts are tried first
            if is_last_hope and not machine.one_memory:
                raise
    if not fitting:  # one memory may be divided between two splits
        needed = least(forecasts, machine, workload)
        if needed.machine.both_bytes > machine.both_bytes:
            raise DoesNotFit(lacking(machine, needed.machine))
        fitting = [needed]

    def likely_seconds(forecast: Forecast) -> float:
        return forecast.seconds * (_OWNED_SLOWDOWN if forecast.placement.own_experts else 1)

    best = min(fitting, key=likely_seconds)
    if not thorough or workload.ranks > 1:
        return best
    without_slots = replace(best.placement, slots=0, prefetch=None)  # takes no more memory
    first = candidates.first_tiles(forecasts, workload, best.placement)
    in_memory = [] if best.placement.disk_weights else first.rest(len(best.placement.resident))
    numel = candidates.streamed_numel([t for t in in_memory if not t.needs_unpacking])
    num_bytes = numel * workload.dtype.itemsize * (workload.rows // best.micro_batch)
    tokens = best.micro_batch * workload.sequence_length
    if CostModel(best.machine).reading_in_place(num_bytes, tokens) > best.seconds:
        return best  # forwards alone take longer
    in_place = forecasts.of(best.machine, without_slots, workload, best.micro_batch)
    return in_place if in_place.seconds < _IN_PLACE * best.seconds else best


def _fastest(
    forecasts: ForecastCache,
    machine: Machine,
    workload: Workload,
    fixed: dict[str, bool],
    *,
    thorough: bool,
) -> Forecast:
    """The fastest forecast on a machine of two memories, with `fixed` choices of the placement."""
    search = partial(Search, forecasts, machine, workload, thorough=thorough)
    spills = [spill | fixed for spill in _spills(forecasts, machine, workload)]
    if len(spills) == 1:
        return search(spills[0]).best()
    first = bisect_left(spills, True, key=lambda spilled: search(spilled).could_fit())
    for spilled in spills[first : first + _SPILLS_TRIED]:
        with suppress(DoesNotFit):
            return search(spilled).best()
    needed = _least(forecasts, machine, workload)
    if Budget(machine).fits(needed):
        return needed
    raise DoesNotFit(lacking(machine, needed.machine))


def least(forecasts: ForecastCache, machine: Machine, workload: Workload) -> Forecast:
    """The forecast that lacks least memory, on a machine that is enlarged to hold it.

    If the host lacks memory, all planes that may be on the disk are. A machine of one memory gets
    no more than is needed.
    """
    if not machine.one_memory:
        return _least(forecasts, machine, workload)
    empty = Budget(replace(machine, device_memory_bytes=1, host_memory_bytes=1))
    with_need = []
    for split in machine.splits():
        forecast = _least(forecasts, split, workload)
        needed = empty.raised(forecast.device_peak_bytes, forecast.host_peak_bytes)
        with_need.append(replace(forecast, machine=needed))
    return min(with_need, key=lambda forecast: forecast.machine.both_bytes)


def _least(forecasts: ForecastCache, machine: Machine, workload: Workload) -> Forecast:
    """`least`, for a machine whose device and host have separate memories."""
    *_, all_on_disk = _spills(forecasts, machine, workload)
    search = Search(forecasts, machine, workload)
    if not all_on_disk or not search.lacks_host():
        without_disk = search.least()
        host_suffices = without_disk.machine.host_memory_bytes <= machine.host_memory_bytes
        if host_suffices or not all_on_disk:
            return without_disk
    return Search(forecasts, machine, workload, all_on_disk).least()


def could_fit(forecasts: ForecastCache, machine: Machine, workload: Workload) -> bool:
    """True if a placement likely fits, with the largest micro-batches or the smallest."""
    *_, most_on_disk = _spills(forecasts, machine, workload)
    splits = machine.splits()
    return any(Search(forecasts, split, workload, most_on_disk).could_fit() for split in splits)


def _spills(forecasts: ForecastCache, machine: Machine, workload: Workload) -> list[dict[str, int]]:
    """Choices of the planes on a disk: none, then ever more of them, while the disk holds them."""
    space = machine.disk_space_bytes or 0
    if not space:
        return [{}]
    layouts = forecasts.model(workload).layouts

    def with_bytes() -> list[tuple[dict[str, int], int]]:
        """Each choice has one tile more: moments first, then remainders, then weights."""
        num_trained = sum(t.trainable_numel > 0 for t in layouts)
        num_layers = sum(t.kind is TileKind.LAYER for t in layouts)
        choices, largest, largest_bytes = list[tuple[dict[str, int], int]](), dict[str, int](), 0
        for kind in DISK_KINDS:
            most = num_layers if kind == "weights" else num_trained
            sizes = [candidates.disk_bytes(layouts, workload, kind, n) for n in range(most + 1)]
            for number, num_bytes in enumerate(sizes[1:], 1):
                choices.append((largest | {f"disk_{kind}": number}, largest_bytes + num_bytes))
            largest, largest_bytes = largest | {f"disk_{kind}": most}, largest_bytes + sizes[-1]
        return choices

    spills = forecasts.once(("spills", workload.rule, workload.ranks, workload.dtype), with_bytes)
    return [{}, *(choice for choice, num_bytes in spills if num_bytes <= space)]


class Peaks(NamedTuple):
    """Bytes on the device and on the host."""

    device: int
    host: int


class _Tiled(NamedTuple):
    """A placement with its resident tiles, and its peaks."""

    placement: Placement
    peaks: Peaks


class _Candidate(NamedTuple):
    """A placement, the number of its family, and its place in the family."""

    family: int
    place: int
    placement: Placement


class Search(Once):
    """Finds the placement of a workload on a machine, whose memory sizes are the budgets."""

    def __init__(
        self,
        forecasts: ForecastCache,
        machine: Machine,
        workload: Workload,
        spilled: Mapping[str, int] | None = None,
        *,
        thorough: bool = True,
    ) -> None:
        """Args: `spilled`: choices of what rests on a disk; None: nothing."""
        super().__init__()
        self._forecasts, self._machine, self._workload = forecasts, machine, workload
        self._thorough = thorough
        self._spilled: dict[str, Any] = dict(spilled or {})
        self._budget = Budget(machine)
        self._sizes = candidates.sizes_of(workload)
        self._tiles = candidates.first_tiles(forecasts, workload, Placement(**self._spilled))

    def best(self) -> Forecast:
        """The fastest forecast, among the largest micro-batches that fit. Raises DoesNotFit."""
        sizes = self._sizes
        least = None
        while sizes:
            forecasts = self._fitting_forecasts(sizes)
            if (best := self._fastest_of(forecasts)) is not None:
                return best
            least = least or self.least()
            if not self._budget.fits(least):
                raise DoesNotFit(lacking(self._machine, least.machine))
            smallest = min((forecast.micro_batch for forecast in forecasts), default=0)
            sizes = [rows for rows in sizes if rows < smallest]
        return least or self.least()

    def _fastest_of(self, forecasts: list[Forecast]) -> Forecast | None:
        """The fastest forecast of these candidates: alone, with memory spent, or in passes."""
        fitting = filter(self._budget.fits, forecasts)
        best = min(fitting, key=lambda forecast: forecast.seconds, default=None)
        spending = [self._spending(forecast) for forecast in forecasts]
        best = _best_spent(best, spending, _WAYS_TRIED if self._thorough else 1)
        if best is None or not self._thorough:
            return best
        return _best_spent(best, self._in_passes(best), _WAYS_TRIED_IN_PASSES)

    def could_fit(self) -> bool:
        """True if a candidate likely fits, with the largest micro-batches or the smallest."""
        if not self._holds(0, self._tiles.host_bytes):
            return False
        most_rows, fewest_rows = self._sizes[0], self._sizes[-1]
        # Without a disk, the search forecasts the fastest candidate anyway.
        fastest = [] if self._spilled else self._families(most_rows)[0][:1]
        return self._may_fit(fastest, most_rows) or any(
            self._may_fit(family, rows)
            for rows in dict.fromkeys((most_rows, fewest_rows))
            for family in self._sparing_families(rows)
        )

    def lacks_host(self) -> bool:
        """True if every candidate's memory that lives as long as an engine exceeds the host's."""
        if not self._holds(0, self._tiles.host_bytes):
            return True
        sparing = chain.from_iterable(self._sparing_families(self._sizes[-1]))
        return all(self._lacks(self._with_tiles(candidate).peaks).host for candidate in sparing)

    def least(self) -> Forecast:
        """The forecast that lacks least memory, on a machine enlarged to hold it.

        It does not need both memories enlarged if more of one (a device that is sold) will do. Of
        candidates that need hardly more, it has the largest micro-batch, then the fastest one.
        """
        sizes = self._sizes
        considered = [rows for rows in sizes if rows * _MANY >= self._workload.rows] or sizes
        sparing, least_peaks = self._lacking_least(considered[-1])
        if least_peaks.device > self._budget.device and considered[-1] > sizes[-1]:
            considered = sizes
            sparing, least_peaks = self._lacking_least(sizes[-1])
        limits = [
            lacks + _SIMILAR * peak if lacks else 0
            for lacks, peak in zip(self._lacks(least_peaks), least_peaks, strict=True)
        ]

        def lacks_hardly_more(placement: Placement, rows: int, *numbers_of_steps: int) -> bool:
            for steps in numbers_of_steps:  # cheap counts of bytes first, then longer forecasts
                peaks = self._with_tiles(placement, rows, steps).peaks
                if not all(map(le, self._lacks(peaks), limits)):
                    return False
            return True

        def fastest_alike() -> tuple[Placement, int]:
            for rows in considered:
                family = self._sparing_families(rows)[sparing.family]
                if lacks_hardly_more(family[sparing.place], rows, 0, 1):
                    for candidate in family:
                        if lacks_hardly_more(candidate, rows, 0, 1, STEADY):
                            return candidate, rows
            rows = considered[-1]
            return self._sparing_families(rows)[sparing.family][sparing.place], rows

        candidate, rows = fastest_alike()
        placement, peaks = self._with_tiles(candidate, rows, STEADY)
        needed = map(max, peaks, self._peaks(placement, rows, 1), self._least_bytes(placement))
        return replace(self._of(placement, rows), machine=self._budget.raised(*needed))

    def _lacking_least(self, rows: int) -> tuple[_Candidate, Peaks]:
        """The candidate that lacks least memory, of micro-batches with `rows`."""
        sparing = [
            _Candidate(number, family.index(placement), placement)
            for number, family in enumerate(self._sparing_families(rows))
            for placement in self._most_sparing(family)
        ]
        least_on_device = min(self._least_bytes(c.placement).device for c in sparing)
        device_suffices = least_on_device <= self._budget.device
        largest_device = max(self._budget.device, most_memory())

        def rank(peaks: Peaks) -> tuple[bool, bool, int]:
            """Lower is better: a GPU on sale has the memory; one memory lacks; few bytes lack."""
            lacks = self._lacks(peaks)
            lacks_both = device_suffices and lacks.device > 0 and lacks.host > 0
            weighted_bytes = _DEVICE_WORTH * lacks.device + lacks.host
            return peaks.device > largest_device, lacks_both, weighted_bytes

        bounds = {c: rank(self._with_tiles(c.placement, rows, 0).peaks) for c in sparing}
        best: tuple[_Candidate, Peaks] | None = None
        for candidate in sorted(sparing, key=bounds.__getitem__):
            if best is not None and rank(best[1]) <= bounds[candidate]:
                break  # the others lack as much even without the memory of a step
            peaks = self._with_tiles(candidate.placement, rows).peaks
            if best is None or rank(peaks) < rank(best[1]):
                best = candidate, peaks
        assert best is not None
        return best

    def _families(self, rows: int) -> list[list[Placement]]:
        return candidates.families(self._workload, self._spilled, rows)

    def _sparing_families(self, rows: int) -> list[list[Placement]]:
        """The families without their candidates of most slots, which need most memory."""
        return [[c for c in family if c.slots < MOST_SLOTS] for family in self._families(rows)]

    def _most_sparing(self, family: list[Placement]) -> list[Placement]:
        """The candidates of a family that may need least memory: at most four.

        With layer inputs on the host, and with them on the device, these are the family's last
        one, and the one with the smallest lower bound of device memory.
        """
        sparing = []
        for layer_inputs in ("host", "device"):
            alike = [placement for placement in family if placement.layer_inputs == layer_inputs]
            by_bytes = sorted(alike, key=lambda candidate: self._without_disk(candidate).device)
            sparing += alike[-1:] + by_bytes[:1]
        return [*dict.fromkeys(sparing)]

    def _may_fit(self, family: list[Placement], rows: int) -> bool:
        """True if one of a family's most sparing candidates fits."""
        for placement in self._most_sparing(family):
            device, host = self._without_disk(placement)
            if not self._holds(device, host - self._tiles.disk_bytes(0)):
                continue  # spares the counting of what each choice of planes on the disk needs
            lacks = any(self._lacks(self._with_tiles(placement).peaks)) or any(
                self._lacks(self._with_tiles(placement, rows, steps=0).peaks)
            )
            if not lacks and self._holds(*self._peaks(placement, rows, steps=1)):
                return True
        return False

    def _lacks(self, peaks: Peaks) -> Peaks:
        """Bytes by which peaks exceed the budget."""
        budget = self._budget
        return Peaks(max(0, peaks.device - budget.device), max(0, peaks.host - budget.host))

    def _least_bytes(self, placement: Placement, rows: int | None = None) -> Peaks:
        """Bytes that a candidate needs before any step; with `rows`, those of a layer as well."""
        return self.once((placement, rows), lambda: self._counted_bytes(placement, rows))

    def _without_disk(self, placement: Placement) -> Peaks:
        """`_least_bytes` if no planes are on a disk, which all choices of such planes share."""
        return self._least_bytes(replace(placement, **_NO_DISK))

    def _counted_bytes(self, placement: Placement, rows: int | None) -> Peaks:
        needs = self._forecasts.needs(self._workload, placement)
        device = self._machine.device_context_bytes + mapping_bytes(sum(needs.host.values()))
        if rows is not None and placement.chunk_tokens is None:
            measured = self._forecasts.measured(self._workload, placement)
            works = measured.layer(0, rows).computed_twice
            device += max(0, max(work.peak_bytes for work in works) - needs.device[UNSUMMED])
        host = self._forecasts.least_host_bytes(self._workload, placement)
        return Peaks(device + sum(needs.device.values()), host)

    def _peaks(self, placement: Placement, rows: int, steps: int) -> Peaks:
        """The peaks of a forecast; a single step is forecast with all tiles on the host."""
        followed = placement
        if steps < STEADY:
            followed = replace(placement, resident=(), **_NO_DISK)
        try:
            forecast = self._of(followed, rows, steps)
        except NotForeseeable:
            if placement.chunk_tokens is None:
                raise
            return Peaks(1 << 62, 1 << 62)  # no forecast of these layers in tiles is possible
        least, least_followed = self._least_bytes(placement), self._least_bytes(followed)
        return Peaks(
            forecast.device_peak_bytes + least.device - least_followed.device,
            forecast.host_peak_bytes + least.host - least_followed.host,
        )

    def _with_tiles(self, placement: Placement, rows: int | None = None, steps: int = 1) -> _Tiled:
        """The placement with those tiles resident for which the host has no room.

        Up to four forecasts each correct the number of tiles for the next one. Without `steps`, or
        without `rows`, nothing is forecast: peaks are `_least_bytes`.
        """
        tiles, budget = self._tiles, self._budget
        count, limit = 0, len(tiles.tiles)
        if steps == STEADY:  # the number of a one-step forecast is nearly right, and quicker found
            count = len(self._with_tiles(placement, rows).placement.resident)
        for _ in range(4):
            moved = replace(placement, resident=tiles.names(count))
            if rows and steps:
                peaks = self._peaks(moved, rows, steps)
            else:
                peaks = self._least_bytes(moved, rows)
            device_suffices = peaks.device <= budget.device
            if not device_suffices:
                limit = max(0, count - 1)
            # Without moved tiles the host's peak would be higher, and the device's lower.
            needed = tiles.fewest(peaks.host + tiles.spared(count) - budget.host)
            with_room = tiles.most(budget.device - (peaks.device - tiles.device_bytes[count]))
            next_count = max(0, min(needed, with_room, limit))
            if next_count == count or (device_suffices and next_count < count):
                break
            count = next_count
        return _Tiled(moved, peaks)

    def _of(self, placement: Placement, rows: int, steps: int = STEADY) -> Forecast:
        return self._forecasts.of(self._machine, placement, self._workload, rows, steps)

    def _fitting_forecasts(self, sizes: list[int]) -> list[Forecast]:
        """Candidates to spend memory from: the first that fit, and more sparing ones."""
        forecasts = self._first_fitting(sizes)
        if not forecasts or not self._thorough:
            return forecasts
        rows = min(forecasts, key=lambda forecast: forecast.seconds).micro_batch
        fitting = {forecast.placement for forecast in forecasts if forecast.micro_batch == rows}
        for family in self._families(rows):
            places = (place for place, candidate in enumerate(family) if candidate in fitting)
            first = min(places, default=len(family))
            sparing = [self._of(family[place], rows) for place in _SPARING if place > first]
            forecasts += [f for f in sparing if self._holds(f.device_peak_bytes, f.host_peak_bytes)]
        return forecasts

    def _first_fitting(self, sizes: list[int]) -> list[Forecast]:
        """The first candidate of each family that fits, for the two largest sizes with any."""

        def of_size(rows: int) -> list[Forecast]:
            firsts = (self._first_of(family, rows) for family in self._families(rows))
            return [*filter(None, firsts)]

        with_any = filter(None, map(of_size, sizes))
        return [*chain.from_iterable(islice(with_any, 2 if self._thorough else 1))]

    def _first_of(self, family: list[Placement], rows: int) -> Forecast | None:
        """The forecast of a family's first candidate that fits; None: none does."""
        for number, candidate in enumerate(family):
            if number == 1 and not self._may_fit(family, rows):  # spares trying all others
                break
            least_fits = self._holds(*self._least_bytes(candidate, rows))
            if least_fits and self._holds(*self._peaks(candidate, rows, steps=1)):
                forecast = self._of(candidate, rows)
                if self._holds(forecast.device_peak_bytes, forecast.host_peak_bytes):
                    return forecast
        return None

    def _holds(self, device: int, host: int) -> bool:
        """True if both memories suffice once tiles that the host cannot hold are resident."""
        fewest = self._tiles.fewest(host - self._budget.host)
        return fewest <= self._tiles.most(self._budget.device - device)

    def _spending(self, forecast: Forecast, passes: int = 1) -> Spending:
        return Spending(self._forecasts, self._workload, forecast, self._budget, passes)

    def _in_passes(self, best: Forecast) -> list[Spending]:
        """Spending in several passes, for each number of passes.

        There is none if the loss needs all micro-batches at once, if layers run over chunks of
        tokens, or if the device cannot hold the fp32 sums of all gradients.
        """
        if isinstance(self._workload.loss, JointLoss) or self._forecasts.spec.balances:
            return []
        if best.placement.chunk_tokens is not None or self._tiles.sums_bytes > self._budget.device:
            return []
        spending, sizes = [], self._sizes
        if self._workload.micro_batch is None:  # small ones, as a pass keeps few graphs at once
            most_rows = _TOKENS_IN_PASSES // self._workload.sequence_length
            sizes = [rows for rows in sizes if rows <= most_rows][:2]
        for rows in sizes:
            micro_batches = -(-self._workload.rows // rows)
            if micro_batches > 1:
                whole_layers, *_ = self._families(rows)
                forecast = self._of(whole_layers[0], rows)  # usually the fastest
                passes = sorted({n for n in _PASSES if n < micro_batches} | {micro_batches})
                spending += [self._spending(forecast, n) for n in passes]
        return spending


def _best_spent(best: Forecast | None, spending: list[Spending], count: int) -> Forecast | None:
    """The fastest of `best` and the `count` likeliest ways; while none fits, more are tried."""
    pairs = [(way, source) for source in spending for way in source.all()]
    for number, (way, source) in enumerate(sorted(pairs, key=lambda pair: pair[0].likely)):
        if best is None or (number < count and way.promises(best)):
            spent = source.spent(way)
            if spent is not None and (best is None or spent.seconds < best.seconds):
                best = spent
    return best


def lacking(machine: Machine, needed: Machine) -> str:
    """The memory that a machine lacks, beside the one that is needed, in one line."""
    least = needed.memories
    return " and ".join(
        f"{size(least[place] - allowed)} of {place} are missing ({size(least[place])} would do, "
        f"{size(allowed)} are allowed)"
        for place, allowed in machine.memories.items()
        if least[place] > allowed
    )
