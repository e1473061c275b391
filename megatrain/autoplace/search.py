"""The fastest placement by forecast that fits, or the least memory with which one would.

A candidate that fits leaves memory to spend (autoplace/candidates.py). The likely seconds of each
way of spending follow from the candidate's forecast; the most promising are forecast in full.
"""

from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from operator import le
from typing import Any

from megatrain.autoplace import candidates
from megatrain.autoplace.candidates import MOST_SLOTS, Budget, Spending
from megatrain.base.units import size
from megatrain.errors import DoesNotFit
from megatrain.forecast.cache import UNSUMMED, ForecastCache
from megatrain.forecast.op_counter import NotForeseeable
from megatrain.forecast.simulate import STEADY, Forecast
from megatrain.forecast.workload import Workload
from megatrain.loss import JointLoss
from megatrain.machine import Machine, mapping_bytes
from megatrain.placement import Placement
from megatrain.telemetry.gpu import most_memory
from megatrain.tile import TileKind

# Candidates of a family. What these leave free on the device may buy more than they cost: layer
# inputs on the host, and fewer slots and smaller chunks besides.
_SPARING = (1, 3)
_TRIED = 3  # ways of spending that are forecast in full
# Numbers of passes that are tried, besides one for each micro-batch; ways forecast in full of them.
_PASSES, _TRIED_IN_PASSES = (2, 3, 4, 6, 8, 12, 16), 2
_FEW = 16384  # tokens of a micro-batch in passes: enough to keep a large GPU busy
_DISK: dict[str, Any] = {"disk_moments": 0, "disk_remainder": 0, "disk_weights": 0}
_SPILLS_TRIED = 3  # of what may be on a disk and likely fits, from the least on
_DEVICE_WORTH = 8  # host bytes that are as hard to come by as one of the device
# Of what is needed: candidates that differ by less are alike, and the fewest micro-batches decide.
_ALIKE = 0.01
# Of the seconds with copies of weights, those with weights that are read in place, at most.
_IN_PLACE = 0.99
# On four H200s steps with owned experts took 1.35 times what is foretold, with cut ones 1.16 times.
_OWNED = 1.2
# Micro-batches: more are looked at only where the device is too small for fewer. The working set of
# a layer hardly counts any more.
_MANY = 24


def fastest(
    forecasts: ForecastCache, machine: Machine, workload: Workload, *, thorough: bool = True
) -> Forecast:
    """The fastest forecast that fits; nothing is on the disk unless nothing fits without.

    If not `thorough`, the first candidate and way are enough. Raises DoesNotFit: nothing fits.
    """
    first, *others = machine.splits()
    fitting, owning = [], workload.may_own and forecasts.can_own(workload)
    for split, owned in product((*others, first), (True, False) if owning else (False,)):
        try:
            own = {"own_experts": True} if owned else {}
            fitting.append(_fastest(forecasts, split, workload, own, thorough=thorough))
        except DoesNotFit:
            if not (machine.one_memory or owned or fitting):
                raise
    if not fitting:  # unless it fits with a part of the memory between these
        needed = least(forecasts, machine, workload)
        if needed.machine.both_bytes > machine.both_bytes:
            raise DoesNotFit(lacking(machine, needed.machine))
        fitting = [needed]
    best = min(fitting, key=lambda it: it.seconds * (_OWNED if it.placement.own_experts else 1))
    if not thorough or workload.ranks > 1:
        return best
    in_place = replace(best.placement, slots=0, prefetch=None)  # which takes no more memory
    other = forecasts.of(best.machine, in_place, workload, best.micro_batch)
    return other if other.seconds < _IN_PLACE * best.seconds else best


