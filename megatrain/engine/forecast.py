"""What a step will take before it is run: seconds by stream, device and host memory by part.

The one cost model, of `placement="auto"` (engine/fit.py) and of `megatrain plan`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import torch

from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT, UPDATE
from megatrain.device.clock import ClockDevice
from megatrain.engine.assemble import Assembly, host_bytes, tile_layouts
from megatrain.engine.costs import MachineCosts
from megatrain.engine.measure import Measured
from megatrain.engine.opaque import (
    ACTIVATIONS,
    KEPT_ATTENTION,
    KEPT_GRAPHS,
    WORKING_SET,
    OpaqueHead,
    OpaqueProgram,
    OpaqueRows,
)
from megatrain.engine.step import TrainingParts, train_step
from megatrain.engine.tally import Tally
from megatrain.machine import Machine
from megatrain.model.outline import Outline
from megatrain.optim import AdamW, StreamedOptimizer
from megatrain.placement import Placement
from megatrain.store import Store
from megatrain.telemetry.timeline import Breakdown, Span, breakdown, window
from megatrain.tile import TileLayout
from megatrain.tile.layout import ALIGNMENT

_STEPS = 3  # the first starts without updates, the second with the first one's; then it is steady
_BOUNDS = (COMPUTE, COPY_IN, COPY_OUT, UPDATE)

# What torch's allocator takes beyond what is in use, with expandable segments
# (benchmarks/results/step-*.json): 60 to 150 MiB, here as a share of the driver's context (600 MiB
# on an H200); of what waits from the forward to the backward 2.2 to 3.7 %, in five of six steps;
# of rows in tiles, whose operations come in many sizes, up to a quarter of the working set.
_ALLOCATOR, _ALLOCATOR_WAITING, _ALLOCATOR_TILES = 0.1, 0.03, 0.25

# Workspaces of cuBLAS, which torch takes from its own memory and keeps: 32 MiB on an H200 for each
# thread that launches products, and there are two, the engine's and that of autograd's backward. As
# a share of the driver's context, which is 600 MiB there: both are less on smaller GPUs.
_WORKSPACES = 64 / 600

# Resident memory of a process beside all planes and buffers: Python, torch, CUDA's libraries, and
# compiling. It is 1.8 to 4.0 GB in nine runs of 1.5B to 7B, whatever the size. Before it compiles
# it has the second.
PROCESS_BYTES, _EARLY_PROCESS_BYTES = 2_300_000_000, 1_100_000_000


@dataclass(frozen=True)
class Forecast:
    """One steady optimizer step, as it will be on a machine.

    Attributes:
        seconds: from one step's end to the next one's, while the updates of the first run.
        model_tflops: `6 x parameters x tokens / seconds`, in 1e12.
        spans: what each stream does when, from the step's begin (telemetry/timeline.py).
        breakdown: the same, summed up.
        bounds: seconds that each resource is busy; no schedule can be faster than the largest.
        binds: the name of the largest.
        device_bytes: at the step's peak, by part: `slots`, `gradients and rows`, `resident tiles`,
            `activations`, `kept graphs`, `kept attention`, `working set` (of one layer or the
            head), `lanes of the host`, `layer arguments`, `small buffers`, `libraries` (their
            workspaces), `allocator` (taken beyond what is in use), `context` (of the process;
            everything else is what `Engine.memory()` counts).
        host_bytes: as `Engine.memory()` names them (`host_weights_bytes`, ...), and
            `host_process_bytes` for the process itself.
    """

    placement: Placement
    machine: Machine
    parameters: int
    tokens_per_step: int
    sequence_length: int
    micro_batch: int
    seconds: float
    spans: Sequence[Span]
    breakdown: Breakdown
    bounds: dict[str, float]
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds

    @property
    def model_tflops(self) -> float:
        return 6 * self.parameters * self.tokens_per_step / self.seconds / 1e12

    @property
    def binds(self) -> str:
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def device_peak_bytes(self) -> int:
        """What the driver shows as taken by the process at most, the context included."""
        return sum(self.device_bytes.values())

    @property
    def host_peak_bytes(self) -> int:
        """Resident memory of the whole process at most."""
        return sum(self.host_bytes.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`; without the spans."""
        return {
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "model_tflops": self.model_tflops,
            "binds": self.binds,
            "bounds": self.bounds,
            "tokens_per_step": self.tokens_per_step,
            "sequence_length": self.sequence_length,
            "micro_batch": self.micro_batch,
            "placement": self.placement.as_dict(),
            "machine": self.machine.as_dict(),
            "parameters": self.parameters,
            "breakdown": self.breakdown.as_dict(),
            "device_bytes": self.device_bytes,
            "device_peak_bytes": self.device_peak_bytes,
            "host_bytes": self.host_bytes,
            "host_peak_bytes": self.host_peak_bytes,
        }


