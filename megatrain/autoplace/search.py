"""The search for a placement: the fastest by forecast among those that fit.

First the candidate (autoplace/candidates.py). One that fits leaves memory to spend on tiles that
rest on the device and on kept graphs. What each way of spending could bring at best is known from
the candidate's forecast (autoplace/spend.py). The most promising are forecast in full.
"""

from collections.abc import Iterator, Mapping
from itertools import islice

from megatrain.autoplace.candidates import MOST_SLOTS, Candidates
from megatrain.autoplace.min_memory import MinMemory
from megatrain.autoplace.spend import Budget, MemoryPlans
from megatrain.base.units import gib, size
from megatrain.errors import DoesNotFit
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.loss import JointLoss
from megatrain.machine import Machine
from megatrain.placement import Placement

# Candidates of a family. What these leave free on the device may buy more than they cost:
# boundaries on the host, and fewer slots and smaller chunks besides.
_SPARING = (1, 3)

_TRIED = 3  # ways of spending that are forecast in full
# Numbers of passes that are tried, besides one for each micro-batch; ways forecast in full of them.
_PASSES, _TRIED_IN_PASSES = (2, 3, 4, 6, 8, 12, 16), 2
_MANY = 12  # micro-batches from which on a forecast takes so long that little is tried


class Search:
    """Finds the placement of a workload on a machine, whose memory sizes are the budgets."""

    def __init__(
        self,
        forecasts: ForecastCache,
        machine: Machine,
        workload: Workload,
        *,
        thorough: bool = True,
        spilled: Mapping[str, int] | None = None,
    ) -> None:
        """Take a workload and a machine.

        Args:
            thorough: if not, the search stops at the first candidate and its most promising way.
            spilled: choices of what rests on a disk (autoplace/spill.py); None: nothing.
        """
        self._forecasts, self._workload = forecasts, workload
        self._thorough = thorough
        self._candidates = Candidates(forecasts, machine, workload, spilled or {})
        self._budget = Budget(machine)
        self._tiles = self._candidates.tiles
        self._min_memory = MinMemory(self._candidates, self._budget)

    def best(self) -> Forecast:
        """The fastest forecast that fits. Raises DoesNotFit."""
        sizes, least = self._candidates.sizes(), None
        while sizes:
            candidates = self._fitting_frames(sizes)
            best = self._fastest(candidates)
            if best is not None:
                return best
            least = least or self.least()
            if not self._budget.fits(least):
                raise DoesNotFit(_lacking(self._budget.machine, least.machine))
            tried = min((candidate.micro_batch for candidate in candidates), default=0)
            sizes = [rows for rows in sizes if rows < tried]
        return least or self.least()

    def _fastest(self, candidates: list[Forecast]) -> Forecast | None:
        """The fastest forecast of a way to spend what the candidates leave; None: nothing fits."""
        spending = [self._plans(candidate) for candidate in candidates]
        fitting = [candidate for candidate in candidates if self._budget.fits(candidate)]
        best = min(fitting, key=lambda candidate: candidate.seconds, default=None)
        many = all(self._many(candidate.micro_batch) for candidate in candidates)
        tried = 1 if many or not self._thorough else _TRIED
        best = _best_spent(best, spending, tried)
        if best is None or not self._thorough:
            return best
        return _best_spent(best, self._in_passes(best), min(tried, _TRIED_IN_PASSES))

    def _plans(self, candidate: Forecast, passes: int = 1) -> MemoryPlans:
        return MemoryPlans(self._forecasts, self._workload, candidate, self._budget, passes)

    def _in_passes(self, best: Forecast) -> list[MemoryPlans]:
        """Ways that take a step of small micro-batches in several passes.

        They start from the candidate with most overlap; none, where `best` runs rows in chunks of
        tokens, the device has no room for the sums of all gradients, or the loss sees all tokens
        at once.
        """
        if isinstance(self._workload.loss, JointLoss) or self._forecasts.spec.routed:
            return []
        if best.placement.chunk_tokens is not None or self._tiles.sums_bytes > self._budget.device:
            return []
        found = []
        for rows in self._candidates.sizes_in_passes():
            placement = self._candidates.families(rows)[0][0]
            count = -(-self._workload.rows // rows)
            if not placement.keep_rows or placement.max_stream_bytes is not None or count == 1:
                continue
            candidate = self._candidates.of(placement, rows)
            passes = sorted({n for n in _PASSES if n < count} | {count})
            found += [self._plans(candidate, n) for n in passes]
        return found

    def could_fit(self) -> bool:
        """Whether there likely is a way; quicker to tell than what is fastest."""
        return self._min_memory.could_fit()

    def host_is_short(self) -> bool:
        """Whether the host surely lacks memory; quicker to tell than what lacks least."""
        return self._min_memory.host_is_short()

    def least(self) -> Forecast:
        """What lacks least, on the machine with the memory that it lacks besides."""
        return self._min_memory.least()

    def _fitting_frames(self, sizes: list[int]) -> list[Forecast]:
        """Candidates that fit, of the two largest micro-batches that do, and more sparing ones."""
        found = self._found(sizes, split=False)
        # Where memory is short, a head in ranges may leave room for what is worth more.
        short = all(candidate.placement.slots < MOST_SLOTS for candidate in found)
        if not found or short:
            least = min((candidate.micro_batch for candidate in found), default=0)
            found += self._found([rows for rows in sizes if rows >= least], split=True)
        if not found:
            return []
        best = min(found, key=lambda candidate: candidate.seconds)
        if self._thorough and not self._many(best.micro_batch):
            rows = best.micro_batch
            sparing = (self._candidates.of(each, rows) for each in self._sparing(found, best))
            found += [candidate for candidate in sparing if self._holds(candidate)]
        return found

    def _sparing(self, found: list[Forecast], best: Forecast) -> Iterator[Placement]:
        """Placements of each family that spare more than the first one that was found."""
        there = {
            candidate.placement for candidate in found if candidate.micro_batch == best.micro_batch
        }
        split = best.placement.max_stream_bytes
        families = self._candidates.families(best.micro_batch, split=split is not None)
        for family in families:
            first = next((n for n, each in enumerate(family) if each in there), len(family))
            yield from (family[n] for n in _SPARING if n > first and family[n] not in there)

    def _found(self, sizes: list[int], *, split: bool) -> list[Forecast]:
        found: list[Forecast] = []
        wanted = 2 if self._thorough else 1
        for rows in sizes:
            families = self._candidates.families(rows, split=split)
            fitting = [f for family in families for f in self._first_fitting(family, rows)]
            found += fitting
            wanted -= bool(fitting)
            if not wanted or (found and self._many(rows)):
                break
        return found

    def _many(self, rows: int) -> bool:
        return -(-self._workload.rows // rows) >= _MANY

    def _first_fitting(self, family: list[Placement], rows: int) -> list[Forecast]:
        hopeful = (each for each in family if self._min_memory.hopeful(each, rows))
        fitting = filter(self._holds, (self._candidates.of(each, rows) for each in hopeful))
        return [*islice(fitting, 1)]

    def _holds(self, found: Forecast) -> bool:
        """Whether there is room, if tiles that the host lacks it for move to the device."""
        most = self._tiles.most(self._budget.spare(found))
        return self._tiles.fewest(-self._budget.host_spare(found)) <= most


def _best_spent(best: Forecast | None, spending: list[MemoryPlans], tried: int) -> Forecast | None:
    """The fastest of `best` and the most promising ways; more are tried while nothing fits."""
    found = [(plan, plans) for plans in spending for plan in plans.all()]
    for number, (plan, plans) in enumerate(sorted(found, key=lambda pair: pair[0].likely)):
        if best is not None and (number >= tried or not plan.promises(best)):
            continue
        spent = plans.spent(plan)
        if spent is not None and (best is None or spent.seconds < best.seconds):
            best = spent
    return best


def _lacking(there: Machine, least: Machine) -> str:
    """What the most sparing way lacks."""
    kinds = [
        (needed, of, allowed)
        for of, needed, allowed in (
            ("device", least.device_memory_bytes, there.device_memory_bytes),
            ("host", least.host_memory_bytes, there.host_memory_bytes),
        )
        if needed > allowed
    ]
    needed = " and ".join(f"{size(needed)} of {of} memory" for needed, of, _ in kinds)
    allowed = " and ".join(gib(allowed) for *_, allowed in kinds)
    return f"it needs at least {needed}; {allowed} are allowed"
