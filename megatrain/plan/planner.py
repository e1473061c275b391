"""The plan of a run: its memory, time and bottleneck, and remedies if it does not fit.

A remedy is a changed workload, or another machine, with a forecast that fits. Changes are tried
alone and together, the cheapest first.
"""

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from megatrain.autoplace.search import could_fit, fastest, least
from megatrain.base.units import GIB, align, size
from megatrain.device.base import COMPUTE
from megatrain.errors import DoesNotFit
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.notes import Notes
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.machine import DISK_READ_GBPS, DISK_WRITE_GBPS, Machine, machine_for
from megatrain.model.spec import ModelSpec
from megatrain.optim import AdamW, PlaneKind, gradient_plane, tile_planes
from megatrain.placement import Placement
from megatrain.source.tiles import Model
from megatrain.store.store import Tier, resting
from megatrain.telemetry.console import PASSING
from megatrain.telemetry.gpu import KnownGpu, by_driver_name, known_gpus
from megatrain.tile import TileKind

PLANES = tuple(kind.value for kind in PlaneKind)

_log = logging.getLogger(__name__)

_NO_DISK_RATES = (
    f"no rate of the disk is measured here: taken to read {DISK_READ_GBPS} GB/s and write "
    f"{DISK_WRITE_GBPS}, not both at once (megatrain doctor --folder FOLDER measures them)"
)
_A_DISK_WOULD_DO = (
    "it likely fits with planes on a disk, which is far slower (--disk-space 2TiB here tells by "
    "how much; engine.disk: FOLDER in a run file)"
)
SHOWN = 3
_TRIED = 2  # likely remedies whose full plans are tried: such plans take long
_SHORTEST = 256  # tokens of a row

# Changes with which a workload needs less memory, from the cheapest to the dearest.
_CHANGES = "one row", "auto", "bf16", "fewer tokens", "int8 moments", "no clipping", "shorter rows"
Fitting = Iterator[tuple[Workload, Forecast]]  # workloads that fit the machine of their forecast


class Planner:
    """Forecasts of one model, for a workload's placement or the best one; each is computed once."""

    def __init__(self, spec: ModelSpec, notes: Notes | None = None) -> None:
        self._forecasts = ForecastCache(spec, notes)

    def fitting(
        self, machine: Machine, workload: Workload, *, thorough: bool = True
    ) -> Forecast | None:
        """The fastest forecast that fits; None: none does. If not `thorough`, the first one."""
        if not self.could_fit(machine, workload):
            return None
        if workload.placement is not None:
            return self._placed(machine, workload)
        with suppress(DoesNotFit):
            best = fastest(self._forecasts, machine, workload.computed, thorough=thorough)
            return replace(best, machine=machine) if machine.one_memory else best  # undivided
        return None

    def least(self, machine: Machine, workload: Workload) -> Forecast:
        """The forecast that lacks least memory, on a machine enlarged to hold it."""
        if workload.placement is None:
            return least(self._forecasts, machine, workload.computed)
        forecast = self._placed(machine, workload)
        enlarged = replace(
            machine,
            device_memory_bytes=max(forecast.device_peak_bytes, machine.device_memory_bytes),
            host_memory_bytes=max(forecast.host_peak_bytes, machine.host_memory_bytes),
        )
        return replace(forecast, machine=enlarged)

    def could_fit(self, machine: Machine, workload: Workload) -> bool:
        """True if a placement likely fits; far quicker than `fitting`."""
        if workload.placement is None:
            return could_fit(self._forecasts, machine, workload.computed)
        return fits(self._placed(machine, workload), machine)

    def _placed(self, machine: Machine, workload: Workload) -> Forecast:
        assert workload.placement is not None
        rows = workload.usual_micro_batch
        return self._forecasts.of(machine, workload.placement, workload.computed, rows)


def fits(forecast: Forecast, machine: Machine) -> bool:
    """True if a step takes no more memory than the machine has."""
    device_lacks = forecast.device_peak_bytes - machine.device_memory_bytes
    host_lacks = forecast.host_peak_bytes - machine.host_memory_bytes
    return (device_lacks + host_lacks if machine.one_memory else max(device_lacks, host_lacks)) <= 0


