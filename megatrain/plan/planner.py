"""The plan of a run: if it fits, its memory and time, its bottleneck, and remedies."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.checkpoint import spare_bytes_of, useful_bytes
from megatrain.device.base import HOSTS
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.machine import DISK_READ_GBPS, DISK_WRITE_GBPS, NETWORK_GBPS, Machine
from megatrain.model.spec import ModelSpec
from megatrain.plan.remedies import Planner, Remedy, compute_bound_tokens, remedies
from megatrain.plan.tiles import TileBytes, by_tier, disk_use, tile_bytes
from megatrain.telemetry.log import PASSING

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
class Plan:
    """The needs of a workload on a machine.

    Attributes:
        machine: its memory is the most that the process may take.
        forecast: as asked; if it does not fit, on a machine with just enough memory.
        compute_bound_tokens: tokens a step from which on the GPU's arithmetic is the bottleneck.
        total_tokens: of the whole run, where they are known.
        several: `several_gpus` of the step; None: it is not split, or does not fit then.
        disk: `disk_use` of the step; None: nothing rests on one.
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
        lacking = self.forecast.machine.device_memory_bytes - self.machine.device_memory_bytes
        return 0 if self.fits else lacking

    @property
    def missing_host_bytes(self) -> int:
        lacking = self.forecast.machine.host_memory_bytes - self.machine.host_memory_bytes
        return 0 if self.fits else lacking

    @property
    def tokens_per_second(self) -> float:
        """The rate of the run, by all GPUs."""
        return (
            self.several["tokens_per_second"] if self.several else self.forecast.tokens_per_second
        )

    @property
    def run_seconds(self) -> float | None:
        """Seconds of the whole run, evaluations and saving not counted; None: unknown."""
        return self.total_tokens and self.total_tokens / self.tokens_per_second

    @property
    def save_bytes(self) -> int:
        """Further host memory, in bytes, that background saves take from the first one on."""
        most = self.forecast.placement.save_bytes
        if most is None:
            free = self.machine.host_memory_bytes - self.forecast.host_peak_bytes
            most = spare_bytes_of(max(0, free))
        saved = [plane for tile in self.tiles for plane in tile.count * tile.saved]
        return min(most, useful_bytes(saved))

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
        return {
            "fits": self.fits,
            "missing_device_bytes": self.missing_device_bytes,
            "missing_host_bytes": self.missing_host_bytes,
            "remedies": [remedy.as_dict() for remedy in self.remedies],
            "device_memory_bytes": self.machine.device_memory_bytes,
            "host_memory_bytes": self.machine.host_memory_bytes,
            "clip": self.workload.clip,
            "precision": self.workload.precision,
            "tiles": [tile.as_dict() for tile in self.tiles],
            "bytes_by_tier": by_tier(self.tiles),
            "compute_bound_tokens": self.compute_bound_tokens,
            "total_tokens": self.total_tokens,
            "run_seconds": self.run_seconds,
            "several_gpus": self.several,
            "warnings": list(self.warnings),
            "save_bytes": self.save_bytes,
            "disk": self.disk,
            "forecast": self.forecast.as_dict(),
        }


def make_plan(
    spec: ModelSpec,
    machine: Machine,
    workload: Workload,
    *,
    total_tokens: int | None = None,
    gpus: int = 1,
    hosts: int = 1,
    network_gbps: float | None = None,
    disk_terabytes: float | None = None,
    must_clip: bool = False,
    warnings: Sequence[str] = (),
) -> Plan:
    """Plan a run.

    Args:
        gpus: on each of `hosts`, with `network_gbps` from one host to the others, each way.
        disk_terabytes: the TBW (total written) of the drive that holds planes.
        must_clip: no remedy may switch clipping off.
    """
    plans = Planner(spec)
    warnings = list(warnings)
    _log.log(PASSING, "looking for the fastest way that fits...")
    forecast = plans.fitting(machine, workload)
    fits = forecast is not None
    if forecast is None:
        _log.log(PASSING, "it does not fit; looking for the least memory with which it would...")
        forecast = plans.least(machine, workload)
    tiles = tile_bytes(spec, forecast.placement, workload)
    disk = disk_use(tiles, forecast.seconds, disk_terabytes, forecast.placement.passes)
    if disk is not None and machine.disk_read_gbps is None:
        warnings.append(_NO_DISK_RATES)
    lacks_host = forecast.machine.host_memory_bytes > machine.host_memory_bytes
    free = workload.placement is None and not machine.disk_space_bytes
    on_disk = replace(machine, disk_space_bytes=1 << 60)
    if not fits and lacks_host and free and plans.could_fit(on_disk, workload):
        warnings.append(_A_DISK_WOULD_DO)
    several = None
    if gpus * hosts > 1:
        several = several_gpus(plans, machine, workload, gpus, hosts, network_gbps)
        if several is None:
            warnings.append(f"split among {gpus * hosts} GPUs the step does not fit on one of them")
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
    plans: Planner,
    machine: Machine,
    workload: Workload,
    gpus: int,
    hosts: int = 1,
    network_gbps: float | None = None,
) -> dict[str, Any] | None:
    """The same step, split among `gpus` on each of `hosts`, from the view of one rank.

    An unknown link between GPUs counts as half of a GPU's bus. The network of a host
    is shared by its GPUs; an unknown one has `NETWORK_GBPS`.

    Returns:
        Plain data, for `--json`: `device_bytes` of one GPU at the step's peak, `host_bytes` of all
        processes of one host, `network_seconds` of the step, in which gradients are summed between
        hosts. None: it does not fit.
    """
    network = (network_gbps or NETWORK_GBPS) / gpus
    share = machine.shared(gpus, machine.link_gbps, network)
    forecast = plans.fitting(share, workload.shared(gpus, hosts))
    if forecast is None:
        return None
    return {
        "gpus": gpus,
        "hosts": hosts,
        "seconds": forecast.seconds,
        "binds": forecast.binds,
        "tokens_per_second": workload.tokens_per_step / forecast.seconds,
        "device_bytes": forecast.device_peak_bytes,
        "host_bytes": forecast.host_peak_bytes * gpus,
        "network_seconds": forecast.bounds[HOSTS],
    }
