"""Measures this machine, reports its faults, and saves the rates that predictions need."""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatrain.device import Device, open_device
from megatrain.device.base import COMPUTE
from megatrain.errors import InputError, MegatrainError, first_line
from megatrain.machine import CONTEXT_BYTES, Machine, present
from megatrain.plan.diagnostics import Diagnostic, Facts, collect, findings
from megatrain.plan.rates import (
    PRECISIONS,
    UPDATE_BYTES,
    Measurement,
    Sizes,
    bus_measurements,
    device_measurements,
    host_measurements,
)
from megatrain.telemetry.gpu import GpuState, gpu_state

log = logging.getLogger(__name__)

# Seconds to read the GPU's state while it works; a usual matrix product takes milliseconds.
_LOAD_CALLS = 200


@dataclass(frozen=True)
class Diagnosis:
    """The result of `megatrain doctor`.

    Attributes:
        machines: the machine for predictions, by precision; empty without a GPU.
        kept: the file that `plan` and `placement: auto` read; None: `not_kept` says why.
    """

    facts: Facts
    measurements: list[Measurement]
    machines: dict[str, Machine]
    findings: list[Diagnostic]
    seconds: float
    kept: str | None
    not_kept: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
        machines = {name: machine.as_dict() for name, machine in self.machines.items()}
        return asdict(self) | {"machines": machines}


def diagnose(device_name: str, folder: Path, sizes: Sizes | None = None) -> Diagnosis:
    """Measure this machine with the GPU called `device_name` (`auto`, `cpu`, `cuda:N`).

    Args:
        folder: where runs will be written; a file of at most 2 GiB is written there and removed.

    Raises:
        InputError: there is no such device.
    """
    started = time.perf_counter()
    sizes = sizes or Sizes()
    name = "cuda:0" if device_name in ("auto", "cuda") else device_name
    before = gpu_state(name)
    device, unusable = _open(device_name)
    facts = collect(name, folder)
    log.info("measuring the update on the host and the disk")
    measured = host_measurements(Path(facts.folder))
    has_gpu = device.kind == "cuda"
    if has_gpu:
        log.info("measuring the bus, matrix products and attention")
        measured += bus_measurements(device, sizes.copy_bytes)
        measured += device_measurements(device, sizes)
        under_load = _state_under_load(device, name, sizes.load_width)
        facts = replace(facts, gpu=under_load or facts.gpu)
        measured.append(_context(device, before, under_load))
    rates = {measurement.name: measurement.value for measurement in measured}
    machines: dict[str, Machine] = {}
    saved, not_kept = "", "without a GPU there is nothing to keep"
    if has_gpu and facts.gpu is not None:
        memory = device.memory()["device_total_bytes"]
        try:
            machines = {p: machine_of(facts, rates, p, memory) for p in PRECISIONS}
            saved = str(present.write(present.key_of(name), machines))
        except KeyError as missing:
            not_kept = f"{missing.args[0]} could not be measured"
        except OSError as error:
            not_kept = f"cannot write {error.filename}: {error.strerror}"
    device.close()
    diagnostics = [*unusable, *findings(facts, rates)]
    seconds = time.perf_counter() - started
    return Diagnosis(
        facts, measured, machines, diagnostics, seconds, saved or None, None if saved else not_kept
    )


def _open(name: str) -> tuple[Device, list[Diagnostic]]:
    """The device; if a GPU is present but unusable, the CPU and the reason."""
    try:
        return open_device(name), []
    except InputError:
        raise
    except (MegatrainError, RuntimeError, OSError) as error:
        remedy = "look at nvidia-smi for a process that holds it alone, and at the driver's state"
        what = f"the GPU cannot be used ({first_line(error)})"
        return open_device("cpu"), [Diagnostic(True, what, remedy)]


def _state_under_load(device: Device, name: str, width: int) -> GpuState | None:
    """The GPU's state while it computes: idle links and clocks would read too low."""
    try:
        x = torch.ones((width, width), dtype=torch.bfloat16, device=device.torch_device)
        for _ in range(_LOAD_CALLS):
            device.run(COMPUTE, "load", lambda: torch.mm(x, x))
        state = gpu_state(name)
        device.synchronize(device.record(COMPUTE), "measured")
        return state
    except RuntimeError:  # no memory for it: another process holds the GPU
        return gpu_state(name)


def _context(device: Device, before: GpuState | None, after: GpuState | None) -> Measurement:
    """Device memory, in bytes, that the process takes besides tensors."""
    name, label = "context_bytes", "device memory of the driver and its libraries"
    if before and after and before.used_bytes is not None and after.used_bytes is not None:
        taken = after.used_bytes - before.used_bytes - device.memory()["device_bytes"]
        if CONTEXT_BYTES / 10 <= taken <= CONTEXT_BYTES * 10:
            return Measurement(name, label, float(taken), "B")
    return Measurement(name, label, None, "B", "the driver does not tell")


def machine_of(
    facts: Facts, rates: Mapping[str, float | None], precision: str, device_memory: int
) -> Machine:
    """The machine for predictions. Raises KeyError with the name of a missing rate."""
    assert facts.gpu is not None

    def rate(name: str) -> float:
        value = rates.get(name)
        if value is None:
            raise KeyError(name)
        return value

    kind = "pinned" if "to_device_pinned_gbps" in rates else "pageable"
    return Machine(
        name=f"{facts.gpu.name}, {facts.cores} cores",
        device_memory_bytes=device_memory,
        device_context_bytes=int(rates.get("context_bytes") or CONTEXT_BYTES),
        host_memory_bytes=facts.allowed_bytes,
        cores=facts.cores,
        matmul_tflops=rate(f"{precision}_matmul_tflops"),
        attention_forward_tflops=rate(f"{precision}_attention_forward_tflops"),
        attention_backward_tflops=rate(f"{precision}_attention_backward_tflops"),
        device_gbps=rate("device_gbps"),
        to_device_gbps=rate(f"to_device_{kind}_gbps"),
        from_device_gbps=rate(f"from_device_{kind}_gbps"),
        update_gbps=rate("update_gparams") * UPDATE_BYTES,
        disk_write_gbps=rates.get("disk_write_gbps"),
        disk_read_gbps=rates.get("disk_read_gbps"),
        disk_both_gbps=rates.get("disk_both_gbps"),
        launch_seconds=rate("launch_microseconds") / 1e6,
        measured=True,
    )
