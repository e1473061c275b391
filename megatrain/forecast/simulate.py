"""The forecast of a step: seconds by stream, device and host memory by part.

For `auto` and `megatrain plan` the engine's own step runs on a device that only keeps time.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from megatrain.base.units import IN_FLIGHT_BYTES, align
from megatrain.device import Buffer, Device, base
from megatrain.device.base import CALLER, COMPUTE, UPDATE, Buffers, MetaDevice, Work
from megatrain.engine.assemble import Assembly, host_bytes
from megatrain.engine.sink import PIECE, GradAccumulator, Sink
from megatrain.engine.step import train_step
from megatrain.forecast.declared import Declared
from megatrain.forecast.op_counter import Ledger, Place
from megatrain.forecast.prices import Cost, CostModel
from megatrain.forecast.profile import Profile, grouped
from megatrain.forecast.workload import Workload
from megatrain.loss import JointLoss
from megatrain.machine import Machine, mapping_bytes
from megatrain.model.micro_batch import MicroBatch
from megatrain.optim import Plane, PlaneKind
from megatrain.parallel.distributed import Ranks
from megatrain.placement import Placement
from megatrain.source.tiles import DTYPES, Model
from megatrain.store.store import DiskStaging, Lane, Store, Tile
from megatrain.telemetry.metrics import model_tflops
from megatrain.telemetry.timeline import Breakdown, Span, breakdown, critical_path, window

if TYPE_CHECKING:
    from megatrain.model.program import ModelProgram

# A forecast moves a gradient in about so many pieces, and a tile to and from a disk. The engine's
# real pieces are more, would take long to follow, and need as many seconds of the step.
_PIECES, _DISK_PIECES = 3, 4
_GROWTH = 8  # a piece may be this many times the last one, which leaves while this one is rounded

# Groups of micro-batches that are followed if tensors of each leave for the host or come back; two
# are enough for their memory. Where nothing leaves, one group gives the same seconds and bytes.
_FOLLOWED, _FOLLOWED_FOR_MEMORY = 8, 2
STEADY = 2  # steps: the first runs without updates, the second beside those of the first
_BOUNDS = (*base.DEVICE_STREAMS, UPDATE, *base.DISK_STREAMS)

# torch's allocator, with expandable segments, takes more than is in use (benchmarks/results/
# step-*.json): 60 to 150 MiB, here as a share of the driver's context (840 MiB on an H200); 2.2 to
# 3.7 %, in five of six steps, of what is kept from the forward to the backward; and some 15 % of
# the working set of a layer or the head, as its freed blocks have many sizes. The allocator gives
# these back at a limit of memory (32B in 24 GiB), which was not tried with tiles of tokens.
_ALLOCATOR, _ALLOCATOR_WAITING, _ALLOCATOR_FRAGMENTS = 60 / 840, 0.03, 0.15

# cuBLAS's workspaces, which torch allocates and keeps: 32 MiB on an H200 for each of two threads
# that launch products, the engine's and autograd's. Here they are a share of the driver's context
# (840 MiB on an H200): workspaces and context are both smaller on smaller GPUs.
_WORKSPACES = 64 / 840

# Bytes of resident memory of a process beside all planes and buffers: Python, torch, CUDA's
# libraries, and compiling. They were 1.8 to 4.0 GB in nine runs of 1.5B to 7B, whatever the size.
# The second number holds before anything is compiled.
PROCESS_BYTES, _EARLY_PROCESS_BYTES = 2_300_000_000, 1_100_000_000


class ClockDevice(MetaDevice):
    """A device that runs nothing: it keeps time by the costs of the work put on its streams.

    Attributes:
        spans: the work of all streams over time, in the order in which it was put on them.
        now: the seconds that have passed for the calling thread.
    """

    def __init__(self, costs: CostModel) -> None:
        self.spans: list[Span] = []
        self._costs = costs
        self._free_at: defaultdict[str, float] = defaultdict(float)
        self._wait_reasons: dict[str, tuple[str, ...]] = {}

    @property
    def now(self) -> float:
        return self._free_at[CALLER]

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        buffer = Buffer(name, self._costs.empty(name, numel, dtype))
        # A caching allocator hands out memory that earlier work on COMPUTE may still use.
        self.run(base.COMPUTE, f"allocate {name}", lambda: None, writes=[buffer])
        return buffer

    def in_place(self, buffer: Buffer) -> Buffer:
        self._costs.reads_in_place = True
        return replace(buffer, name=base.Name(base.Memory.IN_PLACE, buffer.name))

    def run(
        self, stream: str, name: str, work: Work, reads: Buffers = (), writes: Buffers = ()
    ) -> Any:
        cost = self._costs.run(stream, name, work, reads, writes)
        self._pass_time(stream, name, cost)
        return cost.result

    def copy(self, stream: str, to: Buffer, source: Buffer, numel: int | None = None) -> None:
        capacity = to.data.numel()  # slicing would be slow for a large model's many pieces
        num_bytes = to.data.itemsize * (capacity if numel is None else min(numel, capacity))
        cost = Cost(self._costs.copy(stream, num_bytes), num_bytes=num_bytes)
        self._pass_time(stream, f"{source.name} -> {to.name}", cost)

    def _pass_time(self, stream: str, name: str, cost: Cost) -> None:
        """Let the time of a piece of work pass on its stream and for the calling thread."""
        free_at = self._free_at
        start = now = free_at[CALLER]
        if free_at[stream] > now:
            start = free_at[stream]
        if stream not in base.HOST_STREAMS:
            free_at[CALLER] = now = now + self._costs.put_seconds + cost.launching
        if not cost.seconds:
            return  # no span: the stream's next work keeps the waits
        free_at[stream] = end = max(start + cost.seconds, now)
        if cost.blocking:
            free_at[CALLER] = end
        wait_reasons = self._wait_reasons.pop(stream, ())
        self.spans.append(Span(stream, name, start, end, wait_reasons, cost.num_bytes))

    def record(self, stream: str) -> Any:
        """The seconds at which all work on the stream is done."""
        return max(self._free_at[stream], self._free_at[CALLER])

    def wait(self, stream: str, event: Any | None, why: str) -> None:
        if event is not None:
            self._wait_reasons[stream] = (*self._wait_reasons.get(stream, ()), why)
            self._free_at[stream] = max(self._free_at[stream], event)


class _TimelessDevice(ClockDevice):
    """Counts the memory of a step alone: no time passes."""

    def run(
        self, stream: str, name: str, work: Work, reads: Buffers = (), writes: Buffers = ()
    ) -> Any:
        on_device = stream == base.COMPUTE
        return self._costs.run(stream, name, work, reads, writes).result if on_device else None

    def copy(self, stream: str, to: Buffer, source: Buffer, numel: int | None = None) -> None:
        pass

    def record(self, stream: str) -> Any:
        return 0.0

    def wait(self, stream: str, event: Any | None, why: str) -> None:
        pass


@dataclass(frozen=True)
class Forecast:
    """The forecast of one steady optimizer step on a machine."""

    placement: Placement
    machine: Machine
    parameters: int  # distinct ones, shared ones counted once
    # parameters that compute with each token, and the trained ones of these
    computing: tuple[int, int]
    tokens_per_step: int
    sequence_length: int
    micro_batch: int
    seconds: float  # from one step's end to the next one's, while the updates of the first run
    # the work of each stream over time, from the step's begin (telemetry/timeline.py)
    spans: Sequence[Span]
    # seconds that each resource is busy; no schedule can be faster than the largest
    bounds: dict[str, float]
    # bytes at the step's peak, by part, such as `slots`, `kept weights`, `activations`, `working
    # set` (of one layer or the head). `Engine.memory()` counts all parts but four: workspaces of
    # `libraries`; the `allocator`'s bytes beyond those in use; the driver's `context`; and
    # `generation`, the bytes that replies take beyond a step's peak
    device_bytes: dict[str, int]
    # bytes by the names of `Engine.memory()` (`host_weights_bytes`, ...), and `host_process_bytes`
    # for the process itself
    host_bytes: dict[str, int]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds

    @property
    def model_tflops(self) -> float:
        return model_tflops(*self.computing, self.tokens_per_step, self.seconds)

    @property
    def breakdown(self) -> Breakdown:
        return breakdown(self.spans, COMPUTE)

    @property
    def critical_path(self) -> dict[str, float]:
        """Seconds of each resource on the way from the step's end back to its beginning."""
        return dict(critical_path(self.spans).most_common())

    @property
    def binds(self) -> str:
        """The resource that takes most of the critical path."""
        return next(iter(self.critical_path))

    @property
    def device_peak_bytes(self) -> int:
        """Bytes of device memory that the process needs at its peak, the context included."""
        return sum(self.device_bytes.values())

    @property
    def device_held_bytes(self) -> int:
        """Bytes that the driver will report: torch keeps freed memory while there is room."""
        if self.placement.chunk_tokens:  # then the peak counts fragments already
            return self.device_peak_bytes
        fragments = int(_ALLOCATOR_FRAGMENTS * self.device_bytes.get(Place.WORKING_SET, 0))
        free = max(0, self.machine.device_memory_bytes - self.device_peak_bytes)
        return self.device_peak_bytes + min(free, fragments)

    @property
    def host_peak_bytes(self) -> int:
        """Bytes of resident memory of the whole process at its peak."""
        return sum(self.host_bytes.values())

    @property
    def host_parts(self) -> dict[str, int]:
        """`host_bytes` by names for people."""
        return {
            name.removeprefix("host_").removesuffix("_bytes").replace("_", " "): num_bytes
            for name, num_bytes in self.host_bytes.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`; without the spans."""
        values = {name: getattr(self, name) for name in _PLAIN}
        return {n: v.as_dict() if hasattr(v, "as_dict") else v for n, v in values.items()}


_PLAIN = (
    *("seconds", "tokens_per_second", "model_tflops", "binds", "bounds", "critical_path"),
    *("tokens_per_step", "sequence_length", "micro_batch", "placement", "machine", "parameters"),
    *("breakdown", "device_bytes", "device_peak_bytes", "device_held_bytes", "host_bytes"),
    "host_peak_bytes",
)


def forecast(
    model: Model,
    machine: Machine,
    placement: Placement,
    measured: Profile,
    workload: Workload,
    micro_batch: int,
    steps: int = STEADY,
) -> Forecast:
    """The forecast of one steady step, by the engine's own step on a device that only keeps time.

    Args:
        measured: measurements of the same model; compiled, and in tiles, as the placement is.
        workload: with a joint loss the head is visited twice.
        steps: the number of steps to follow; one is for memory alone, and takes no time.

    Raises NotForeseeable: what the model computes depends on its values.
    """
    model = model.placed(placement)
    loss, rows = workload.loss, workload.rows
    is_joint = isinstance(loss, JointLoss)
    declared = Declared(measured, placement.head_tokens, machine.device_gbps)
    costs = CostModel(machine, model.rule, model.ranks, model.hosts, declared)
    ledger = declared.ledger
    steady = steps >= STEADY
    device = ClockDevice(costs) if steady else _TimelessDevice(costs)
    passes = 1 if is_joint else placement.passes
    batch = measured.batch(rows, micro_batch, _most_groups(placement, steps), passes)
    if (ranks := model.ranks * model.hosts) > 1:
        batch = measured.with_all_rows(batch, rows * ranks, model.ranks)
    batch = replace(batch, micro=[replace(micro, loss=loss) for micro in batch.micro])
    costs.group = max(map(grouped, batch.micro))
    costs.tokens = micro_batch * measured.tokens
    costs.puts = 3 if placement.layer_inputs == "host" else 2  # the third copies inputs to the host
    assembly = assembled(
        device,
        model,
        placement,
        measured,
        ranks=Ranks(0, ranks, model.ranks, hosts=model.hosts),
        sinks=CoarseSink if steady else _WholeSink,
        staging=_CoarseDiskStaging,
        unpacking=declared.unpack,
    )
    assert model.optimizer is not None
    parts = assembly.training(model.optimizer, 1.0 if workload.clip else None)
    if is_joint and parts.passes > 1:  # an engine takes a step of a joint loss in one pass
        parts = replace(parts.with_policies(assembly.policies(device=False)), passes=1)
    if measured.media is not None:
        parts = replace(parts, trunk=parts.trunk_with_media)
        ledger.add_bytes("images", rows * measured.media_bytes)
    if not steady:  # skip updates that wait for the norm: they take no memory of the device
        parts.update.finish = lambda sink: (0.0, 0.0)  # type: ignore[method-assign]
    spans, end = list[Span](), device.now
    # If sweeps read weights from a disk beside updates, only the third step has steady rates.
    for _ in range(steps + (steady and placement.disk_weights > 0)):
        costs.slow_down(spans)
        device.spans = [span for span in device.spans if span.end > end]
        begin = end
        train_step(parts, batch)
        end = device.now
        spans = window(device.spans, begin, end)
    host = host_bytes(assembly.store, parts)
    planes_bytes = sum(host.get(f"host_{kind.value}_bytes", 0) for kind in PlaneKind)
    # The host's memory for graphs was counted as if all groups were as large as the first.
    num_micro = sum(map(grouped, batch.micro))
    counted_micro = costs.group * len(batch.micro)
    host["host_kept_bytes"] = host["host_kept_bytes"] * num_micro // counted_micro
    on_device = _device_bytes(ledger, machine, placement)
    on_device["context"] += mapping_bytes(sum(host.values()))
    allocated_later = sum(host.values()) - planes_bytes - host.get("host_resident_tiles_bytes", 0)
    host["host_process_bytes"] = process_bytes(model, placement, measured, allocated_later)
    return Forecast(
        placement=placement,
        machine=machine,
        parameters=sum(layout.num_parameters for layout in model.layouts),
        computing=model.computing,
        tokens_per_step=rows * measured.tokens,
        sequence_length=measured.tokens,
        micro_batch=micro_batch,
        seconds=end - begin,
        spans=spans,
        bounds={name: sum(s.seconds for s in spans if s.stream == name) for name in _BOUNDS},
        device_bytes=on_device,
        host_bytes=host,
    )


def _device_bytes(ledger: Ledger, machine: Machine, placement: Placement) -> dict[str, int]:
    """Bytes of device memory at the peak by part: a ledger's, and libraries, allocator, context."""
    on_device = {place: num_bytes for place, num_bytes in ledger.peak_live.items() if num_bytes}
    context = machine.device_context_bytes
    kept_places = (Place.KEPT_GRAPHS, Place.KEPT_ATTENTION, Place.ACTIVATIONS)
    waiting = sum(on_device.get(place, 0) for place in kept_places)
    allocator = _ALLOCATOR * context + _ALLOCATOR_WAITING * waiting
    if placement.chunk_tokens is not None:
        allocator += _ALLOCATOR_FRAGMENTS * on_device.get(Place.WORKING_SET, 0)
    on_device |= {"libraries": int(_WORKSPACES * context), "allocator": int(allocator)}
    return on_device | {"context": context}


def _most_groups(placement: Placement, steps: int) -> int:
    """The most groups into which a forecast of `steps` joins the micro-batches of a step."""
    on_host = "host" in (placement.layer_inputs, placement.save_attention)
    if not on_host and not placement.offload_activations:
        return 1
    return _FOLLOWED if steps >= STEADY else _FOLLOWED_FOR_MEMORY


def process_bytes(
    model: Model, placement: Placement, measured: Profile, allocated_later: int
) -> int:
    """Bytes of the process beside planes and buffers: while it trains or, if more, while it loads.

    While it loads, `allocated_later` bytes are not taken yet, but weights are on their way to the
    planes: random ones that are drawn at once, in fp32, with copies of a parameter for the device
    (in bf16, two if it is trained); or those that are read from files at once.
    """
    resident = set(placement.resident)
    parameters = [e for layout in model.layouts if layout.name in resident for e in layout.entries]
    copies_bytes = (2 * prod(e.shape) * (1 if e.group is None else 2) for e in parameters)
    random_bytes = 4 * measured.drawn + max(copies_bytes, default=0)
    read_bytes = min(IN_FLIGHT_BYTES, 4 * sum(layout.numel for layout in model.layouts))
    loading_bytes = _EARLY_PROCESS_BYTES + max(random_bytes, read_bytes) - allocated_later
    return max(PROCESS_BYTES, loading_bytes)


def assembled(
    device: Device, model: Model, placement: Placement, measured: Profile | None = None, **rest: Any
) -> Assembly:
    """Make an `Assembly` for a forecast, without a model. `rest`: its further arguments."""

    def repeats(visit: int, batch: MicroBatch) -> bool:
        assert measured is not None
        return measured.layer(visit, batch.inputs["input_ids"].shape[0]).repeating is not None

    dtype, spec = DTYPES[model.precision], model.spec
    store = Store(device, model.layouts, dtype, rule=model.rule, placement=placement)
    program = SimpleNamespace(spec=spec, capture=spec.capture, repeats=repeats)
    uncompiled = replace(placement, compile=False, chunk_tokens=None)
    return Assembly(device, cast("ModelProgram", program), store, dtype, uncompiled, **rest)


class CoarseSink(Sink):
    """Sends a gradient in fewer, larger pieces than a `Sink`, through as much device memory."""

    def _lane_numel(self, layer: int, lanes: int | None) -> int:
        """Elements of a lane: more than a `Sink`'s if all pieces of the largest layer have one."""
        return PIECE if lanes else max(PIECE, -(-align(layer, PIECE) // _PIECES))

    def _pieces(self, numel: int) -> Iterator[tuple[int, int]]:
        """Starts and stops of pieces: as large as a `Sink`'s in the first and the last lanes.

        A gradient's start and end decide when other work waits. Each piece between may have
        `_GROWTH` times the elements of the one before.
        """
        size, lanes_numel = self._piece, len(self._lanes) * self._piece
        start, stop = 0, min(size, numel)
        yield start, stop
        while stop < numel:
            grown = _GROWTH * (stop - start) // size * size if stop >= lanes_numel else size
            next_numel = max(size, min(grown, numel - lanes_numel - stop))
            start, stop = stop, min(stop + next_numel, numel)
            yield start, stop

    def _round(self, accumulator: GradAccumulator, part: slice, to: Buffer) -> None:
        data = torch.empty(part.stop - part.start, dtype=to.data.dtype, device="meta")
        super()._round(accumulator, part, Buffer(to.name, data))


class _WholeSink(CoarseSink):
    """Sends a gradient in one piece, through as much device memory as a `Sink`."""

    def _pieces(self, numel: int) -> Iterator[tuple[int, int]]:
        yield 0, numel


class _CoarseDiskStaging(DiskStaging):
    """Moves a tile in fewer, larger pieces than `DiskStaging`, through as much host memory."""

    def __init__(self, device: Device, tiles: Sequence[Tile]) -> None:
        super().__init__(device, tiles)
        largest = max((tile.own_numel for tile in tiles), default=0)
        self._piece = max(self._piece, align(-(-largest // _DISK_PIECES), self._piece))

    def _move(self, stream: str, pairs: Sequence[tuple[Buffer, Buffer]]) -> None:
        """Put the copies on a stream as one, which takes as long."""
        num_bytes = sum(to.data.nbytes for to, _ in pairs)
        together = Buffer("planes", torch.empty(num_bytes, dtype=torch.uint8, device="meta"))
        self._device.copy(stream, together, together)

    def _lane_buffers(self, lane: Lane, parts: Mapping[Plane, Buffer]) -> dict[Plane, Buffer]:
        return dict(parts)
