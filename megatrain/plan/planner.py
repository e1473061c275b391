"""The plan of a run: whether it fits, what it takes, what binds, and what to do about it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.autoplace.spill import could_fit, fastest, least
from megatrain.base.units import gib, size
from megatrain.checkpoint import spare_bytes_of, useful_bytes
from megatrain.device.base import HOSTS
from megatrain.errors import DoesNotFit
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.machine import DISK_READ_GBPS, DISK_WRITE_GBPS, NETWORK_GBPS, Machine
from megatrain.model.spec import ModelSpec
from megatrain.placement import Placement
from megatrain.plan.remedies import (
    Plans,
    Remedy,
    Shortage,
    compute_bound_tokens,
    fitting,
    remedies,
    shortage,
)
from megatrain.plan.tiles import TileBytes, by_tier, tile_bytes
from megatrain.plan.wear import DiskUse, disk_use
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
class SeveralGpus:
    """The same step split among GPUs of one host, or of several (`several_gpus`).

    Attributes:
        gpus: of each host.
        device_bytes: of one GPU at the step's peak; `host_bytes`: of all processes of one host.
        network_seconds: of the step, in which gradients are summed between hosts.
    """

    gpus: int
    hosts: int
    seconds: float
    binds: str
    tokens_per_second: float
    device_bytes: int
    host_bytes: int
    network_seconds: float


@dataclass(frozen=True)
class Plan:
    """What a workload takes on a machine.

    Attributes:
        machine: its memory is what the process may take.
        forecast: as asked; with just the memory that would do when it does not fit.
        shortage: None: it fits.
        compute_bound_tokens: tokens a step from which on the GPU's arithmetic binds.
        total_tokens: of the whole run, where they are known.
        disk: what the step does to the disk that planes rest on; None: none rest on one.
    """

    workload: Workload
    machine: Machine
    forecast: Forecast
    shortage: Shortage | None
    remedies: Sequence[Remedy]
    tiles: Sequence[TileBytes]
    compute_bound_tokens: int
    total_tokens: int | None
    several: SeveralGpus | None
    disk: DiskUse | None = None
    warnings: Sequence[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.shortage is None

    @property
    def run_seconds(self) -> float | None:
        """Seconds of the whole run, evaluations and saving not counted; None: unknown."""
        if self.total_tokens is None:
            return None
        rate = self.forecast.tokens_per_second if self.several is None else (
            self.several.tokens_per_second
        )  # fmt: skip
        return self.total_tokens / rate

    @property
    def save_bytes(self) -> int:
        """Host memory that saves take besides while training goes on, from the first one on."""
        given = self.forecast.placement.save_bytes
        if given is None:
            free = self.machine.host_memory_bytes - self.forecast.host_peak_bytes
            given = spare_bytes_of(max(0, free))
        saved = [plane for tile in self.tiles for plane in tile.count * tile.saved]
        return min(given, useful_bytes(saved))

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for `--json`."""
        short = self.shortage
        return {
            "fits": self.fits,
            "missing_device_bytes": 0 if short is None else short.device_bytes,
            "missing_host_bytes": 0 if short is None else short.host_bytes,
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
            "several_gpus": None if self.several is None else vars(self.several),
            "warnings": list(self.warnings),
            "save_bytes": self.save_bytes,
            "disk": None if self.disk is None else self.disk.as_dict(),
            "forecast": self.forecast.as_dict(),
        }


class Planner:
    """Forecasts of one model, chosen or as placed; no step is followed twice."""

    def __init__(self, spec: ModelSpec) -> None:
        self._forecasts = ForecastCache(spec)

    def once(self, machine: Machine, workload: Workload, *, thorough: bool = True) -> Forecast:
        if workload.placement is None:
            return fastest(self._forecasts, machine, workload.computed, thorough=thorough)
        found = self._placed(machine, workload, workload.placement)
        check_budgets(found, machine)
        return found

    def least(self, machine: Machine, workload: Workload) -> Forecast:
        if workload.placement is None:
            return least(self._forecasts, machine, workload.computed)
        found = self._placed(machine, workload, workload.placement)
        enough = replace(
            machine,
            device_memory_bytes=max(found.device_peak_bytes, machine.device_memory_bytes),
            host_memory_bytes=max(found.host_peak_bytes, machine.host_memory_bytes),
        )
        return replace(found, machine=enough)

    def could_fit(self, machine: Machine, workload: Workload) -> bool:
        if workload.placement is None:
            return could_fit(self._forecasts, machine, workload.computed)
        try:
            self.once(machine, workload)
        except DoesNotFit:
            return False
        return True

    def _placed(self, machine: Machine, workload: Workload, placement: Placement) -> Forecast:
        rows = workload.usual_micro_batch
        return self._forecasts.of(machine, placement, workload.computed, rows)