@dataclass(frozen=True)
class Remedy:
    """The workload `new` in place of `asked`, with a forecast on the machine that `new` needs."""

    asked: Workload
    machine: Machine
    new: Workload
    forecast: Forecast

    @property
    def text(self) -> str:
        *earlier, last = [words for words, _ in self._changes()]
        return f"{', '.join(earlier)} and {last}" if earlier else last

    @property
    def settings(self) -> dict[str, Any]:
        """The changes as keys and values of a run file; empty for another GPU."""
        return {key: v for _, settings in self._changes() for key, v in settings.items()}

    def as_dict(self) -> dict[str, Any]:
        names = ("seconds", "tokens_per_second", "device_peak_bytes", "host_peak_bytes")
        figures = {name: getattr(self.forecast, name) for name in names}
        return {"text": self.text, "settings": self.settings, **figures}

    def _changes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each change in words and in keys of a run file, cheapest first."""
        old, new = self.asked, self.new
        rows_per_example = getattr(new.loss, "lines", 1)
        batch_size = {"training.batch_size": new.rows // rows_per_example}
        if old.micro_batch != new.micro_batch:
            rows = "one row" if new.micro_batch == 1 else f"{new.micro_batch} rows"
            words = f"take micro-batches of {rows}"
            if new.micro_batch is None:
                words = "leave micro-batches to MegaTrain"
            examples = new.micro_batch and new.micro_batch // rows_per_example
            yield words, {"training.micro_batch_size": examples}
        if old.placement != new.placement:
            yield "leave the placement to MegaTrain", {"engine.placement": "auto"}
        if old.precision != new.precision:
            words = "compute in bf16 (masters and moments stay fp32)"
            yield words, {"engine.precision": new.precision}
        if old.tokens_per_step != new.tokens_per_step:
            yield f"take {new.tokens_per_step:,} tokens a step", batch_size
        if old.rule != new.rule:
            yield "keep AdamW's moments as 8-bit codes", {"optimizer.states": "int8"}
        if old.clip != new.clip:
            yield "do not clip gradients", {"training.max_grad_norm": None}
        if (length := new.sequence_length) != old.sequence_length:
            settings = {"data.sequence_length": length} | batch_size
            yield f"take sequences of {length:,} tokens", settings
        present, needed = self.machine, self.forecast.machine
        if present.one_memory and needed.name == present.name:
            if needed.both_bytes > present.both_bytes:
                yield f"take a machine with {_gib_to_buy(needed)} GiB of memory", {}
            return
        device, host = size(needed.device_memory_bytes), size(needed.host_memory_bytes)
        let_it_use = "let it use "  # said once
        if needed.name != present.name:
            gpu = needed.name.partition(",")[0]
            yield f"take a larger GPU, {gpu} ({_most_bytes_sold(needed) / GIB:.0f} GiB)", {}
        elif needed.device_memory_bytes != present.device_memory_bytes:
            yield f"{let_it_use}{device} of device memory", {"engine.device_memory": device}
            let_it_use = ""
        if needed.host_memory_bytes != present.host_memory_bytes:
            yield f"{let_it_use}{host} of host memory", {"engine.host_memory": host}


def remedies(
    plans: Planner, machine: Machine, asked: Workload, least: Forecast, *, must_clip: bool = False
) -> list[Remedy]:
    """At most three remedies that fit, those that need least hardware first.

    Args:
        least: the forecast that lacks least memory, on a machine enlarged to hold it.
        must_clip: keep clipping on, as the run refuses steps by their gradient norm.
    """
    changes = [change for change in _CHANGES if not (must_clip and change == "no clipping")]
    fitting = islice(_fitting(plans, machine, asked, least, changes), SHOWN)
    listed = [Remedy(asked, machine, new, forecast) for new, forecast in fitting]

    def hardware(remedy: Remedy) -> tuple[bool, int, int]:
        needed = remedy.forecast.machine  # another GPU is dearest, then its memory
        gpu_bytes = needed.both_bytes if machine.one_memory else needed.device_memory_bytes
        return needed.name != machine.name, gpu_bytes, needed.host_memory_bytes

    return sorted(listed, key=hardware)


def compute_bound_tokens(bounds: Mapping[str, float], tokens: int, sequence_length: int) -> int:
    """The fewest tokens a step, in whole rows, with which arithmetic takes longest."""
    longest = max((seconds for name, seconds in bounds.items() if name != COMPUTE), default=0.0)
    least_tokens = tokens * longest / bounds[COMPUTE]
    return max(1, math.ceil(least_tokens / sequence_length)) * sequence_length


def _fitting(
    plans: Planner, machine: Machine, asked: Workload, least: Forecast, changes: Sequence[str]
) -> Fitting:
    """Workloads that fit: by one change, several together, more memory, or another GPU."""
    insufficient = []  # changes that do not suffice alone
    for change in changes:
        fitting = [*_changed(plans, machine, asked, [change])]
        insufficient += [] if fitting else [change]
        yield from fitting
    yield from _changed(plans, machine, asked, insufficient)
    device, host = _limits_for(machine, least.machine)
    if machine.one_memory:
        if _gib_to_buy(least.machine) * GIB <= _most_bytes_sold(machine):
            yield asked, least
    elif device <= max(machine.device_memory_bytes, _most_bytes_sold(machine)):
        larger = replace(machine, device_memory_bytes=device, host_memory_bytes=host)
        yield asked, replace(least, machine=larger)
    yield from _on_a_larger_gpu(plans, machine, asked, least)


def _changed(plans: Planner, machine: Machine, asked: Workload, changes: Sequence[str]) -> Fitting:
    """The least changed workload that fits, by these changes; nothing if none does."""
    failed = [asked]

    def could_fit(new: Workload) -> bool:
        return new not in failed and plans.could_fit(machine, new)

    while len(failed) <= _TRIED and (new := _mildest(could_fit, asked, changes)) is not None:
        if (forecast := plans.fitting(machine, new, thorough=False)) is not None:
            yield new, forecast
            return
        failed.append(new)


def _mildest(
    could_fit: Callable[[Workload], bool], asked: Workload, changes: Sequence[str]
) -> Workload | None:
    """The least changed workload that could fit; None: none could.

    `changes` go from the cheapest to the dearest; the dearest are made as little as possible.
    """

    def fits_with_most_of(cheaper: Sequence[str], workload: Workload) -> bool:
        for change in cheaper:
            workload = [workload, *_levels(change, workload)][-1]  # the last level, if any
        return could_fit(workload)

    # The dearest changes are left out if the others suffice; other lengths of rows would also have
    # to be measured.
    while changes and fits_with_most_of(changes[:-1], asked):
        changes = changes[:-1]
    if not changes or not fits_with_most_of(changes, asked):
        return None
    for number in reversed(range(len(changes))):
        # The last level fits, and so does each level after one that fits.
        levels = [asked, *_levels(changes[number], asked)]
        key = partial(fits_with_most_of, changes[:number])
        asked = levels[bisect_left(levels, True, hi=len(levels) - 1, key=key)]
    return asked


def _limits_for(machine: Machine, needed: Machine) -> tuple[int, int]:
    """Bytes of device and host: the machine's where they suffice, else `needed` in round GiB."""
    device, host = needed.device_memory_bytes, needed.host_memory_bytes
    return (
        device if device == machine.device_memory_bytes else align(10 * device, GIB) // 10,
        host if host == machine.host_memory_bytes else align(host, GIB),
    )


