"""What a step will take before it is run: seconds by stream, device and host memory by part.

The one cost model, of `placement="auto"` (autoplace/auto.py) and of `megatrain plan`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, cast

from megatrain.base.units import MIB
from megatrain.device.base import COMPUTE, DEVICE_STREAMS, DISK_STREAMS, UPDATE
from megatrain.device.clock import ClockDevice
from megatrain.engine.assemble import host_bytes
from megatrain.engine.step import TrainingParts, train_step
from megatrain.forecast.assembly import ForecastAssembly, UnrunProgram
from megatrain.forecast.cost_model import CostModel
from megatrain.forecast.declared import Declared
from megatrain.forecast.groups import grouped
from megatrain.forecast.ledger import (
    ACTIVATIONS,
    KEPT_ATTENTION,
    KEPT_GRAPHS,
    WORKING_SET,
    Ledger,
)
from megatrain.forecast.meta_loss import TWO_VISITS
from megatrain.forecast.profile import Profile
from megatrain.loss import CROSS_ENTROPY, JointLoss, Loss
from megatrain.machine import Machine, mapping_bytes
from megatrain.model.init import most_drawn_at_once
from megatrain.model.program import ModelProgram
from megatrain.model.weights import IN_FLIGHT_BYTES
from megatrain.parallel.distributed import ALONE, Foreseen
from megatrain.placement import Placement
from megatrain.source.source import Model
from megatrain.store.store import Store
from megatrain.telemetry.metrics import model_tflops
from megatrain.telemetry.timeline import Breakdown, Span, breakdown, critical_path, window
from megatrain.tile import TileKind

# Groups of micro-batches that are followed, where something of each leaves for the host or comes
# back. Elsewhere one shows as much. For memory alone two do: they hold as much.
_FOLLOWED, _FOLLOWED_FOR_MEMORY = 8, 2
STEADY = 2  # steps: the first starts without updates, the second with those of the first
_BOUNDS = (*DEVICE_STREAMS, UPDATE, *DISK_STREAMS)

# What torch's allocator takes beyond what is in use, with expandable segments
# (benchmarks/results/step-*.json): 60 to 150 MiB, here as a share of the driver's context (840 MiB
# on an H200); of what waits from the forward to the backward 2.2 to 3.7 %, in five of six steps.
# Of what is freed within a layer or the head, whose blocks come in many sizes, some 15 % of the
# working set is left lying. It is given back where a limit is reached (32B in 24 GiB); in tiles,
# which no limit was tried with, it counts as taken.
_ALLOCATOR, _ALLOCATOR_WAITING, _ALLOCATOR_TORN = 60 / 840, 0.03, 0.15

# Workspaces of cuBLAS, which torch takes from its own memory and keeps: 32 MiB on an H200 for each
# thread that launches products, and there are two, the engine's and that of autograd's backward. As
# a share of the driver's context, which is 840 MiB there: both are less on smaller GPUs.
_WORKSPACES = 64 / 840

# Resident memory of a process beside all planes and buffers: Python, torch, CUDA's libraries, and
# compiling. It is 1.8 to 4.0 GB in nine runs of 1.5B to 7B, whatever the size. Before it compiles
# it has the second.
PROCESS_BYTES, _EARLY_PROCESS_BYTES = 2_300_000_000, 1_100_000_000
# On the CPU it is 0.51 GB with the smallest model (`megatrain train`).
CPU_PROCESS_BYTES = 550_000_000

# So much of it comes with the first step: 23 to 38 MiB where the C library gives all blocks back at
# once (MALLOC_MMAP_THRESHOLD_=131072), up to 93 with the small blocks that it keeps otherwise.
_CPU_GROWTH_BYTES = 104 * MIB

# The C library gives blocks of up to 32 MiB back only when none that lies behind them is in use;
# larger ones at once. What it keeps differs from run to run: beyond the growth above, at most
# 51 MiB of a working set of 57, 86 of 153, 445 of 402 and 368 of 471 in 90 runs of the model of
# tests/parity/test_host_limit.py, with 1 to 48 rows and one to three threads.
_LEFT_LYING, _MOST_LEFT_LYING = 1.2, 560 * MIB


@dataclass(frozen=True)
class Forecast:
    """One steady optimizer step, as it will be on a machine.

    Attributes:
        seconds: from one step's end to the next one's, while the updates of the first run.
        parameters: distinct ones. computing: with a token, and of these those that are trained.
        spans: what each stream does when, from the step's begin (telemetry/timeline.py).
        bounds: seconds that each resource is busy; no schedule can be faster than the largest.
        binds: the resource that takes most of the step's critical path.
        device_bytes: at the step's peak, by part: `slots`, `gradients and rows`, `gradient sums`
            (of several passes), `kept weights`, `resident tiles`, `activations`, `kept graphs`,
            `kept attention`, `working set` (of one layer or the head), `lanes of the host`, `layer
            arguments`, `small buffers`, `libraries` (their workspaces), `allocator` (taken beyond
            what is in use), `context` (of the process; everything else is what `Engine.memory()`
            counts); of rollouts `generation` (beyond a step's peak) and `reference model`.
        host_bytes: as `Engine.memory()` names them (`host_weights_bytes`, ...), and
            `host_process_bytes` for the process itself. Where the device is the CPU what would be
            in `device_bytes` is here (`host_working_set_bytes`, ...).
    """

    placement: Placement
    machine: Machine
    parameters: int
    computing: tuple[int, int]
    tokens_per_step: int
    sequence_length: int
    micro_batch: int
    seconds: float
    spans: Sequence[Span]
    bounds: dict[str, float]
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds

    @property
    def model_tflops(self) -> float:
        return model_tflops(*self.computing, self.tokens_per_step, self.seconds)

    @property
    def breakdown(self) -> Breakdown:
        """Where the step's time goes: its spans, summed up."""
        return breakdown(self.spans, COMPUTE)

    @property
    def critical_path(self) -> dict[str, float]:
        """Seconds of each resource on the way from the step's end back to its beginning."""
        return dict(critical_path(self.spans).most_common())

    @property
    def binds(self) -> str:
        return next(iter(self.critical_path))

    @property
    def device_peak_bytes(self) -> int:
        """What the process needs at most, the context included."""
        return sum(self.device_bytes.values())

    @property
    def device_held_bytes(self) -> int:
        """What the driver will show: torch keeps freed memory as long as there is room."""
        torn = 0 if self.placement.chunk_tokens else self.device_bytes.get(WORKING_SET, 0)
        room = max(0, self.machine.device_memory_bytes - self.device_peak_bytes)
        return self.device_peak_bytes + min(room, int(_ALLOCATOR_TORN * torn))

    @property
    def host_peak_bytes(self) -> int:
        """Resident memory of the whole process at most."""
        return sum(self.host_bytes.values())

    @property
    def host_parts(self) -> dict[str, int]:
        """`host_bytes` by names for people."""
        return {
            name.removeprefix("host_").removesuffix("_bytes").replace("_", " "): num_bytes
            for name, num_bytes in self.host_bytes.items()
        }

    @property
    def host_growth(self) -> tuple[Counter[str], int]:
        """On the CPU: what is still to come by part, and what the process grows by besides."""
        parts = Counter(self.host_parts)
        return parts, parts.pop("process") - CPU_PROCESS_BYTES + _CPU_GROWTH_BYTES

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`; without the spans."""
        return {
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "model_tflops": self.model_tflops,
            "binds": self.binds,
            "bounds": self.bounds,
            "critical_path": self.critical_path,
            "tokens_per_step": self.tokens_per_step,
            "sequence_length": self.sequence_length,
            "micro_batch": self.micro_batch,
            "placement": self.placement.as_dict(),
            "machine": self.machine.as_dict(),
            "parameters": self.parameters,
            "breakdown": self.breakdown.as_dict(),
            "device_bytes": self.device_bytes,
            "device_peak_bytes": self.device_peak_bytes,
            "device_held_bytes": self.device_held_bytes,
            "host_bytes": self.host_bytes,
            "host_peak_bytes": self.host_peak_bytes,
        }


def forecast(
    model: Model,
    machine: Machine,
    placement: Placement,
    measured: Profile,
    *,
    rows: int,
    micro_batch: int,
    clip: bool,
    loss: Loss = CROSS_ENTROPY,
    steps: int = STEADY,
) -> Forecast:
    """One steady step of a model: the engine's own step, on a device that only keeps time.

    Args:
        measured: of the same model, compiled or not and in tiles as the placement says.
        rows: of a step.
        micro_batch: rows of one.
        clip: with exact clipping updates wait for the global norm.
        loss: counts as cross entropy; a joint one visits the head twice.
        steps: that are followed; one is enough where seconds do not matter.

    Raises:
        NotForeseeable: what the model computes depends on its values.
    """
    joint, given = isinstance(loss, JointLoss), (measured, rows, micro_batch)
    run = _run(model, machine, placement, *given, clip=clip, joint=joint, steps=steps)
    device, host = _memory(run, machine, in_tiles=placement.chunk_tokens is not None)
    later = sum(host.values()) - run.planes_bytes - host.get("host_resident_tiles_bytes", 0)
    host["host_process_bytes"] = process_bytes(model, machine, placement, measured, later)
    return Forecast(
        placement=placement,
        machine=machine,
        parameters=sum(each.num_parameters for each in model.layouts),
        computing=model.computing,
        tokens_per_step=rows * measured.tokens,
        sequence_length=measured.tokens,
        micro_batch=micro_batch,
        seconds=run.seconds,
        spans=run.spans,
        bounds={name: sum(s.seconds for s in run.spans if s.stream == name) for name in _BOUNDS},
        device_bytes=device,
        host_bytes=host,
    )


def _memory(
    run: "_Run", machine: Machine, *, in_tiles: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """What device and host hold at the peak; the process apart."""
    used = {place: num_bytes for place, num_bytes in run.peak_live.items() if num_bytes}
    context = machine.device_context_bytes
    if machine.unified:
        used["allocator"] = left_lying(used.get(WORKING_SET, 0))
        here = {f"host_{name.replace(' ', '_')}_bytes": size for name, size in used.items()}
        return {}, run.host_bytes | here
    return {
        **used,
        **torch_bytes(used, context, in_tiles=in_tiles),
        "context": context + mapping_bytes(sum(run.host_bytes.values())),
    }, dict(run.host_bytes)


def left_lying(worked_bytes: int) -> int:
    """What the C library may keep on the CPU of memory that work has given back."""
    return min(int(_LEFT_LYING * worked_bytes), _MOST_LEFT_LYING)


def torch_bytes(
    used: Mapping[str, int], context_bytes: int, *, in_tiles: bool = False
) -> dict[str, int]:
    """What torch and its libraries take besides what is in use, by part."""
    waiting = sum(used.get(place, 0) for place in (KEPT_GRAPHS, KEPT_ATTENTION, ACTIVATIONS))
    torn = used.get(WORKING_SET, 0) if in_tiles else 0
    beyond = _ALLOCATOR * context_bytes + _ALLOCATOR_WAITING * waiting + _ALLOCATOR_TORN * torn
    return {"libraries": int(_WORKSPACES * context_bytes), "allocator": int(beyond)}


@dataclass(frozen=True)
class _Run:
    seconds: float
    spans: list[Span]
    peak_live: Counter[str]
    host_bytes: dict[str, int]
    planes_bytes: int


def _run(
    model: Model,
    machine: Machine,
    placement: Placement,
    measured: Profile,
    rows: int,
    micro_batch: int,
    *,
    clip: bool,
    joint: bool,
    steps: int,
) -> _Run:
    """The last of so many steps."""
    ledger = Ledger()
    assert model.rule is not None
    head = next(each for each in model.layouts if each.kind is TileKind.HEAD)
    declared = Declared(measured, ledger, head, placement.head_tokens)
    costs = CostModel(
        machine, model.rule, model.ranks, model.hosts, ledger, declared, measured.once
    )
    device = ClockDevice(costs)
    most = _followed(placement, steps)
    batch = measured.batch(rows, micro_batch, most, 1 if joint else placement.passes)
    if (sharing := model.ranks * model.hosts) > 1:
        batch = measured.with_all_rows(batch, rows * sharing, model.ranks)
    if joint:
        batch = replace(batch, micro=[replace(each, loss=TWO_VISITS) for each in batch.micro])
    costs.group = max(map(grouped, batch.micro))
    costs.puts = 3 if placement.layer_inputs == "host" else 2
    store, parts = _assemble(device, measured, model, placement, declared, clip, joint=joint)
    spans, end = list[Span](), device.now
    # Of updates beside which a disk reads weights the third step is the first to know.
    for _ in range(steps + (steps >= STEADY and placement.disk_weights > 0)):
        costs.slow_down(spans)
        device.spans = [span for span in device.spans if span.end > end]
        begin = end
        train_step(parts, batch)
        end = device.now
        spans = window(device.spans, begin, end)
    host, planes = host_bytes(store, parts), sum(store.bytes_by_plane().values())
    # Rooms of graphs on the host are as if all groups were as large as the first.
    every = sum(map(grouped, batch.micro)), costs.group * len(batch.micro)
    host["host_kept_bytes"] = host["host_kept_bytes"] * every[0] // every[1]
    return _Run(end - begin, spans, ledger.peak_live, host, planes)


def _followed(placement: Placement, steps: int) -> int | None:
    """Micro-batches, or groups of them, that are followed."""
    on_host = placement.layer_inputs, placement.save_attention
    leaves = "host" in on_host or placement.offload_activations > 0
    if not leaves:
        return 1
    return _FOLLOWED if steps >= STEADY else _FOLLOWED_FOR_MEMORY


def process_bytes(
    model: Model, machine: Machine, placement: Placement, measured: Profile, later: int
) -> int:
    """Bytes of the process itself when it runs; or when weights arrive, if that is more.

    Then `later` bytes are still to come. On their way to the planes are a layer or a table that is
    drawn, in fp32 (of what rests on the device a parameter goes by way of two more of half its
    size, a frozen one of one), or as much as is read at once.
    """
    resident = [layout for layout in model.layouts if layout.name in placement.resident]
    parameters = [e for layout in resident for e in layout.entries]
    ways = (2 * prod(e.shape) * (1 if e.group is None else 2) for e in parameters)
    split = max(ways, default=0)
    drawn = 4 * measured.once("drawn", partial(most_drawn_at_once, model.spec))
    read = min(IN_FLIGHT_BYTES, 4 * sum(layout.numel for layout in model.layouts))
    arriving = max(drawn + split, read)
    if machine.unified:
        return CPU_PROCESS_BYTES + max(0, arriving - later)
    return max(PROCESS_BYTES, _EARLY_PROCESS_BYTES + arriving - later)


def _assemble(
    device: ClockDevice,
    measured: Profile,
    model: Model,
    placement: Placement,
    declared: Declared,
    clip: bool,
    *,
    joint: bool,
) -> tuple[Store, TrainingParts]:
    """The parts of a step as the engine makes them, around a program that is not run."""
    store = Store(device, model.layouts, measured.dtype, rule=model.rule, placement=placement)
    every = model.ranks * model.hosts
    assembly = ForecastAssembly(
        device,
        cast(ModelProgram, UnrunProgram(measured)),
        store,
        measured.dtype,
        replace(placement, compile=False, chunk_tokens=None),  # nothing is run
        Foreseen(0, every, model.ranks, hosts=model.hosts) if every > 1 else ALONE,
        declared=declared,
    )
    assert model.optimizer is not None
    parts = assembly.training(model.optimizer, 1.0 if clip else None)
    if joint and parts.passes > 1:  # as the engine takes such a step
        parts = replace(parts.under(assembly.policies(device=False)), passes=1)
    return store, parts