def check_budgets(found: Forecast, machine: Machine) -> None:
    """Raises DoesNotFit with what is needed and what there is."""
    lacking = [
        f"{size(needed)} of {place} memory, {gib(there)} {'is' if there < 2**31 else 'are'} allowed"
        for place, needed, there in (
            ("device", found.device_peak_bytes, machine.device_memory_bytes),
            ("host", found.host_peak_bytes, machine.host_memory_bytes),
        )
        if needed > there
    ]
    if lacking:
        raise DoesNotFit(f"it needs {' and '.join(lacking)}")


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
    warnings: Sequence[str] = (),
) -> Plan:
    """Plan a run.

    Args:
        gpus: of each of so many `hosts`, with `network_gbps` from one host to the others, each way.
        disk_terabytes: may be written to the drive that planes rest on (its TBW).
    """
    plans = Planner(spec)
    _log.log(PASSING, "looking for the fastest way that fits...")
    told, short = fitting(plans, machine, workload), None
    if told is None:
        _log.log(PASSING, "it does not fit; looking for the least memory with which it would...")
        short = shortage(plans, machine, workload)
        told = short.forecast
    tiles = tile_bytes(spec, told.placement, workload)
    disk = disk_use(tiles, told.seconds, disk_terabytes, told.placement.passes)
    if disk is not None and machine.disk_read_gbps is None:
        warnings = [*warnings, _NO_DISK_RATES]
    if short is not None and short.host_bytes and _fits_on_a_disk(plans, machine, workload):
        warnings = [*warnings, _A_DISK_WOULD_DO]
    several, wanted = None, gpus * hosts
    if wanted > 1:
        several = several_gpus(plans, machine, workload, gpus, hosts, network_gbps)
    if wanted > 1 and several is None:
        warnings = [*warnings, f"split among {wanted} GPUs the step does not fit on one of them"]
    if short is not None:
        _log.log(PASSING, "it does not fit; looking for what would...")
    return Plan(
        workload=workload,
        machine=machine,
        forecast=told,
        shortage=short,
        remedies=[] if short is None else remedies(plans, machine, workload, short),
        tiles=tiles,
        compute_bound_tokens=compute_bound_tokens(
            told.bounds, told.tokens_per_step, told.sequence_length
        ),
        total_tokens=total_tokens,
        several=several,
        disk=disk,
        warnings=warnings,
    )


def _fits_on_a_disk(plans: Plans, machine: Machine, workload: Workload) -> bool:
    """Whether what does not fit likely would with a disk, if none is there."""
    there = replace(machine, disk_space_bytes=1 << 60)
    free = workload.placement is None and not machine.disk_space_bytes
    return free and plans.could_fit(there, workload)


def several_gpus(
    plans: Plans,
    machine: Machine,
    workload: Workload,
    gpus: int,
    hosts: int = 1,
    network_gbps: float | None = None,
) -> SeveralGpus | None:
    """The same step split among `gpus` on each of so many hosts, as one of their ranks takes it.

    Where the link between them is not known it counts as half of a GPU's bus. The network of a host
    is shared by its GPUs; where it is not known it has `NETWORK_GBPS`. None: it does not fit.
    """
    links = machine.link_gbps, (network_gbps or NETWORK_GBPS) / gpus
    told = fitting(plans, machine.shared(gpus, *links), workload.shared(gpus, hosts))
    if told is None:
        return None
    return SeveralGpus(
        gpus,
        hosts,
        told.seconds,
        told.binds,
        workload.tokens_per_step / told.seconds,
        told.device_peak_bytes,
        told.host_peak_bytes * gpus,
        told.bounds[HOSTS],
    )