def _fastest(
    forecasts: ForecastCache,
    machine: Machine,
    workload: Workload,
    own: dict[str, bool],
    *,
    thorough: bool,
) -> Forecast:
    search = partial(Search, forecasts, machine, workload, thorough=thorough)
    spills = [spill | own for spill in _spills(forecasts, machine, workload)]
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
    """The forecast that lacks least memory; where the host lacks some, all is on the disk.

    Its machine has enough; of one memory, no more than that.
    """
    if not machine.one_memory:
        return _least(forecasts, machine, workload)
    none = Budget(replace(machine, device_memory_bytes=1, host_memory_bytes=1))
    ways = [_least(forecasts, split, workload) for split in machine.splits()]
    needs = [none.raised(way.device_peak_bytes, way.host_peak_bytes) for way in ways]
    best = min(range(len(ways)), key=lambda at: needs[at].both_bytes)
    return replace(ways[best], machine=needs[best])


def _least(forecasts: ForecastCache, machine: Machine, workload: Workload) -> Forecast:
    *_, most = _spills(forecasts, machine, workload)
    forecast = Search(forecasts, machine, workload).least()
    if not most or forecast.machine.host_memory_bytes <= machine.host_memory_bytes:
        return forecast
    return Search(forecasts, machine, workload, most).least()


def could_fit(forecasts: ForecastCache, machine: Machine, workload: Workload) -> bool:
    """True if there likely is a way: with the largest micro-batches, or the smallest."""
    *_, most = _spills(forecasts, machine, workload)
    splits = machine.splits()
    return any(Search(forecasts, split, workload, most).could_fit() for split in splits)


def _spills(forecasts: ForecastCache, machine: Machine, workload: Workload) -> list[dict[str, int]]:
    """Choices of what rests on a disk: nothing, and more and more of what it has room for."""
    space = machine.disk_space_bytes or 0
    if not space:
        return [{}]
    layouts = forecasts.model(workload).layouts

    def count() -> list[tuple[dict[str, Any], int]]:
        """Moments of one tile more each time, then remainders, then weights; their bytes."""
        tiles = sum(t.trainable_numel > 0 for t in layouts)
        layers = sum(t.kind is TileKind.LAYER for t in layouts)
        choices: dict[str, Any] = {}
        ways = []
        for name in _DISK:
            most = layers if name == "disk_weights" else tiles
            ways += [choices | {name: count + 1} for count in range(most)]
            choices |= {name: most}
        placements = (Placement(**way) for way in ways)
        return [*zip(ways, candidates.disk_bytes(layouts, workload, placements), strict=True)]

    spills = forecasts.once(("spills", workload.rule, workload.ranks, workload.dtype), count)
    return [{}, *(choices for choices, num_bytes in spills if num_bytes <= space)]


