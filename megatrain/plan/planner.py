"""The plan of a run: if it fits, its memory and time, its bottleneck, and remedies."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.forecast.notes import Notes
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.machine import DISK_READ_GBPS, DISK_WRITE_GBPS, Machine
from megatrain.model.spec import ModelSpec
from megatrain.optim import PlaneKind, gradient_plane, tile_planes
from megatrain.placement import Placement
from megatrain.plan.remedies import Planner, Remedy, compute_bound_tokens, remedies
from megatrain.source.tiles import Model
from megatrain.store.store import Tier, resting
from megatrain.telemetry.console import PASSING
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


@dataclass(frozen=True)
class TileBytes:
    """Equal tiles that rest in the same place.

    Attributes:
        name: `layer 2`, `layer 2 ... layer 27`, or `9 of layer 2 ... layer 27`.
        disk: planes that rest on the disk instead of `tier`.
        written: bytes that an update of one tile writes to the disk.
        parameters, planes: of one tile. Gradients that share room (no clipping) do not count.
    """

    name: str
    count: int
    parameters: int
    tier: str
    planes: dict[str, int]
    disk: tuple[str, ...] = ()
    stays: bool = False
    written: int = 0

    @property
    def total_bytes(self) -> int:
        return self.count * sum(self.planes.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
        values = {name: value for name, value in vars(self).items() if name != "written"}
        return values | {"total_bytes": self.total_bytes}


@dataclass(frozen=True)
class Plan:
    """The needs of a workload on a machine.

    Attributes:
        machine: its memory is the most that the process may take.
        forecast: as asked; if it does not fit, on a machine with just enough memory.
        compute_bound_tokens: tokens a step from which on the GPU's arithmetic is the bottleneck.
        several, disk: `several_gpus` and `disk_use` of the step.
    """

    workload: Workload
    machine: Machine
    forecast: Forecast
    fits: bool
    remedies: Sequence[Remedy]
    tiles: Sequence[TileBytes]
    compute_bound_tokens: int
    total_tokens: int | None
    several: dict[str, Any] | None
    disk: dict[str, Any] | None = None
    warnings: Sequence[str] = field(default_factory=list)

    @property
    def missing_device_bytes(self) -> int:
        """Of one memory, all that is missing."""
        place = "both_bytes" if self.machine.one_memory else "device_memory_bytes"
        needed, now = (getattr(m, place) for m in (self.forecast.machine, self.machine))
        return 0 if self.fits else needed - now

    @property
    def missing_host_bytes(self) -> int:
        lacking = self.forecast.machine.host_memory_bytes - self.machine.host_memory_bytes
        return 0 if self.fits or self.machine.one_memory else lacking

    @property
    def tokens_per_second(self) -> float:
        """The rate of the run, by all GPUs."""
        if self.several:
            return float(self.several["tokens_per_second"])
        return self.forecast.tokens_per_second

    @property
    def run_seconds(self) -> float | None:
        """Seconds of the whole run, evaluations and saving not counted; None: unknown."""
        return self.total_tokens and self.total_tokens / self.tokens_per_second

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
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
    """Plan a run on `gpus` of a host; with `must_clip` no remedy may switch clipping off."""
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
    free = workload.placement is None and not machine.disk_space_bytes
    on_disk = replace(machine, disk_space_bytes=1 << 60)
    if not fits and lacks_host and free and plans.could_fit(on_disk, workload):
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
    """The same step, split among `gpus` of one host, from the view of one rank.

    An unknown link between GPUs counts as half of a GPU's bus. `device_bytes` are of one GPU,
    `host_bytes` of all processes. None: it does not fit.
    """
    share = machine.shared(gpus, machine.link_gbps)
    forecast = plans.fitting(share, workload.shared(gpus))
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
    """All tiles of a training run, equal layers together."""
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
            key = name, rests, tuple(planes.items()), written
            groups.setdefault(key, []).append(index)
    tiles = []
    for (_, rests, planes, written), indices in groups.items():
        first, last, count = layouts[indices[0]], layouts[indices[-1]], len(indices)
        name = " ... ".join(dict.fromkeys((first.name, last.name)))
        is_row = count == indices[-1] - indices[0] + 1
        tiles.append(
            TileBytes(
                name=name if is_row else f"{count} of {name}",
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
    """A disk's use by a step of `seconds`; None: nothing rests on one. Sweeps read the weights."""
    on_disk, written = by_tier(tiles)["disk"], sum(tile.count * tile.written for tile in tiles)
    if not (num_bytes := sum(on_disk.values())):
        return None
    return {
        "num_bytes": num_bytes,
        "read_bytes_a_step": written + 2 * passes * on_disk["weights"],
        "written_bytes_a_step": written,
        "written_terabytes_a_day": written / 1e12 * 86400 / seconds,  # as drives are sold
    }
