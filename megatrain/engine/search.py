"""The search for a placement: the fastest by forecast among those that fit.

First the frame: rows of a micro-batch, slots, where boundaries wait, tokens of a head chunk, with
nothing resident and nothing kept. A frame that fits leaves memory to spend on tiles that rest on
the device and on kept graphs. What each way of spending could bring at best is known from the
frame's forecast (engine/ways.py). The most promising are forecast in full.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from megatrain.engine.budget import UNSUMMED, Needs
from megatrain.engine.forecast import PROCESS_BYTES, Forecast
from megatrain.engine.forecasts import Forecasts, Task
from megatrain.engine.portion import least_split
from megatrain.engine.tally import NotForeseeable, Work
from megatrain.engine.ways import Budget, Ways, resident_bytes
from megatrain.errors import DoesNotFit
from megatrain.machine import Machine
from megatrain.placement import Placement
from megatrain.units import GIB, gib

# Frames from the fastest to the most frugal.
_FRAMES: tuple[dict[str, Any], ...] = (
    {"slots": 3, "head_tokens": 8192},
    {"slots": 3, "head_tokens": 8192, "boundaries": "host"},
    {"slots": 2, "head_tokens": 2048},
    {"slots": 2, "head_tokens": 2048, "boundaries": "host"},
    {"slots": 2, "head_tokens": 2048, "boundaries": "host", "boundary_lanes": 2},
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
_FRUGAL = (6, 5)

_PORTION = GIB  # what layers that must be split are streamed in, if they can; a head in no more

# From so many tokens a row on, layers may run in tiles, with attention's results kept: it grows
# with the square of a row, so what computing a tile again costs is soon less than its. A boundary
# is large then, and leaves in less time than a layer takes: frames with few slots take half the
# lanes.
_LONG, _TILE = 16384, 8192
_ATTENTION: tuple[Literal["device", "host", "none"], ...] = ("device", "host", "none")

# Tokens of a micro-batch, at most. With the largest no overhead of a call counts any more; the
# small ones are for rows shorter than they are.
_TOKENS = (49152, *(2**power for power in range(15, -1, -1)))

_TRIED = 5  # ways of spending that are forecast in full
_CHUNKS = 64  # of a micro-batch in the head, at most: forecasts count each operation
_MANY = 12  # micro-batches from which on a forecast takes so long that little is tried


class Search:
    """Finds the placement of a task on a machine, whose memory sizes are the budgets."""

    def __init__(
        self, forecasts: Forecasts, machine: Machine, task: Task, *, thorough: bool = True
    ) -> None:
        """Args: not `thorough`, it stops at the first frame and its most promising way."""
        self._forecasts, self._machine, self._task = forecasts, machine, task
        self._thorough = thorough
        self._budget = Budget(machine)
        self._needs: dict[Placement, Needs] = {}

    def best(self) -> Forecast:
        """The fastest forecast that fits. Raises DoesNotFit."""
        sizes = self._sizes()
        while sizes:
            frames = self._frames(sizes)
            best = self._fastest(frames)
            if best is not None:
                return best
            least = min((frame.micro_batch for frame in frames), default=0)
            sizes = [rows for rows in sizes if rows < least]
        raise DoesNotFit(self._lacking())

    def _fastest(self, frames: list[Forecast]) -> Forecast | None:
        """The fastest forecast of a way to spend what the frames leave; None: nothing fits."""
        spending = [
            Ways(self._forecasts, self._task, frame, self._budget)
            for frame in frames
            if self._whole(frame.placement.split_bytes)
        ]
        found = [(way, ways) for ways in spending for way in ways.all()]
        fitting = [frame for frame in frames if self._budget.fits(frame)]
        best = min(fitting, key=lambda frame: frame.seconds, default=None)
        many = all(self._many(frame.micro_batch) for frame in frames)
        tried = 1 if many or not self._thorough else _TRIED
        ranked = sorted(found, key=lambda pair: pair[0].likely)
        for number, (way, ways) in enumerate(ranked):
            if best is not None and (number >= tried or way.seconds >= best.seconds):
                continue
            spent = ways.spent(way)
            if spent is not None and (best is None or spent.seconds < best.seconds):
                best = spent
        return best

    def could_fit(self) -> bool:
        """Whether anything fits; quicker to tell than what is fastest."""
        return any(
            self._first_fitting(family, rows)
            for split in (False, True)
            for rows in self._sizes()
            for family in self._families(rows, split=split)
        )

    def _families(self, rows: int, *, split: bool = False) -> list[list[Placement]]:
        """Frames, from the fastest to the most frugal: of whole layers; for long rows, in tiles.

        With `split`, the same with the head in portions; or if layers are so large, too, the most
        frugal one with both. They are for when memory is short.
        """
        portions = self._portions() if split else None
        if split and portions is None:
            return []
        least = -(-rows * self._task.sequence_length // _CHUNKS)
        frames = [Placement(**frame, compile=self._task.compile) for frame in _FRAMES]
        whole = [
            replace(f, head_tokens=max(least, f.head_tokens), split_bytes=portions) for f in frames
        ]
        long = self._task.sequence_length >= _LONG
        if long:
            most = whole[0].slots
            lanes = [f.boundary_lanes // (1 if f.slots == most else 2) for f in whole]
            whole = [replace(f, boundary_lanes=n) for f, n in zip(whole, lanes, strict=True)]
        if not self._whole(portions):
            return [whole[-1:]]
        if not long:
            return [whole]
        tiled = [
            [replace(frame, tile_tokens=_TILE, keep_attention=where) for frame in whole]
            for where in _ATTENTION
        ]
        return [whole, *tiled]

    def _frames(self, sizes: list[int]) -> list[Forecast]:
        """Frames that fit, of the two largest micro-batches that do, and more sparing ones."""
        found = self._found(sizes, split=False)
        # Where memory is short, a head in ranges may leave room for what is worth more.
        short = all(frame.placement.slots < _FRAMES[0]["slots"] for frame in found)
        if not found or (short and self._whole(self._portions())):
            found += self._found(sizes, split=True)
        if not found:
            return []
        best = min(found, key=lambda frame: frame.seconds)
        if self._thorough and not self._many(best.micro_batch):
            sparing = (self._frame(each, best.micro_batch) for each in self._sparing(found, best))
            found += [frame for frame in sparing if self._holds(frame)]
        return found

    def _sparing(self, found: list[Forecast], best: Forecast) -> Iterator[Placement]:
        """Of each family those that spare more than the first that was found."""
        there = {frame.placement for frame in found if frame.micro_batch == best.micro_batch}
        split = best.placement.split_bytes
        families = self._families(best.micro_batch, split=split is not None)
        for family in families if self._whole(split) else ():
            first = next((n for n, each in enumerate(family) if each in there), len(family))
            yield from (family[n] for n in _SPARING if n > first and family[n] not in there)

    def _found(self, sizes: list[int], *, split: bool) -> list[Forecast]:
        found: list[Forecast] = []
        wanted = 2 if self._thorough else 1
        for rows in sizes:
            families = self._families(rows, split=split)
            fitting = [f for family in families for f in self._first_fitting(family, rows)]
            found += fitting
            wanted -= bool(fitting)
            if not wanted or (found and self._many(rows)):
                break
        return found

    def _portions(self) -> int | None:
        """Bytes of the portions that layers and head can be streamed in; None: none is so large."""
        layouts, itemsize = self._forecasts.layouts, self._task.dtype.itemsize
        head = next(t.numel for t in layouts if t.name == "head") * itemsize
        least = least_split(self._forecasts.outline, layouts, itemsize)
        portions = max(least, min(_PORTION, self._layer_bytes))
        return portions if portions < max(self._layer_bytes, head) else None

    @cached_property
    def _layer_bytes(self) -> int:
        """Of the largest layer."""
        layers = [t.numel for t in self._forecasts.layouts if t.name.startswith("layer")]
        return max(layers) * self._task.dtype.itemsize

    def _whole(self, split_bytes: int | None) -> bool:
        """Whether no layer is split."""
        return split_bytes is None or split_bytes >= self._layer_bytes

    def _many(self, rows: int) -> bool:
        return -(-self._task.rows // rows) >= _MANY

    def _first_fitting(self, family: list[Placement], rows: int) -> list[Forecast]:
        try:
            return self._fitting(family, rows)
        except NotForeseeable:
            if family[0].tile_tokens is None:
                raise
            return []  # these layers cannot be foreseen in tiles

    def _fitting(self, family: list[Placement], rows: int) -> list[Forecast]:
        """The first frame that fits, after those that may."""
        found = []
        for placement in family:
            if not self._hopeful(placement, rows):
                continue
            frame = self._frame(placement, rows)
            if self._holds(frame):
                found.append(frame)
            if self._surely_holds(frame):
                break
        return found

    def _surely_holds(self, found: Forecast) -> bool:
        """Whether it holds though only whole tiles move to the device: up to one too much."""
        short = self._budget.host_spare(found) < 0
        largest = max(layout.numel for layout in self._forecasts.layouts)
        more = short * largest * resident_bytes(self._task.precision)
        return self._budget.holds(found.device_peak_bytes + more, found.host_peak_bytes)

    def _holds(self, found: Forecast) -> bool:
        return self._budget.holds(found.device_peak_bytes, found.host_peak_bytes)

    def _hopeful(self, placement: Placement, rows: int) -> bool:
        """Whether a frame can fit at all, told without a forecast; what is quick to tell first."""
        holds = self._budget.holds
        return holds(*self._lasting(placement)) and holds(*self._floor(placement, rows))

    def _floor(self, placement: Placement, rows: int) -> tuple[int, int]:
        """Bytes on device and host without which a frame cannot be."""
        device, host = self._lasting(placement)
        # Gradients that are not summed yet are among what is worked with.
        unsummed = self._needed(placement).device[UNSUMMED]
        return device + max(0, self._working_bytes(placement, rows) - unsummed), host

    def _lasting(self, placement: Placement) -> tuple[int, int]:
        """The same, but for what a layer or the head computes with."""
        needs = self._needed(placement)
        device = sum(needs.device.values()) + self._machine.device_context_bytes
        return device, sum(needs.host.values()) + PROCESS_BYTES

    def _needed(self, placement: Placement) -> Needs:
        same = replace(placement, head_tokens=1)  # no buffer depends on them
        if same not in self._needs:
            self._needs[same] = self._forecasts.question(self._task).needs(placement)
        return self._needs[same]

    def _working_bytes(self, placement: Placement, rows: int) -> int:
        """What a layer or the head computes with, and one activation of every token."""
        measured = self._forecasts.measured(self._task, placement.tile_tokens)
        layout = next(each for each in self._forecasts.layouts if each.name == "head")
        chunk = min(rows, -(-placement.head_tokens // self._task.sequence_length))
        for visit in range(len(self._forecasts.outline.layers)):
            measured.layer(visit, chunk)  # whose results the head is given
        works: list[Work] = []
        if placement.split_bytes is None:
            works.append(measured.head(layout, chunk, placement.head_tokens))
        if self._whole(placement.split_bytes):
            works += measured.layer(0, rows).computed_twice
        working = max((work.peak_bytes for work in works), default=0)
        entering = measured.entering(rows).values()
        return working + sum(s.empty("meta").nbytes for s in entering) * self._task.rows // rows

    def _frame(self, placement: Placement, rows: int) -> Forecast:
        return self._forecasts.of(self._machine, placement, self._task, rows)

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
        ways = {rows: self._sparest(rows) for rows in sizes}
        hopeful = [rows for rows in sizes if self._floor(ways[rows][0], rows)[0] <= there]
        frames: list[Forecast] = []
        for rows in hopeful or sizes[-1:]:
            frames = [self._frame(placement, rows) for placement in ways[rows]]
            if any(self._budget.spare(frame) >= 0 for frame in frames):
                break
        return frames

    def _sparest(self, rows: int) -> list[Placement]:
        """What takes the least of the device's memory, and of the host's."""
        least, other = (self._families(rows)[-1][number] for number in _FRUGAL)
        split = [family[-1] for family in self._families(rows, split=True)[:1]]
        return [min([least, *split], key=lambda way: self._floor(way, rows)[0]), other]

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