class Search:
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
        self._forecasts, self._machine, self._workload = forecasts, machine, workload
        self._thorough = thorough
        self._spilled: dict[str, Any] = dict(spilled or {})
        self._budget, self._sizes = Budget(machine), candidates.sizes_of(workload)
        self._tiles = candidates.first_tiles(forecasts, workload, Placement(**self._spilled))

    def best(self) -> Forecast:
        """The fastest forecast, of the largest micro-batches that fit. Raises DoesNotFit."""
        sizes, least = self._sizes, None
        while sizes:
            frames = self._fitting_frames(sizes)
            if (best := self._fastest_of(frames)) is not None:
                return best
            least = least or self.least()
            if not self._budget.fits(least):
                raise DoesNotFit(lacking(self._machine, least.machine))
            smallest = min((frame.micro_batch for frame in frames), default=0)
            sizes = [rows for rows in sizes if rows < smallest]
        return least or self.least()

    def _fastest_of(self, frames: list[Forecast]) -> Forecast | None:
        """The fastest of candidates as they are, with memory left spent, or in several passes."""
        fitting = filter(self._budget.fits, frames)
        best = min(fitting, key=lambda frame: frame.seconds, default=None)
        spending = [self._spending(frame) for frame in frames]
        best = _best_spent(best, spending, _TRIED if self._thorough else 1)
        if best is None or not self._thorough:
            return best
        return _best_spent(best, self._in_passes(best), _TRIED_IN_PASSES)

    def could_fit(self) -> bool:
        """True if there likely is a way: with the largest micro-batches, or the smallest."""
        most, fewest = self._sizes[0], self._sizes[-1]
        # A search without a disk looks at this one anyway.
        fastest = [] if self._spilled else self._families(most)[0][:1]
        return self._may_fit(fastest, most) or any(
            self._may_fit(family, rows)
            for rows in dict.fromkeys((most, fewest))
            for family in self._sparing_families(rows)
        )

    def least(self) -> Forecast:
        """Forecast the placement that lacks least memory, on a machine with the memory it needs.

        Where more host memory or a larger device (that is sold) will do, it does not ask for both.
        A larger micro-batch, or a faster candidate, is taken where it needs hardly more.
        """
        sizes = self._sizes
        few = [rows for rows in sizes if rows * _MANY >= self._workload.rows] or sizes
        number, place, fewest = self._lacking_least(few[-1])
        if fewest[0] > self._budget.device and few[-1] > sizes[-1]:
            few = sizes
            number, place, fewest = self._lacking_least(sizes[-1])
        pairs = zip(self._lacks(*fewest), fewest, strict=True)
        most = [lacks + _ALIKE * peak if lacks else 0 for lacks, peak in pairs]

        def is_alike(placement: Placement, rows: int, *lengths: int) -> bool:
            """True if it lacks hardly more memory, forecast for each of these numbers of steps."""
            peaks = (self._with_tiles(placement, rows, steps)[1] for steps in lengths)
            return all(all(map(le, self._lacks(*each), most)) for each in peaks)

        alike = (
            (candidate, rows)
            for rows in few
            for family in [self._sparing_families(rows)[number]]
            if is_alike(family[place], rows, 0, 1)
            for candidate in family
            if is_alike(candidate, rows, 0, 1, STEADY)
        )
        least, rows = next(alike, (self._sparing_families(few[-1])[number][place], few[-1]))
        placement, peaks = self._with_tiles(least, rows, STEADY)
        needed = map(max, peaks, self._peaks(placement, rows, 1), self._least_bytes(placement))
        return replace(self._of(placement, rows), machine=self._budget.raised(*needed))

    def _lacking_least(self, rows: int) -> tuple[int, int, tuple[int, int]]:
        """The candidate that lacks least memory: its family's index, its index there, its peaks."""
        sparing = [
            (number, family.index(placement), placement)
            for number, family in enumerate(self._sparing_families(rows))
            for placement in self._most_sparing(family)
        ]
        alone = any(self._least_bytes(option)[0] <= self._budget.device for *_, option in sparing)
        most = max(self._budget.device, most_memory())

        def rank(peaks: tuple[int, int]) -> tuple[bool, bool, int]:
            """Lower is better: a device that is sold, not both memories, few bytes."""
            on_device, on_host = self._lacks(*peaks)
            both = alone and on_device > 0 and on_host > 0
            return peaks[0] > most, both, _DEVICE_WORTH * on_device + on_host

        bounds = [rank(self._with_tiles(placement, rows, 0)[1]) for *_, placement in sparing]
        best: tuple[int, int, tuple[int, int]] | None = None
        for at in sorted(range(len(sparing)), key=bounds.__getitem__):
            if best is not None and rank(best[2]) <= bounds[at]:
                break  # the others lack as much before a step is forecast
            number, place, placement = sparing[at]
            peaks = self._with_tiles(placement, rows)[1]
            if best is None or rank(peaks) < rank(best[2]):
                best = number, place, peaks
        assert best is not None
        return best

    def _families(self, rows: int) -> list[list[Placement]]:
        return candidates.families(self._workload, self._spilled, rows)

    def _sparing_families(self, rows: int) -> list[list[Placement]]:
        """The families without their candidates of most slots, which are not the most sparing."""
        return [[c for c in family if c.slots < MOST_SLOTS] for family in self._families(rows)]

    def _most_sparing(self, family: list[Placement]) -> list[Placement]:
        """The last candidate and that of fewest bytes, for layer inputs on either side."""
        sparing = []
        for layer_inputs in ("host", "device"):
            alike = [placement for placement in family if placement.layer_inputs == layer_inputs]
            by_bytes = sorted(alike, key=lambda candidate: self._least_bytes(candidate)[0])
            sparing += alike[-1:] + by_bytes[:1]
        return [*dict.fromkeys(sparing)]

    def _may_fit(self, family: list[Placement], rows: int) -> bool:
        """True if one of a family's most sparing candidates has room."""
        return any(
            not any(self._lacks(*self._with_tiles(placement)[1]))
            and not any(self._lacks(*self._with_tiles(placement, rows, 0)[1]))
            and self._holds(*self._peaks(placement, rows, 1))
            for placement in self._most_sparing(family)
        )

    def _lacks(self, device: int, host: int) -> tuple[int, int]:
        return max(0, device - self._budget.device), max(0, host - self._budget.host)

    def _least_bytes(self, placement: Placement, rows: int | None = None) -> tuple[int, int]:
        """Bytes without which a candidate cannot be; with `rows`, a layer's memory is counted."""
        needs = self._forecasts.needs(self._workload, placement)
        device = self._machine.device_context_bytes + mapping_bytes(sum(needs.host.values()))
        if rows is not None and placement.chunk_tokens is None:
            measured = self._forecasts.measured(self._workload, placement)
            works = measured.layer(0, rows).computed_twice
            device += max(0, max(work.peak_bytes for work in works) - needs.device[UNSUMMED])
        host = self._forecasts.least_host_bytes(self._machine, self._workload, placement)
        return device + sum(needs.device.values()), host

    def _peaks(self, placement: Placement, rows: int, steps: int) -> tuple[int, int]:
        """Bytes on device and host at the peak; one step is followed with all tiles on the host."""
        alike = placement
        if steps < STEADY:
            alike = replace(placement, resident=(), **_DISK)
        try:
            frame = self._of(alike, rows, steps)
        except NotForeseeable:
            if placement.chunk_tokens is None:
                raise
            return 1 << 62, 1 << 62  # these layers cannot be foreseen in tiles
        (device, host), less = self._least_bytes(placement), self._least_bytes(alike)
        device += frame.device_peak_bytes - less[0]
        return device, frame.host_peak_bytes + host - less[1]

    def _with_tiles(
        self, placement: Placement, rows: int | None = None, steps: int = 1
    ) -> tuple[Placement, tuple[int, int]]:
        """The placement with as many tiles on the device as the host lacks room for; its peaks.

        Each of up to four forecasts tells the number for the next one. With no `steps`, or `rows`,
        bytes are counted and not forecast: see `_least_bytes`.
        """
        tiles, budget, count, most = self._tiles, self._budget, 0, len(self._tiles.tiles)
        if steps == STEADY:  # many fewer long forecasts: one step tells nearly as many tiles
            count = len(self._with_tiles(placement, rows)[0].resident)
        for _ in range(4):
            moved = replace(placement, resident=tiles.names(count))
            if rows and steps:
                device, host = peaks = self._peaks(moved, rows, steps)
            else:
                device, host = peaks = self._least_bytes(moved, rows)
            fits = device <= budget.device
            most = most if fits else max(0, count - 1)
            wanted = tiles.fewest(host + tiles.host_bytes[count] - budget.host)
            room = tiles.most(budget.device - (device - tiles.device_bytes[count]))
            following = max(0, min(wanted, room, most))
            if following == count or (fits and following < count):
                break
            count = following
        return moved, peaks

    def _of(self, placement: Placement, rows: int, steps: int = STEADY) -> Forecast:
        return self._forecasts.of(self._machine, placement, self._workload, rows, steps)

    def _fitting_frames(self, sizes: list[int]) -> list[Forecast]:
        """Candidates that fit, of the two largest micro-batches that do, and more sparing ones."""
        frames = self._first_fitting(sizes)
        if not frames or not self._thorough:
            return frames
        best = min(frames, key=lambda frame: frame.seconds)
        rows = best.micro_batch
        placements = {frame.placement for frame in frames if frame.micro_batch == rows}
        for family in self._families(rows):
            first = next((n for n, each in enumerate(family) if each in placements), len(family))
            sparing = [self._of(family[n], rows) for n in _SPARING if n > first]
            frames += filter(self._fits_moved, sparing)
        return frames

    def _first_fitting(self, sizes: list[int]) -> list[Forecast]:
        """Of every family the first candidate that fits; of the two largest sizes."""
        frames: list[Forecast] = []
        wanted = 2 if self._thorough else 1
        for rows in sizes:
            firsts = (self._first_of(family, rows) for family in self._families(rows))
            fitting = [*filter(None, firsts)]
            frames += fitting
            wanted -= bool(fitting)
            if not wanted:
                break
        return frames

    def _first_of(self, family: list[Placement], rows: int) -> Forecast | None:
        """The forecast of the first candidate that fits; None: none does.

        If the first one does not fit, the others are tried only if one of them may.
        """
        for number, candidate in enumerate(family):
            if number == 1 and not self._may_fit(family, rows):
                break
            least_fits = self._holds(*self._least_bytes(candidate, rows))
            if least_fits and self._holds(*self._peaks(candidate, rows, steps=1)):
                frame = self._of(candidate, rows)
                if self._fits_moved(frame):
                    return frame
        return None

    def _fits_moved(self, frame: Forecast) -> bool:
        return self._holds(frame.device_peak_bytes, frame.host_peak_bytes)

    def _holds(self, device: int, host: int) -> bool:
        """True if there is room once tiles that the host lacks it for have moved to the device."""
        fewest = self._tiles.fewest(host - self._budget.host)
        return fewest <= self._tiles.most(self._budget.device - device)

    def _spending(self, frame: Forecast, passes: int = 1) -> Spending:
        return Spending(self._forecasts, self._workload, frame, self._budget, passes)

    def _in_passes(self, best: Forecast) -> list[Spending]:
        """Ways to take a step in several passes.

        There are none if the loss needs all micro-batches at once, if layers run over chunks of
        tokens, or if the device has no room for the fp32 sums of all gradients.
        """
        if isinstance(self._workload.loss, JointLoss) or self._forecasts.spec.balances:
            return []
        if best.placement.chunk_tokens is not None or self._tiles.sums_bytes > self._budget.device:
            return []
        spending, sizes = [], self._sizes
        if self._workload.micro_batch is None:  # small ones: a pass is to keep few graphs at once
            sizes = [rows for rows in sizes if rows * self._workload.sequence_length <= _FEW][:2]
        for rows in sizes:
            micro_batches = -(-self._workload.rows // rows)
            if micro_batches > 1:
                frame = self._of(self._families(rows)[0][0], rows)  # usually the fastest
                passes = sorted({n for n in _PASSES if n < micro_batches} | {micro_batches})
                spending += [self._spending(frame, n) for n in passes]
        return spending


def _best_spent(best: Forecast | None, spending: list[Spending], tried: int) -> Forecast | None:
    """The fastest of `best` and `tried` promising ways; while there is no best, all are tried."""
    pairs = [(way, frame) for frame in spending for way in frame.all()]
    for number, (way, frame) in enumerate(sorted(pairs, key=lambda pair: pair[0].likely)):
        if best is None or (number < tried and way.promises(best)):
            spent = frame.spent(way)
            if spent is not None and (best is None or spent.seconds < best.seconds):
                best = spent
    return best


def lacking(machine: Machine, needed: Machine) -> str:
    """The memory that a machine lacks, beside the one that is needed, in one line."""
    least = needed.memories
    return " and ".join(
        f"{size(least[place] - most)} of {place} are missing ({size(least[place])} would do, "
        f"{size(most)} are allowed)"
        for place, most in machine.memories.items()
        if least[place] > most
    )
