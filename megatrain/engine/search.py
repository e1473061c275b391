"""The search for a placement: the fastest by forecast among those that fit.

First the frame: rows of a micro-batch, slots, where boundaries wait, tokens of a head chunk, with
nothing resident and nothing kept. A frame that fits leaves memory to spend on tiles that rest on
the device and on kept graphs. What each way of spending could bring at best is known from the
frame's forecast (engine/ways.py). The most promising are forecast in full.
"""

from typing import Any

from megatrain.engine.budget import Needs
from megatrain.engine.forecast import PROCESS_BYTES, Forecast
from megatrain.engine.forecasts import Forecasts, Task
from megatrain.engine.ways import Budget, Ways
from megatrain.errors import DoesNotFit
from megatrain.machine import Machine
from megatrain.placement import Placement
from megatrain.units import gib

# Frames from the fastest to the most frugal.
_FRAMES: tuple[dict[str, Any], ...] = (
    {"slots": 3, "head_tokens": 8192},
    {"slots": 3, "head_tokens": 8192, "boundaries": "host"},
    {"slots": 2, "head_tokens": 2048},
    {"slots": 2, "head_tokens": 2048, "boundaries": "host"},
    {"slots": 2, "head_tokens": 512, "gradient_lanes": 2, "keep_rows": False},
    {
        "slots": 2,
        "head_tokens": 512,
        "gradient_lanes": 2,
        "keep_rows": False,
        "boundaries": "host",
        "boundary_lanes": 2,
    },
)
# What these leave free on the device may buy more than they cost: boundaries on the host, and
# fewer slots and smaller chunks besides.
_SPARING = (1, 3)
# They take the least of the device's memory, and of the host's.
_FRUGAL = (5, 4)

# Tokens of a micro-batch, at most. With the largest no overhead of a call counts any more.
_TOKENS = (49152, 32768, 16384, 8192, 4096, 2048, 1)

_TRIED = 5  # ways of spending that are forecast in full


class Search:
    """Finds the placement of a task on a machine, whose memory sizes are the budgets."""

    def __init__(
        self, forecasts: Forecasts, machine: Machine, task: Task, *, thorough: bool = True
    ) -> None:
        """Args: not `thorough`, it stops at the first frame and its most promising way."""
        self._forecasts, self._machine, self._task = forecasts, machine, task
        self._thorough = thorough
        self._budget = Budget(machine)
        self._needs: dict[int, Needs] = {}

    def best(self) -> Forecast:
        """The fastest forecast that fits. Raises DoesNotFit."""
        frames = self._frames()
        spending = [Ways(self._forecasts, self._task, frame, self._budget) for frame in frames]
        found = [(way, ways) for ways in spending for way in ways.all()]
        fitting = [frame for frame in frames if self._budget.fits(frame)]
        best = min(fitting, key=lambda frame: frame.seconds, default=None)
        tried = _TRIED if self._thorough else 1
        for way, ways in sorted(found, key=lambda pair: pair[0].seconds)[:tried]:
            if best is not None and way.seconds >= best.seconds:
                break
            spent = ways.spent(way)
            if spent is not None and (best is None or spent.seconds < best.seconds):
                best = spent
        if best is None:
            raise DoesNotFit(self._lacking())
        return best

    def could_fit(self) -> bool:
        """Whether anything fits; quicker to tell than what is fastest."""
        return any(self._first_fitting(rows) for rows in self._sizes())

    def _frames(self) -> list[Forecast]:
        """Frames that fit, of the two largest micro-batches that do, and more sparing ones."""
        found: list[Forecast] = []
        for rows in self._sizes():
            found += self._first_fitting(rows)
            if len(found) == (2 if self._thorough else 1):
                break
        if not found:
            raise DoesNotFit(self._lacking())
        best = min(found, key=lambda frame: frame.seconds)
        if self._thorough and best.placement == self._placement(0):
            sparing = (self._frame(number, best.micro_batch) for number in _SPARING)
            found += [frame for frame in sparing if self._holds(frame)]
        return found

    def _first_fitting(self, rows: int) -> list[Forecast]:
        hopeful = (number for number in range(len(_FRAMES)) if self._hopeful(number, rows))
        frames = (self._frame(number, rows) for number in hopeful)
        return next(([frame] for frame in frames if self._holds(frame)), [])

    def _holds(self, found: Forecast) -> bool:
        return self._budget.holds(found.device_peak_bytes, found.host_peak_bytes)

    def _hopeful(self, number: int, rows: int) -> bool:
        """Whether a frame can fit at all, told without a forecast."""
        return self._budget.holds(*self._floor(number, rows))

    def _floor(self, number: int, rows: int) -> tuple[int, int]:
        """Bytes on device and host without which a frame cannot be."""
        if number not in self._needs:
            self._needs[number] = self._forecasts.question(self._task).needs(
                self._placement(number)
            )
        needs = self._needs[number]
        work = self._forecasts.measured(self._task, self._placement(number).tile_tokens)
        working = max(each.peak_bytes for each in work.layer(0, rows).computed_twice)
        device = sum(needs.device.values()) + working + self._machine.device_context_bytes
        return device, sum(needs.host.values()) + PROCESS_BYTES

    def _frame(self, number: int, rows: int) -> Forecast:
        return self._forecasts.of(self._machine, self._placement(number), self._task, rows)

    def _placement(self, number: int) -> Placement:
        return Placement(**_FRAMES[number], compile=self._task.compile)

    def _sizes(self) -> list[int]:
        """Rows that a micro-batch may have, largest first."""
        task = self._task
        if task.micro_batch is not None:
            return [task.micro_batch]
        most = (max(1, tokens // task.sequence_length) for tokens in _TOKENS)
        # As few micro-batches as hold all rows, and as even as they can be.
        return sorted({-(-task.rows // -(-task.rows // rows)) for rows in most}, reverse=True)

    def least(self) -> list[Forecast]:
        """The most frugal ways there are, each on a machine with just the memory it needs.

        One takes least of the device's, the other least of the host's; with the largest
        micro-batches that the device holds, or else the smallest.
        """
        return [self._budget.just(frame) for frame in self._frugal()]

    def _frugal(self) -> list[Forecast]:
        sizes, there = self._sizes(), self._budget.device
        hopeful = [rows for rows in sizes if self._floor(_FRUGAL[0], rows)[0] <= there]
        frames: list[Forecast] = []
        for rows in hopeful or sizes[-1:]:
            frames = [self._frame(number, rows) for number in _FRUGAL]
            if any(self._budget.spare(frame) >= 0 for frame in frames):
                break
        return frames

    def _lacking(self) -> str:
        """What the most frugal frame lacks."""
        machine, least = self._machine, self.least()[0].machine
        host = f"{gib(least.host_memory_bytes)} of host memory"
        allowed = gib(machine.host_memory_bytes)
        if least.device_memory_bytes <= machine.device_memory_bytes:
            return f"it needs at least {host}; {allowed} are allowed"
        return (
            f"it needs at least {gib(least.device_memory_bytes)} of device memory and {host}; "
            f"{gib(machine.device_memory_bytes)} and {allowed} are allowed"
        )