def _gib_to_buy(machine: Machine) -> int:
    """GiB with which a machine of one memory is sold that leaves `machine.both_bytes` to work."""
    gpu = _known_gpu(machine)
    return math.ceil(machine.both_bytes / GIB / (1 if gpu is None else gpu.shared))


def _known_gpu(machine: Machine) -> KnownGpu | None:
    """The machine's GPU in our list, by its name there (M4 Max, say) or the driver's."""
    name = machine.name.partition(",")[0]
    return next((gpu for gpu in known_gpus() if gpu.name == name), by_driver_name(name))


def _most_bytes_sold(machine: Machine) -> float:
    """The most bytes with which this GPU is sold; infinite if the GPU is unknown."""
    gpu = _known_gpu(machine)
    return math.inf if gpu is None else gpu.memory_gib * GIB


def _on_a_larger_gpu(plans: Planner, machine: Machine, asked: Workload, least: Forecast) -> Fitting:
    """The workload on the smallest GPU with which it fits; planes of the host may rest there."""
    device, host = _limits_for(machine, least.machine)
    if device == machine.device_memory_bytes:
        lacking = least.machine.host_memory_bytes - machine.host_memory_bytes
        device, host = device + lacking, machine.host_memory_bytes
    by_speed = sorted((g for g in known_gpus() if not g.shared), key=lambda g: g.bf16_tflops)
    fastest_by_memory = {gpu.memory_gib: gpu for gpu in by_speed}  # the last one of each memory
    for _, gpu in sorted(fastest_by_memory.items()):
        larger = machine_for(gpu.name, host, machine.cores, precision=asked.precision)
        if larger.device_memory_bytes < device:
            continue
        if (forecast := plans.fitting(larger, asked, thorough=False)) is not None:
            yield asked, forecast
            return