def forecast(
    outline: Outline,
    machine: Machine,
    placement: Placement,
    *,
    tokens_per_step: int,
    sequence_length: int,
    micro_batch: int,
    clip: bool = True,
    precision: Literal["bf16", "fp32"] = "bf16",
    measured: Measured | None = None,
) -> Forecast:
    """One steady step of a model: the engine's own step, on a device that only keeps time.

    Nothing is allocated and nothing computed.

    Args:
        outline: of the model on the meta device (`probe.outline(open_source(config).model)`).
        tokens_per_step: rounded down to whole rows of `sequence_length`, at least one.
        micro_batch: rows.
        clip: with exact clipping updates wait for the global norm.
        measured: of the same outline, precision and sequence length, to be used again.

    Raises:
        NotForeseeable: what the model computes depends on its values.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    measured = measured or Measured(
        outline,
        dtype,
        sequence_length,
        compiled=placement.compile,
        tile_tokens=placement.tile_tokens,
    )
    rows = max(1, tokens_per_step // sequence_length)
    run = _run(machine, placement, measured, rows, micro_batch, clip=clip)
    used = {place: num_bytes for place, num_bytes in run.peak_live.items() if num_bytes}
    return Forecast(
        placement=placement,
        machine=machine,
        parameters=run.parameters,
        tokens_per_step=rows * sequence_length,
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        seconds=run.seconds,
        spans=run.spans,
        breakdown=breakdown(run.spans, COMPUTE),
        bounds={name: sum(s.seconds for s in run.spans if s.stream == name) for name in _BOUNDS},
        device_bytes={
            **used,
            "libraries": int(_WORKSPACES * machine.device_context_bytes),
            "allocator": _allocator_bytes(
                used, machine.device_context_bytes, in_tiles=placement.tile_tokens is not None
            ),
            "context": machine.device_context_bytes,
        },
        host_bytes=run.host_bytes,
    )


def _allocator_bytes(used: Mapping[str, int], context_bytes: int, *, in_tiles: bool) -> int:
    waiting = sum(used.get(place, 0) for place in (KEPT_GRAPHS, KEPT_ATTENTION, ACTIVATIONS))
    torn = used.get(WORKING_SET, 0) if in_tiles else 0
    return int(_ALLOCATOR * context_bytes + _ALLOCATOR_WAITING * waiting + _ALLOCATOR_TILES * torn)


@dataclass(frozen=True)
class _Run:
    seconds: float
    spans: list[Span]
    peak_live: Counter[str]
    host_bytes: dict[str, int]
    parameters: int


def _run(
    machine: Machine,
    placement: Placement,
    measured: Measured,
    rows: int,
    micro_batch: int,
    *,
    clip: bool,
) -> _Run:
    """The last of a few steps, which is like all that follow."""
    tally = Tally()
    costs = MachineCosts(machine, tally)
    device = ClockDevice(costs)
    batch = measured.batch(rows, micro_batch)
    optimizer = StreamedOptimizer(AdamW(), measured.outline.skeleton.model)
    layouts = tile_layouts(measured.outline, optimizer.group_of())
    with torch.enable_grad(), tally:
        store, parts = _assemble(device, measured, layouts, optimizer, placement, tally, clip)
        end = device.now
        for _ in range(_STEPS):
            begin = end
            train_step(parts, batch)
            end = device.now
            spans = window(device.spans, begin, end)
            costs.slow_down(spans)
    parameters = sum(tile.layout.num_parameters for tile in store.tiles)
    host = host_bytes(store, parts)
    host["host_process_bytes"] = _process_bytes(store, layouts, sum(host.values()))
    return _Run(end - begin, spans, tally.peak_live, host, parameters)


def _process_bytes(store: Store, layouts: Sequence[TileLayout], held_bytes: int) -> int:
    """Of the process itself when it runs; or when weights are drawn, if it takes more then.

    Then there is nothing but the planes, and the largest parameter in fp32 on its way to them: to
    one on the device by way of two more of half its size.
    """
    later = held_bytes - sum(store.bytes_by_plane().values())
    drawn = max(
        prod(entry.shape) * (8 if tile.resident else 4)
        for tile, layout in zip(store.tiles, layouts, strict=True)
        for entry in layout.entries
    )
    return max(PROCESS_BYTES, _EARLY_PROCESS_BYTES + drawn - later)


def _assemble(
    device: ClockDevice,
    measured: Measured,
    layouts: Sequence[TileLayout],
    optimizer: StreamedOptimizer,
    placement: Placement,
    tally: Tally,
    clip: bool,
) -> tuple[Store, TrainingParts]:
    """The parts of a step as the engine makes them, around a program that computes nothing."""
    resident = placement.resident
    joined = [_joined(each, measured.dtype, placement) for each in layouts]
    store = Store(device, joined, measured.dtype, train=True, resident=resident)
    program = OpaqueProgram(measured, tally, placement.head_tokens)
    assembly = Assembly(device, program, store, measured.dtype, placement)
    tile, tokens = assembly.tiles["head"], placement.head_tokens
    assembly.rows = OpaqueRows(program, tokens, measured, tally)
    parts = assembly.training(optimizer, 1.0 if clip else None)
    if assembly.ranges is None:
        work = partial(measured.head, tile.layout, head_tokens=tokens)
        parts.head = OpaqueHead(device, program, tile, tokens, work, tally)
    return store, parts


def _joined(layout: TileLayout, dtype: torch.dtype, placement: Placement) -> TileLayout:
    """A layer's as one parameter for each group, since all that counts of them is their bytes.

    A step then goes through less than half the operations. Of what is split the parts count, too.
    """
    most = placement.split_bytes or layout.numel * dtype.itemsize
    whole = layout.name.startswith("layer") and layout.numel * dtype.itemsize <= most
    if not whole or any(entry.numel % ALIGNMENT for entry in layout.entries):
        return layout
    groups = {entry.group: entry.name for entry in layout.entries}
    return TileLayout(
        layout.name,
        [
            (name, torch.Size([sum(e.numel for e in layout.entries if e.group == group)]), group)
            for group, name in groups.items()
        ],
    )
