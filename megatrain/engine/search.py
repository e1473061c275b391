"""The search for a placement: the fastest by forecast among those that fit.

First the frame: rows of a micro-batch, slots, where boundaries wait, tokens of a head chunk, with
nothing resident and nothing kept. A frame that fits leaves memory to spend on tiles that rest on
the device and on kept graphs. What each way of spending could bring at best is known from the
frame's forecast: no resource does less work than it must. The most promising are forecast in full.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import torch

from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT, UPDATE
from megatrain.engine.assemble import tile_layouts
from megatrain.engine.costs import MachineCosts
from megatrain.engine.forecast import Forecast, forecast
from megatrain.engine.measure import Measured
from megatrain.engine.tally import Tally
from megatrain.errors import DoesNotFit
from megatrain.machine import Machine
from megatrain.model.outline import Outline
from megatrain.optim import AdamW, StreamedOptimizer
from megatrain.placement import Placement
from megatrain.tile import TileLayout
from megatrain.units import gib

# Of a budget; the rest is for what forecasts are wrong by (3 %) and for fragmentation.
_USED = 0.95

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

# Tokens of a micro-batch, at most. With the largest no overhead of a call counts any more.
_TOKENS = (49152, 32768, 16384, 8192, 4096, 2048, 1)

_FEW = 12  # micro-batches of a step that is forecast quickly
_TRIED = 5  # ways of spending that are forecast in full


@dataclass(frozen=True)
class Task:
    """What is to be trained how; `micro_batch` None: to be chosen."""

    tokens_per_step: int
    sequence_length: int
    micro_batch: int | None
    clip: bool
    precision: Literal["bf16", "fp32"]
    compile: bool

    @property
    def rows(self) -> int:
        return max(1, self.tokens_per_step // self.sequence_length)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


class Forecasts:
    """Forecasts of one model, each made once."""

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self._measured: dict[tuple, Measured] = {}
        self._made: dict[tuple, Forecast] = {}

    @property
    def layouts(self) -> list[TileLayout]:
        """The model's tiles."""
        optimizer = StreamedOptimizer(AdamW(), self.outline.skeleton.model)
        return tile_layouts(self.outline, optimizer.group_of())

    def measured(self, task: Task, tile_tokens: int | None = None) -> Measured:
        """What the model's parts take."""
        key = (task.dtype, task.sequence_length, task.compile, tile_tokens)
        if key not in self._measured:
            self._measured[key] = Measured(
                self.outline,
                task.dtype,
                task.sequence_length,
                compiled=task.compile,
                tile_tokens=tile_tokens,
            )
        return self._measured[key]

    def of(self, machine: Machine, placement: Placement, task: Task, micro_batch: int) -> Forecast:
        """A forecast; budgets of memory do not enter it."""
        rates = replace(machine, device_memory_bytes=0, host_memory_bytes=0)
        key = (rates, placement, replace(task, micro_batch=micro_batch))
        if key not in self._made:
            self._made[key] = forecast(
                self.outline,
                machine,
                placement,
                tokens_per_step=task.tokens_per_step,
                sequence_length=task.sequence_length,
                micro_batch=micro_batch,
                clip=task.clip,
                precision=task.precision,
                measured=self.measured(task, placement.tile_tokens),
            )
        return replace(self._made[key], machine=machine)


@dataclass(frozen=True)
class _Way:
    """A frame and what its spare memory is spent on; it takes `seconds` at least."""

    frame: Forecast
    resident: tuple[str, ...]
    keep_layers: int
    seconds: float


