"""The plan of a run: whether it fits, what it takes, what binds, and what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatrain.checkpoint import spare_bytes_of, useful_bytes
from megatrain.forecast.cost_model import DISK_READ_GBPS, DISK_WRITE_GBPS
from megatrain.forecast.simulate import Forecast
from megatrain.model.spec import ModelSpec
from megatrain.plan.ask import Ask, Planner, compute_bound_tokens
from megatrain.plan.remedies import Remedy, Shortage, fitting, remedies, shortage
from megatrain.plan.tiles import TileBytes, by_tier, tile_bytes
from megatrain.plan.wear import DiskUse, disk_use

UPDATE = "update"
_NO_DISK_RATES = (
    f"no rate of the disk is measured here: taken to read {DISK_READ_GBPS} GB/s and write "
    f"{DISK_WRITE_GBPS}, not both at once (megatrain doctor --folder FOLDER measures them)"
)


@dataclass(frozen=True)
class SeveralGpus:
    """The same step split among GPUs of one host; `several_gpus` states what is assumed."""

    gpus: int
    seconds: float
    binds: str
    tokens_per_second: float


@dataclass(frozen=True)
class Plan:
    """The answer to an `Ask`.

    Attributes:
        forecast: as asked; with just the memory that would do when it does not fit.
        shortage: None: it fits.
        compute_bound_tokens: tokens a step from which on the GPU's arithmetic binds.
        total_tokens: of the whole run, where they are known.
        disk: what the step does to the disk that planes rest on; None: none rest on one.
    """

    ask: Ask
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
            free = self.ask.machine.host_memory_bytes - self.forecast.host_peak_bytes
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
            "device_memory_bytes": self.ask.machine.device_memory_bytes,
            "host_memory_bytes": self.ask.machine.host_memory_bytes,
            "clip": self.ask.clip,
            "precision": self.ask.precision,
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


def make_plan(
    spec: ModelSpec,
    ask: Ask,
    *,
    total_tokens: int | None = None,
    gpus: int = 1,
    disk_terabytes: float | None = None,
    warnings: Sequence[str] = (),
) -> Plan:
    """Plan a run; `disk_terabytes` may be written to the drive that planes rest on (its TBW)."""
    plans = Planner(spec)
    told = fitting(plans, ask)
    short = None if told is not None else shortage(plans, ask)
    if short is not None:
        told = short.forecast
    assert told is not None
    tiles = tile_bytes(spec, told.placement, ask)
    disk = disk_use(tiles, told.seconds, disk_terabytes)
    if disk is not None and ask.machine.disk_read_gbps is None:
        warnings = [*warnings, _NO_DISK_RATES]
    return Plan(
        ask=ask,
        forecast=told,
        shortage=short,
        remedies=[] if short is None else remedies(plans, ask, short),
        tiles=tiles,
        compute_bound_tokens=compute_bound_tokens(
            told.bounds, told.tokens_per_step, told.sequence_length
        ),
        total_tokens=total_tokens,
        several=several_gpus(told, gpus) if gpus > 1 else None,
        disk=disk,
        warnings=warnings,
    )


def several_gpus(told: Forecast, gpus: int) -> SeveralGpus:
    """The step of `told` split among `gpus` on one host.

    Assumed: each computes an equal share of the tokens; each brings its share of the weights over
    its own bus and takes its share of the gradients back, the GPUs exchange the rest among
    themselves meanwhile; the host updates once, with the memory and cores that one GPU's plan has.
    What no stream hides in `told` stays as long as it is.
    """
    bounds = {
        name: seconds if name == UPDATE else seconds / gpus for name, seconds in told.bounds.items()
    }
    unhidden = max(0.0, told.seconds - max(told.bounds.values()))
    seconds = max(bounds.values()) + unhidden / gpus
    binds = max(bounds, key=bounds.__getitem__)
    return SeveralGpus(gpus, seconds, binds, told.tokens_per_step / seconds)
