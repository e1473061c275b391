"""Measures this machine, says what is wrong with it, and keeps what predictions need."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatrain.device import Device, open_device
from megatrain.device.base import COMPUTE
from megatrain.errors import InputError, MegatrainError, first_line
from megatrain.machine import CONTEXT_BYTES, Machine, cache
from megatrain.plan.device_rates import (
    Sizes,
    attention_name,
    bus_measurements,
    compute_measurements,
    other_measurements,
    product_name,
)
from megatrain.plan.diagnostics import Diagnostic, findings
from megatrain.plan.facts import Facts, collect, existing
from megatrain.plan.host_rates import UPDATE_BYTES, host_measurements
from megatrain.plan.rate_measurement import Measurement
from megatrain.telemetry.gpu_state import GpuState, gpu_state

log = logging.getLogger(__name__)

Precision = Literal["bf16", "fp32"]
_PRECISIONS: tuple[Precision, Precision] = ("bf16", "fp32")
# Time to look at the GPU while it works; a product of the largest size takes milliseconds.
_LOAD_CALLS = 200


@dataclass(frozen=True)
class Diagnosis:
    """What `megatrain doctor` tells.

    Attributes:
        machines: what predictions are made of, by precision; empty without a GPU.
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
        """As plain data, for `--json`."""
        return {
            "facts": asdict(self.facts),
            "measurements": [measurement.as_dict() for measurement in self.measurements],
            "machines": {name: machine.as_dict() for name, machine in self.machines.items()},
            "findings": [asdict(finding) for finding in self.findings],
            "seconds": self.seconds,
            "kept": self.kept,
            "not_kept": self.not_kept,
        }


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
    log.info("measuring the host's memory, update and disk")
    measured = host_measurements(existing(folder))
    found: list[Diagnostic] = []
    if unusable is not None:
        found.append(unusable)
    if device.kind == "cuda":
        under_load, more = _device(device, name, before, sizes)
        facts, measured = replace(facts, gpu=under_load or facts.gpu), measured + more
    rates = {measurement.name: measurement.value for measurement in measured}
    machines, lacking = _machines(device, facts, rates, sizes)
    device.close()
    pinning = rates["to_device_pinned_gbps"] is not None if device.kind == "cuda" else None
    kept, not_kept = _keep(name, machines, lacking)
    return Diagnosis(
        facts=facts,
        measurements=measured,
        machines=machines,
        findings=[*found, *findings(facts, rates, pinning=pinning)],
        seconds=time.perf_counter() - started,
        kept=kept,
        not_kept=not_kept,
    )


def _open(name: str) -> tuple[Device, Diagnostic | None]:
    """The device; the CPU with the reason where the GPU is there but cannot be used."""
    try:
        return open_device(name), None
    except InputError:
        raise
    except (MegatrainError, RuntimeError, OSError) as error:
        remedy = "look at nvidia-smi for a process that holds it alone, and at the driver's state"
        return open_device("cpu"), Diagnostic(
            True, f"the GPU cannot be used ({first_line(error)})", remedy
        )


def _device(
    device: Device, name: str, before: GpuState | None, sizes: Sizes
) -> tuple[GpuState | None, list[Measurement]]:
    """Everything measured on the GPU, and its state under load."""
    log.info("measuring the bus")
    measured = bus_measurements(device, sizes.copy_bytes)
    log.info("measuring matrix products and attention")
    measured += compute_measurements(device, sizes)
    measured += other_measurements(device, sizes)
    under_load = _state_under_load(device, name, sizes)
    context = _context_bytes(device, before, under_load)
    why_not = "the driver does not tell" if context is None else None
    measured.append(
        Measurement(
            "context_bytes", "device memory of the driver and its libraries", context, "B", why_not
        )
    )
    return under_load, measured


def _state_under_load(device: Device, name: str, sizes: Sizes) -> GpuState | None:
    """Idle links and clocks rest low, so the GPU is asked while it has much to do."""
    import torch

    try:
        m, k, n, _ = sizes.products[-1]
        x, w = (torch.ones(shape, dtype=torch.bfloat16, device=device.torch_device)
                for shape in ((m, k), (k, n)))  # fmt: skip
        for _ in range(_LOAD_CALLS):
            device.run(COMPUTE, "load", lambda: torch.mm(x, w))
        state = gpu_state(name)
        device.synchronize(device.record(COMPUTE), "measured")
        return state
    except RuntimeError:  # no memory for it: another process holds the GPU
        return gpu_state(name)