def _levels(change: str, asked: Workload) -> list[Workload]:
    """Workloads that need ever less by a change, the mildest first."""
    placement, rows_per_example = asked.placement, getattr(asked.loss, "lines", 1)
    changed: list[Workload] = []
    if change == "one row" and placement is not None and asked.micro_batch is not None:
        changed = [replace(asked, micro_batch=rows_per_example)]
    elif change == "auto":
        automatic = replace(asked, placement=None)
        changed = [automatic, replace(automatic, micro_batch=None)]
    elif change == "bf16" and asked.precision == "fp32":
        changed = [replace(asked, precision="bf16")]
    elif change == "fewer tokens":
        for examples in _halves(asked.rows // rows_per_example, 1):
            rows = examples * rows_per_example
            micro_batch = None if asked.micro_batch is None else min(asked.micro_batch, rows)
            tokens = rows * asked.sequence_length
            changed.append(replace(asked, tokens_per_step=tokens, micro_batch=micro_batch))
    elif change == "int8 moments" and isinstance(asked.rule, AdamW):
        changed = [replace(asked, rule=replace(asked.rule, states="int8"))]
    elif change == "no clipping":
        changed = [replace(asked, clip=False)]
    elif change == "shorter rows":
        shortest = max(_SHORTEST, 0 if asked.media is None else asked.media.length)
        lengths = _halves(asked.sequence_length, shortest)
        changed = [replace(asked, sequence_length=length) for length in lengths]
    return [workload for workload in changed if workload != asked]


def _halves(number: int, least: int) -> Iterator[int]:
    while (number := number // 2) >= least:
        yield number


@dataclass(frozen=True)
class TileBytes:
    """Equal tiles that rest in the same place."""

    name: str  # `layer 2`, `layer 2 ... layer 27`, or `9 of layer 2 ... layer 27`.
    count: int
    parameters: int  # of one tile
    tier: str
    # bytes of one tile by plane; gradients that share memory (no clipping) do not count
    planes: dict[str, int]
    disk: tuple[str, ...] = ()  # planes that rest on the disk instead of `tier`
    stays: bool = False
    written: int = 0  # bytes that an update of one tile writes to the disk

    @property
    def total_bytes(self) -> int:
        return self.count * sum(self.planes.values())

    def as_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "written"}
        return values | {"total_bytes": self.total_bytes}


@dataclass(frozen=True)
class Plan:
    """The plan of a workload on a machine."""

    workload: Workload
    machine: Machine  # its memory is the most that the process may take
    forecast: Forecast  # of the workload; if it does not fit, on a machine with just enough memory
    fits: bool
    remedies: Sequence[Remedy]
    tiles: Sequence[TileBytes]
    compute_bound_tokens: int  # tokens a step from which on the GPU's arithmetic is the bottleneck
    total_tokens: int | None  # of the run, if known
    # several, disk: `several_gpus` and `disk_use` of the step
    several: dict[str, Any] | None
    disk: dict[str, Any] | None = None
    warnings: Sequence[str] = field(default_factory=list)

    @property
    def missing_device_bytes(self) -> int:
        """Device memory that the machine lacks; for one with a single memory, all that it lacks."""
        place = "both_bytes" if self.machine.one_memory else "device_memory_bytes"
        needed, present = (getattr(m, place) for m in (self.forecast.machine, self.machine))
        return 0 if self.fits else needed - present

    @property
    def missing_host_bytes(self) -> int:
        """Host memory that the machine lacks; 0 for one with a single memory."""
        lacking = self.forecast.machine.host_memory_bytes - self.machine.host_memory_bytes
        return 0 if self.fits or self.machine.one_memory else lacking

    @property
    def tokens_per_second(self) -> float:
        """The rate of the run, of all GPUs together."""
        if self.several:
            return float(self.several["tokens_per_second"])
        return self.forecast.tokens_per_second

    @property
    def run_seconds(self) -> float | None:
        """Seconds of the whole run, evaluations and saving not counted; None: unknown."""
        return self.total_tokens and self.total_tokens / self.tokens_per_second

    def as_dict(self) -> dict[str, Any]:
        names = (
            *("fits", "missing_device_bytes", "missing_host_bytes", "compute_bound_tokens"),
            *("total_tokens", "run_seconds", "warnings", "disk"),
        )
        return {name: getattr(self, name) for name in names} | {
            "remedies": [remedy.as_dict() for remedy in self.remedies],
            "device_memory_bytes": self.machine.device_memory_bytes,
            "host_memory_bytes": self.machine.host_memory_bytes,
            "clip": self.workload.clip,
            "precision": self.workload.precision,
            "tiles": [tile.as_dict() for tile in self.tiles],
            "bytes_by_tier": by_tier(self.tiles),
            "several_gpus": self.several,
            "forecast": self.forecast.as_dict(),
        }


def make_plan(
    spec: ModelSpec,
    machine: Machine,
    workload: Workload,
    *,
    total_tokens: int | None = None,
    gpus: int = 1,
    must_clip: bool = False,
    warnings: Sequence[str] = (),
    notes: Notes | None = None,
) -> Plan:
    """Plan a run on `gpus` of a host; with `must_clip` no remedy switches clipping off."""
    plans = Planner(spec, notes)
    warnings = list(warnings)
    _log.log(PASSING, "looking for the fastest way that fits...")
    forecast = plans.fitting(machine, workload)
    fits = forecast is not None
    if forecast is None:
        _log.log(PASSING, "it does not fit; looking for the least memory with which it would...")
        forecast = plans.least(machine, workload)
        fits = machine.one_memory and forecast.machine.both_bytes <= machine.both_bytes
    tiles = tile_bytes(spec, forecast.placement, workload)
    disk = disk_use(tiles, forecast.seconds, forecast.placement.passes)
    if disk is not None and machine.disk_read_gbps is None:
        warnings.append(_NO_DISK_RATES)
    lacks_host = forecast.machine.host_memory_bytes > machine.host_memory_bytes
    may_suggest_disk = workload.placement is None and not machine.disk_space_bytes
    with_disk = replace(machine, disk_space_bytes=1 << 60)
    if not fits and lacks_host and may_suggest_disk and plans.could_fit(with_disk, workload):
        warnings.append(_A_DISK_WOULD_DO)
    several = several_gpus(plans, machine, workload, gpus) if gpus > 1 else None
    if gpus > 1 and several is None:
        warnings.append(f"split among {gpus} GPUs the step does not fit on one of them")
    if not fits:
        _log.log(PASSING, "it does not fit; looking for what would...")
    return Plan(
        workload=workload,
        machine=machine,
        forecast=forecast,
        fits=fits,
        remedies=[] if fits else remedies(plans, machine, workload, forecast, must_clip=must_clip),
        tiles=tiles,
        compute_bound_tokens=compute_bound_tokens(
            forecast.bounds, forecast.tokens_per_step, forecast.sequence_length
        ),
        total_tokens=total_tokens,
        several=several,
        disk=disk,
        warnings=warnings,
    )


def several_gpus(
    plans: Planner, machine: Machine, workload: Workload, gpus: int
) -> dict[str, Any] | None:
    """The forecast of the same step split among `gpus` of one host; None: it does not fit.

    An unknown link between GPUs (`link_gbps` None) counts as half of a GPU's bus. `device_bytes`
    are of one GPU, `host_bytes` of all processes.
    """
    forecast = plans.fitting(machine.shared(gpus, machine.link_gbps), workload.shared(gpus))
    if forecast is None:
        return None
    return {
        "gpus": gpus,
        "seconds": forecast.seconds,
        "binds": forecast.binds,
        "tokens_per_second": workload.tokens_per_step / forecast.seconds,
        "device_bytes": forecast.device_peak_bytes,
        "host_bytes": forecast.host_peak_bytes * gpus,
    }


def tile_bytes(spec: ModelSpec, placement: Placement, workload: Workload) -> list[TileBytes]:
    """The tiles of a training run; equal layers that rest in the same place are one entry."""
    layouts = Model(spec, workload.rule, precision=workload.precision).layouts
    lasting, gradient = tile_planes(workload.rule, workload.dtype), gradient_plane(workload.dtype)
    groups: dict[tuple, list[int]] = {}
    for index, (layout, rests) in enumerate(zip(layouts, resting(placement, layouts), strict=True)):
        planes = dict.fromkeys(PLANES, 0)
        for plane in lasting:
            planes[plane.kind.value] += plane.num_bytes(layout)
        waits = workload.clip and not workload.rule.directs(layout)
        if waits or rests.gradient is Tier.DEVICE:
            planes[gradient.kind.value] = gradient.num_bytes(layout)
        name = "" if layout.kind is TileKind.LAYER else layout.name
        written = sum(
            plane.place(0, layout.trainable_numel).stop * plane.dtype.itemsize
            for plane in lasting
            if layout.trainable_numel and rests.tier(plane) is Tier.DISK
        )
        if layout.numel:
            groups.setdefault((name, rests, tuple(planes.items()), written), []).append(index)
    tiles = []
    for (_, rests, planes, written), indices in groups.items():
        first, last, count = layouts[indices[0]], layouts[indices[-1]], len(indices)
        name = " ... ".join(dict.fromkeys((first.name, last.name)))
        consecutive = count == indices[-1] - indices[0] + 1
        tiles.append(
            TileBytes(
                name=name if consecutive else f"{count} of {name}",
                count=count,
                parameters=first.num_parameters,
                tier="device" if rests.weights is Tier.DEVICE else "host",
                planes=dict(planes),
                disk=tuple(name for name in PLANES if getattr(rests, name) is Tier.DISK),
                stays=rests.stays,
                written=written,
            )
        )
    return tiles


def by_tier(tiles: Sequence[TileBytes]) -> dict[str, dict[str, int]]:
    """Bytes of each plane on the device, the host and the disk."""
    tiers = {tier: dict.fromkeys(PLANES, 0) for tier in ("device", "host", "disk")}
    for tile in tiles:
        for plane, num_bytes in tile.planes.items():
            tier = "disk" if plane in tile.disk else tile.tier
            tiers[tier][plane] += tile.count * num_bytes
    return tiers


def disk_use(tiles: Sequence[TileBytes], seconds: float, passes: int = 1) -> dict[str, Any] | None:
    """The disk traffic of a step of `seconds`; None: no planes rest on a disk."""
    on_disk, written = by_tier(tiles)["disk"], sum(tile.count * tile.written for tile in tiles)
    if not (num_bytes := sum(on_disk.values())):
        return None
    return {
        "num_bytes": num_bytes,
        "read_bytes_a_step": written + 2 * passes * on_disk["weights"],
        "written_bytes_a_step": written,
        "written_terabytes_a_day": written / 1e12 * 86400 / seconds,  # as drives are sold
    }