class Search:
    """Finds the placement of a task on a machine, whose memory sizes are the budgets."""

    def __init__(self, forecasts: Forecasts, machine: Machine, task: Task) -> None:
        self._forecasts, self._machine, self._task = forecasts, machine, task
        self._costs = MachineCosts(machine, Tally())
        self._tiles = [t for t in forecasts.layouts if t.name != "unused"]

    def best(self) -> Forecast:
        """The fastest forecast that fits. Raises DoesNotFit."""
        frames = self._frames()
        ways = sorted((w for f in frames for w in self._ways(f)), key=lambda way: way.seconds)
        best: Forecast | None = None
        for way in ways[:_TRIED]:
            if best is not None and way.seconds >= best.seconds:
                break
            found = self._spent(way)
            if found is not None and (best is None or found.seconds < best.seconds):
                best = found
        return best or min(frames, key=lambda frame: frame.seconds)

    def _frames(self) -> list[Forecast]:
        """Frames that fit, of the two largest micro-batches that do, and more sparing ones."""
        found: list[Forecast] = []
        sizes = self._sizes()
        # Host memory hardly depends on the frame: where it lacks, no other needs to be looked at.
        if not self._host_fits(self._frame(0, sizes[0])) and not any(
            map(self._host_fits, self._frugal(self._coarse()))
        ):
            raise DoesNotFit(self._lacking())
        for rows in sizes:
            found += self._first_fitting(rows)
            if len(found) == 2:
                break
        if not found:
            raise DoesNotFit(self._lacking())
        best = min(found, key=lambda frame: frame.seconds)
        if best.placement == self._placement(0):
            sparing = (self._frame(number, best.micro_batch) for number in _SPARING)
            found += [frame for frame in sparing if self._fits(frame)]
        return found

    def _first_fitting(self, rows: int) -> list[Forecast]:
        frames = (self._frame(number, rows) for number in range(len(_FRAMES)))
        return next(([frame] for frame in frames if self._fits(frame)), [])

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

    def _fits(self, found: Forecast) -> bool:
        return self._spare(found) >= 0 and self._host_fits(found)

    def _host_fits(self, found: Forecast) -> bool:
        return found.host_peak_bytes <= _USED * self._machine.host_memory_bytes

    def _spare(self, found: Forecast) -> int:
        return int(_USED * self._machine.device_memory_bytes) - found.device_peak_bytes

    def least(self) -> list[Forecast]:
        """The most frugal ways there are, each on a machine with just the memory it needs.

        One takes least of the device's, the other least of the host's. The smallest micro-batches
        are looked at where others do not fit the device.
        """
        frames = self._frugal(self._coarse())
        if all(self._spare(frame) < 0 for frame in frames):
            frames = self._frugal(self._sizes()[-1])
        return [
            replace(
                frame,
                machine=replace(
                    self._machine,
                    device_memory_bytes=math.ceil(frame.device_peak_bytes / _USED) + 1,
                    host_memory_bytes=math.ceil(frame.host_peak_bytes / _USED) + 1,
                ),
            )
            for frame in frames
        ]

    def _frugal(self, rows: int) -> list[Forecast]:
        return [self._frame(number, rows) for number in (-1, -2)]

    def _coarse(self) -> int:
        """Rows of micro-batches that are small, and few enough to be forecast quickly."""
        few = (rows for rows in self._sizes() if -(-self._task.rows // rows) <= _FEW)
        return min(few, default=self._sizes()[0])

    def _lacking(self) -> str:
        """What the most frugal frame lacks."""
        machine, least = self._machine, self.least()[0].machine
        return (
            f"it needs at least {gib(least.device_memory_bytes)} of device memory and "
            f"{gib(least.host_memory_bytes)} of host memory; "
            f"{gib(machine.device_memory_bytes)} and {gib(machine.host_memory_bytes)} are allowed"
        )

    def _ways(self, frame: Forecast) -> Iterator[_Way]:
        """What a frame's spare memory can be spent on."""
        spare, layers = self._spare(frame), len(self._forecasts.outline.layers)
        graph = self._graph_bytes(frame)
        size = 14 if self._task.precision == "bf16" else 16
        counts = [t.numel for t in self._tiles]
        sums = [0, *accumulate(counts)]
        fitting = sum(numel * size <= spare for numel in sums) - 1
        first = sum(t.name in ("embedding", "prologue", "layer 0") for t in self._tiles)
        for count in sorted({0, first, *(fitting * part // 4 for part in (1, 2, 3, 4))}):
            if count > fitting or (count and not counts[count - 1]):
                continue  # too many, or one that brings nothing
            left = spare - sums[count] * size
            keep = min(layers, left // graph) if graph else layers
            resident = tuple(tile.name for tile in self._tiles[:count])
            yield _Way(frame, resident, keep, self._least(frame, count, keep))

    def _graph_bytes(self, frame: Forecast) -> int:
        """What keeping a layer's graph takes."""
        work = self._forecasts.measured(self._task).layer(0, frame.micro_batch)
        return work.keeping.kept_bytes * self._num_micro(frame)

    def _num_micro(self, frame: Forecast) -> int:
        return -(-self._task.rows // frame.micro_batch)

    def _least(self, frame: Forecast, count: int, keep: int) -> float:
        """Seconds that the busiest resource takes at least."""
        streamed = [t.numel for t in self._tiles if t.name != "embedding"]
        gone = [t.numel for t in self._tiles[:count]]
        left = 1 - sum(gone) / sum(t.numel for t in self._tiles)
        crossing = 1 - sum(t.numel for t in self._tiles[:count] if t.name != "embedding") / sum(
            streamed
        )
        work = self._forecasts.measured(self._task).layer(0, frame.micro_batch)
        seconds = self._costs.seconds
        saved = sum(map(seconds, work.computed_twice))
        saved -= seconds(work.keeping) + seconds(work.kept_backward)
        bounds = frame.bounds
        return max(
            bounds[COMPUTE] - keep * max(0.0, saved) * self._num_micro(frame),
            bounds[UPDATE] * left,
            bounds[COPY_IN] * crossing,
            bounds[COPY_OUT] * crossing,
        )

    def _spent(self, way: _Way) -> Forecast | None:
        """The forecast of a way; fewer graphs are kept if it does not fit, more if it leaves room.

        None: it does not fit without any.
        """
        graph, layers = self._graph_bytes(way.frame), len(self._forecasts.outline.layers)
        keep, best = way.keep_layers, None
        for _ in range(3):
            placement = replace(way.frame.placement, resident=way.resident, keep_layers=keep)
            found = self._forecasts.of(self._machine, placement, self._task, way.frame.micro_batch)
            more = self._spare(found) // max(1, graph)
            if self._fits(found):
                best = found if best is None or found.seconds < best.seconds else best
            if more == 0 or not 0 <= keep + more <= layers:
                break
            keep = min(layers, keep + more)
        return best
