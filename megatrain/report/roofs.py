"""How near a step comes to what its machine can do: each resource's share, bound and rate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.device.base import (
    COMPUTE,
    COPY_IN,
    COPY_OUT,
    DISK_IN,
    DISK_OUT,
    DISK_STREAMS,
    DISK_WEIGHTS,
    UPDATE,
)
from megatrain.errors import InputError
from megatrain.machine import Machine, machine_for, present_machine
from megatrain.report.source import Source, at
from megatrain.telemetry.flops import model_tflops

NAMES = {
    COMPUTE: "compute",
    COPY_IN: "bus, host to device",
    COPY_OUT: "bus, device to host",
    UPDATE: "host memory, update",
    DISK_IN: "disk, read",
    DISK_OUT: "disk, write",
    DISK_WEIGHTS: "disk, weights",
}
_SELDOM = DISK_STREAMS  # nothing is said of a disk that no planes rest on


@dataclass(frozen=True)
class Resource:
    """One thing that a step needs.

    Attributes:
        busy: measured seconds.
        num_bytes: moved in them; None where that is no measure of the work.
        bound: seconds that the machine needs for this work at least; None where that is unknown.
        basis: what the bound is made of.
    """

    name: str
    busy: float
    num_bytes: int | None
    bound: float | None
    basis: str


@dataclass(frozen=True)
class Roofs:
    """All resources of a step of `seconds`, and the machine they are held against."""

    seconds: float
    resources: list[Resource]
    machine: Machine | None

    @property
    def binding(self) -> Resource:
        """The resource that was busy longest."""
        return max(self.resources, key=lambda resource: resource.busy)

    @property
    def highest(self) -> Resource | None:
        """The resource whose lower bound is the highest: no step can be faster."""
        bounded = [r for r in self.resources if r.bound is not None]
        return max(bounded, key=lambda r: r.bound or 0, default=None)


def find_machine(source: Source) -> Machine | None:
    """The rates of the run's machine.

    As `megatrain doctor` measured them, if the run was on this machine; else what its GPU is listed
    with; None for a machine without GPU, or with one that is not listed.
    """
    environment = source.environment
    name = at(environment, "gpu", "name")
    cores, memory = environment.get("usable_cores"), environment.get("host_limit_bytes")
    if not isinstance(name, str) or type(cores) is not int or type(memory) is not int:
        return None
    here = present_machine(str(environment.get("device")), precision=source.precision)
    if here is not None and here.measured and here.cores == cores and name in here.name:
        return here
    try:
        return machine_for(name, memory, cores, precision=source.precision)
    except InputError:
        return None


def find_roofs(source: Source, machine: Machine | None) -> Roofs | None:
    """The resources of the recorded step; None where no step was recorded."""
    found = source.breakdown
    if found is None or not found.seconds:
        return None
    bounds = _bounds(source, machine, found.num_bytes) if machine is not None else {}
    resources = [
        Resource(
            name,
            found.busy.get(stream, 0.0),
            None if stream == COMPUTE else found.num_bytes.get(stream),
            *bounds.get(stream, (None, "")),
        )
        for stream, name in NAMES.items()
        if stream not in _SELDOM or stream in found.busy
    ]
    return Roofs(found.seconds, resources, machine)


def _bounds(
    source: Source, machine: Machine, num_bytes: Mapping[str, int]
) -> dict[str, tuple[float, str]]:
    bounds: dict[str, tuple[float, str]] = {}
    if source.computing and source.recorded_tokens:
        rate = machine.matmul_tflops
        needed = model_tflops(*source.computing, int(source.recorded_tokens), seconds=1.0)
        bounds[COMPUTE] = needed / rate, f"model FLOPs at {rate:,.0f} TFLOPS"
    rates: dict[str, Any] = {
        COPY_IN: machine.to_device_gbps,
        COPY_OUT: machine.from_device_gbps,
        UPDATE: machine.update_gbps,
        # A step reads and writes as much at the same time.
        DISK_IN: machine.disk_both_gbps or machine.disk_read_gbps,
        DISK_OUT: machine.disk_both_gbps or machine.disk_write_gbps,
        DISK_WEIGHTS: machine.disk_read_gbps,
    }
    for stream, gbps in rates.items():
        if gbps is not None and num_bytes.get(stream):
            seconds = num_bytes[stream] / (gbps * 1e9)
            bounds[stream] = seconds, f"{num_bytes[stream] / 1e9:,.1f} GB at {gbps:,.1f} GB/s"
    return bounds
