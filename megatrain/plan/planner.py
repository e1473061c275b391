"""The plan of a run: whether it fits, what it takes, what binds, and what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.autoplace.search import Search
from megatrain.autoplace.spill import could_fit, fastest
from megatrain.checkpoint import spare_bytes_of, useful_bytes
from megatrain.errors import DoesNotFit
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.machine import DISK_READ_GBPS, DISK_WRITE_GBPS, Machine
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
from megatrain.units import gib, size

_NO_DISK_RATES = (
    f"no rate of the disk is measured here: taken to read {DISK_READ_GBPS} GB/s and write "
    f"{DISK_WRITE_GBPS}, not both at once (megatrain doctor --folder FOLDER measures them)"
)


@dataclass(frozen=True)
class SeveralGpus:
    """The same step split among GPUs of one host (`several_gpus`)."""

    gpus: int
    seconds: float
    binds: str
    tokens_per_second: float


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
        """Of all tokens, evaluations and saving not counted."""
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
            return Search(self._forecasts, machine, workload.computed).least()
        found = self._placed(machine, workload, workload.placement)
        least = replace(
            machine,
            device_memory_bytes=max(found.device_peak_bytes, machine.device_memory_bytes),
            host_memory_bytes=max(found.host_peak_bytes, machine.host_memory_bytes),
        )
        return replace(found, machine=least)

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
    disk_terabytes: float | None = None,
    warnings: Sequence[str] = (),
) -> Plan:
    """Plan a run; `disk_terabytes` may be written to the drive that planes rest on (its TBW)."""
    plans = Planner(spec)
    told = fitting(plans, machine, workload)
    short = None if told is not None else shortage(plans, machine, workload)
    if short is not None:
        told = short.forecast
    assert told is not None
    tiles = tile_bytes(spec, told.placement, workload)
    disk = disk_use(tiles, told.seconds, disk_terabytes, told.placement.passes)
    if disk is not None and machine.disk_read_gbps is None:
        warnings = [*warnings, _NO_DISK_RATES]
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
        several=several_gpus(plans, machine, workload, gpus) if gpus > 1 else None,
        disk=disk,
        warnings=warnings,
    )


def several_gpus(
    plans: Plans, machine: Machine, workload: Workload, gpus: int
) -> SeveralGpus | None:
    """The same step split among `gpus` on one host, as one of their ranks takes it.

    Where the link between them is not known it counts as half of a GPU's bus. None: it does not
    fit.
    """
    told = fitting(plans, machine.shared(gpus, machine.link_gbps), workload.shared(gpus))
    if told is None:
        return None
    rate = workload.tokens_per_step / told.seconds
    return SeveralGpus(gpus, told.seconds, told.binds, rate)