def _context_bytes(device: Device, before: GpuState | None, after: GpuState | None) -> float | None:
    """What the process took besides tensors; None if the driver does not tell, or told nonsense."""
    if before is None or after is None or before.used_bytes is None or after.used_bytes is None:
        return None
    taken = after.used_bytes - before.used_bytes - device.memory()["device_bytes"]
    return float(taken) if CONTEXT_BYTES / 10 <= taken <= CONTEXT_BYTES * 10 else None


def _machines(
    device: Device, facts: Facts, rates: Mapping[str, float | None], sizes: Sizes
) -> tuple[dict[str, Machine], str | None]:
    """A machine for each precision, and why there is none."""
    if facts.gpu is None or device.kind != "cuda":
        return {}, "without a GPU there is nothing to keep"
    memory = device.memory()["device_total_bytes"]
    machines: dict[str, Machine] = {}
    for precision in _PRECISIONS:
        try:
            machines[precision] = machine_of(facts, rates, sizes, precision, memory)
        except KeyError as missing:
            return {}, f"{missing.args[0]} could not be measured"
    return machines, None


def machine_of(
    facts: Facts,
    rates: Mapping[str, float | None],
    sizes: Sizes,
    precision: Precision,
    device_memory: int,
) -> Machine:
    """What was measured, as predictions want it. Raises KeyError with the name of what is missing.

    The GPU's memory, context and name come from the driver.
    """
    assert facts.gpu is not None

    def rate(name: str) -> float:
        value = rates.get(name)
        if value is None:
            raise KeyError(name)
        return value

    products = sizes.products if precision == "bf16" else ((*sizes.fp32_product, 1),)
    rows = sizes.attention if precision == "bf16" else (sizes.fp32_attention,)
    tokens = next((t for _, t in reversed(rows)
                   if rates.get(attention_name(t, precision, "backward"))), rows[0][1])  # fmt: skip
    return Machine(
        name=f"{facts.gpu.name}, {facts.cores} cores",
        device_memory_bytes=device_memory,
        device_context_bytes=int(rates.get("context_bytes") or CONTEXT_BYTES),
        host_memory_bytes=facts.allowed_bytes,
        cores=facts.cores,
        matmul_tflops=_mean_tflops(products, precision, rate),
        attention_forward_tflops=rate(attention_name(tokens, precision, "forward")),
        attention_backward_tflops=rate(attention_name(tokens, precision, "backward")),
        device_gbps=rate("device_gbps"),
        to_device_gbps=rates.get("to_device_pinned_gbps") or rate("to_device_pageable_gbps"),
        from_device_gbps=rates.get("from_device_pinned_gbps") or rate("from_device_pageable_gbps"),
        update_gbps=rate("update_gparams") * UPDATE_BYTES,
        disk_write_gbps=rates.get("disk_write_gbps"),
        disk_read_gbps=rates.get("disk_read_gbps"),
        disk_both_gbps=rates.get("disk_both_gbps"),
        launch_seconds=rate("launch_microseconds") / 1e6,
        measured=True,
    )


def _mean_tflops(
    products: tuple[tuple[int, int, int, int], ...], precision: str, rate: Callable[[str], float]
) -> float:
    """All FLOP of a layer's products over all their time; the backward has twice as many."""
    flop, seconds = 0.0, 0.0
    for m, k, n, times in products:
        for way, factor in (("forward", 1), ("backward", 2)):
            if times:
                work = 2.0 * m * k * n * times * factor
                flop += work
                seconds += work / rate(product_name((m, k, n), precision, way))
    return flop / seconds


def _keep(
    name: str, machines: dict[str, Machine], lacking: str | None
) -> tuple[str | None, str | None]:
    if lacking is not None:
        return None, lacking
    try:
        return str(cache.write(cache.key_of(name), machines)), None
    except OSError as error:
        return None, f"cannot write {error.filename}: {error.strerror}"
