"""Measures this machine, reports its limits and faults, and saves the rates for forecasts.

Copies go through the device protocol, as those of the engine do. Shapes are those of a Qwen2.5-7B
layer: M tokens, K inputs, N outputs; B rows, H heads, T tokens, D values a head.
"""

import logging
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatrain import machine as machine_rates
from megatrain import optim
from megatrain.base.units import GIB, MIB, gib
from megatrain.compat.torch import can_compile
from megatrain.device import Device, open_device
from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT, Buffer
from megatrain.device.cpu import host_range
from megatrain.device.disk import PlaneFile
from megatrain.driver.base import Gpu
from megatrain.errors import DoesNotFit, InputError, MegatrainError, RunFailed, in_one_line
from megatrain.kernels import implementation, is_native
from megatrain.machine import CONTEXT_BYTES, Machine
from megatrain.placement import Precision
from megatrain.telemetry import host
from megatrain.telemetry.gpu import by_driver_name, find_gpu, pcie_gbps

log = logging.getLogger(__name__)

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# With fewer cores, updates are bound by the cores rather than by their shared memory.
_FEW_CORES = 8
_LITTLE_DISK_BYTES = 100 * GIB
_SLOW_BUS = 0.7  # share of the link's nominal rate; 0.87 is usual
PRECISIONS: tuple[Precision, Precision] = ("bf16", "fp32")
_ROUNDS = 3
_ROUND_SECONDS = 0.15
_LONG_SECONDS = 0.4  # a call of this length need not be repeated
_MOST_CALLS = 100
_RULE, _DTYPE = optim.AdamW(), torch.bfloat16
UPDATE_BYTES = optim.moved_bytes(_RULE, _DTYPE)  # of a parameter
_CHUNK_BYTES = 64 * MIB
_DISK_SECONDS = 2.0  # for each of filling, writing, reading, and both at once
Rates = Mapping[str, float | None]  # measurements by name; None: not measured


@dataclass(frozen=True)
class Measurement:
    """A measured number; `why_not`: the reason why `value` is None."""

    name: str
    label: str
    value: float | None
    unit: str
    why_not: str | None = None


def attempt(name: str, label: str, unit: str, work: Callable[[], float]) -> Measurement:
    """The measurement that `work` returns; if it fails, one without a value."""
    try:
        return Measurement(name, label, work(), unit)
    except Exception as error:  # drivers and libraries raise errors of any type
        return Measurement(name, label, None, unit, in_one_line(error, 200))


class Sizes(NamedTuple):
    """Sizes to measure, by precision: `(M, K, N, count)` of products, `(B, T)` of attention."""

    copy_bytes: int = GIB
    products: Mapping[str, tuple[tuple[int, int, int, int], ...]] = {
        "bf16": ((16384, 3584, 18944, 3), (16384, 3584, 3584, 2)),
        "fp32": ((4096, 4096, 4096, 1),),
    }
    attention: Mapping[str, tuple[tuple[int, int], ...]] = {
        "bf16": ((1, 32768), (2, 8192), (16, 1024)),
        "fp32": ((4, 2048),),
    }
    heads: int = 28
    head_size: int = 128
    launches: int = 2000


def bus_measurements(device: Device, num_bytes: int) -> list[Measurement]:
    """The rates of copies to the device and back, with pinned memory if the driver pins any."""
    numel = num_bytes // 4
    on_device = device.empty("copies", numel, torch.float32)
    on_host = device.host("copies", numel, torch.float32, pinned=True)
    kind = "pinned" if on_host.data.is_pinned() else "pageable"

    def rate(stream: str, to: Buffer, source: Buffer) -> float:
        copy = partial(device.copy, stream, to, source)
        return on_device.data.nbytes / device_seconds(device, stream, copy) / 1e9

    rate_in = partial(rate, COPY_IN, on_device, on_host)
    rate_out = partial(rate, COPY_OUT, on_host, on_device)
    measured = [
        attempt(f"to_device_{kind}_gbps", f"host to device, {kind}", "GB/s", rate_in),
        attempt(f"from_device_{kind}_gbps", f"device to host, {kind}", "GB/s", rate_out),
    ]
    device.free(on_host)
    return measured


def compute_measurements(device: Device, sizes: Sizes, precision: Precision) -> list[Measurement]:
    """The rates of a layer's matrix products, and of attention forward and backward."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16

    def products() -> float:
        shapes = sizes.products[precision]
        flop = sum(6 * m * k * n * times for m, k, n, times in shapes)
        seconds = (times * _product_seconds(device, dtype, *size) for *size, times in shapes)
        return flop / sum(seconds) / 1e12

    measured = [attempt(f"{precision}_matmul_tflops", f"{precision} products", "TFLOPS", products)]
    for rows, tokens in sizes.attention[precision]:
        forward, backward = (
            attempt(
                f"{precision}_attention_{direction}_tflops",
                f"{precision} attention, {rows} x {tokens} tokens, {direction}",
                "TFLOPS",
                partial(_attention_tflops, device, sizes, (rows, tokens), dtype, direction),
            )
            for direction in ("forward", "backward")
        )
        if forward.value and backward.value:
            break  # the next sizes are for a device that cannot run these
    return [*measured, forward, backward]


def _product_seconds(device: Device, dtype: torch.dtype, m: int, k: int, n: int) -> float:
    """The seconds of a linear layer's product in the forward, and of both in the backward."""
    # Gradients are random, too: with constant ones a product takes less power.
    x_MK, w_NK, dy_MN = (_normal(device, dtype, *s) for s in ((m, k), (n, k), (m, n)))
    y_MN, dx_MK, dw_NK = (torch.empty_like(t) for t in (dy_MN, x_MK, w_NK))

    def backward() -> None:
        torch.mm(dy_MN, w_NK, out=dx_MK)
        torch.mm(dy_MN.T, x_MK, out=dw_NK)

    forward = partial(torch.mm, x_MK, w_NK.T, out=y_MN)
    return _compute_seconds(device, forward) + _compute_seconds(device, backward)


def _attention_tflops(
    device: Device, sizes: Sizes, shape: tuple[int, int], dtype: torch.dtype, direction: str
) -> float:
    """Rate of causal attention; only the unmasked half counts: 2 products forward, 5 backward."""
    rows, tokens = shape
    flop = 2 * rows * sizes.heads * tokens * tokens * sizes.head_size
    q, k, v = (
        _normal(device, dtype, rows, sizes.heads, tokens, sizes.head_size).requires_grad_()
        for _ in range(3)
    )
    forward = partial(scaled_dot_product_attention, q, k, v, is_causal=True)
    if direction == "forward":
        return flop / _compute_seconds(device, forward, grad=True) / 1e12
    with torch.enable_grad():
        out = forward()
    grad = torch.randn_like(out)
    backward = partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True)
    return 2.5 * flop / _compute_seconds(device, backward, grad=True) / 1e12


def device_measurements(device: Device, sizes: Sizes) -> list[Measurement]:
    """The rates of products and attention by precision, of device memory, and of launches."""

    def memory() -> float:
        target, source = (
            torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device.torch_device)
            for _ in range(2)
        )
        return 2 * target.numel() / _compute_seconds(device, lambda: target.copy_(source)) / 1e9

    little = torch.zeros(1, device=device.torch_device)

    def launches() -> None:
        for _ in range(sizes.launches):
            device.run(COMPUTE, "nothing", little.zero_)

    def launch() -> float:
        return device_seconds(device, COMPUTE, launches) / sizes.launches * 1e6

    return [
        *(m for p in PRECISIONS for m in compute_measurements(device, sizes, p)),
        attempt("device_gbps", "device memory, reads and writes", "GB/s", memory),
        attempt("launch_microseconds", "from one launch to the next", "us", launch),
    ]


def _normal(device: Device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random values of usual size: on zeros a GPU draws less power and clocks higher."""
    return torch.randn(shape, dtype=dtype, device=device.torch_device)


def _compute_seconds(device: Device, work: Callable[[], Any], *, grad: bool = False) -> float:
    with torch.set_grad_enabled(grad):
        return device_seconds(device, COMPUTE, lambda: device.run(COMPUTE, "measured", work))


def device_seconds(device: Device, stream: str, work: Callable[[], Any]) -> float:
    """Seconds of a call that puts work on a stream; an unmeasured first call loads kernels."""

    def seconds(count: int) -> float:
        start = device.mark(stream)
        for _ in range(count):
            work()
        end = device.mark(stream)
        device.synchronize(device.record(stream), "measured")
        return device.seconds(start, end)

    one_call = min(seconds(1), seconds(1))
    if one_call > _LONG_SECONDS:
        return one_call
    count = max(1, min(_MOST_CALLS, int(_ROUND_SECONDS / max(one_call, 1e-9))))
    return statistics.median(seconds(count) / count for _ in range(_ROUNDS))


def host_measurements(folder: Path) -> list[Measurement]:
    """The rates of the optimizer's update, in a tenth of the free memory, and of a disk."""
    threads = host.update_threads()
    label = f"AdamW on the host, {threads} thread{'s' if threads > 1 else ''}"
    update = partial(update_gparams, threads, min(4 * GIB, host.host_available_bytes() // 10))
    return [attempt("update_gparams", label, "Gparam/s", update), *disk_measurements(folder)]


def update_gparams(threads: int, num_bytes: int) -> float:
    """Billions of parameters a second that AdamW updates, with split masters and bf16 gradients."""
    numel = min(int(num_bytes / optim.parameter_bytes(_RULE, _DTYPE)), 256 << 20)
    if numel < 1 << 20:
        raise DoesNotFit("too little host memory is free")
    planes = *optim.tile_planes(_RULE, _DTYPE), optim.gradient_plane(_DTYPE)
    types = [plane.dtype for plane in planes]
    weights, remainder, *states, grad = (host_range("update", numel, dtype) for dtype in types)
    grad.fill_(0.01)
    tile = optim.TileRange(weights, remainder, states, grad)
    options = optim.UpdateOptions(0, 10, 1.0, threads)
    times = []
    for _ in range(_ROUNDS + 1):
        started = time.perf_counter()
        _RULE.update(tile, vars(_RULE), options)
        times.append(time.perf_counter() - started)
    return numel / statistics.median(times[1:]) / 1e9


def disk_measurements(folder: Path, *, num_bytes: int = 2 * GIB) -> list[Measurement]:
    """Sequential writes and reads of a file of planes in `folder`, by the engine's own requests."""
    file_bytes = min(num_bytes, shutil.disk_usage(folder).free // 10) // _CHUNK_BYTES * _CHUNK_BYTES
    source, target = (host_range("disk", _CHUNK_BYTES, torch.uint8).random_() for _ in range(2))
    filled = 0  # bytes of the file that have been written

    @cache
    def file() -> PlaneFile:
        if not file_bytes:
            raise DoesNotFit("too little disk space is free")
        return PlaneFile(folder, file_bytes)

    def write(at: int) -> None:
        file().write(at, source)

    def read(at: int) -> None:  # from the end, away from the blocks that are written meanwhile
        file().read(filled - _CHUNK_BYTES - at, target)

    def gbps(*moves: Callable[[int], None]) -> float:
        nonlocal filled
        # The first write of a block takes longer, and is not measured: steps write blocks again.
        filled = filled or _moved(write, file_bytes)[0]
        with ThreadPoolExecutor(len(moves)) as threads:
            results = list(threads.map(lambda move: _moved(move, filled), moves))
        mean_bytes = sum(moved for moved, _ in results) / len(results)
        return mean_bytes / max(seconds for _, seconds in results) / 1e9

    label_of_both = "disk, read while as much is written"
    measured = [
        attempt("disk_write_gbps", "disk, write", "GB/s", partial(gbps, write)),
        attempt("disk_read_gbps", "disk, read", "GB/s", partial(gbps, read)),
        attempt("disk_both_gbps", label_of_both, "GB/s", partial(gbps, write, read)),
    ]
    if file.cache_info().currsize:
        file().close()
    return measured


def _moved(move: Callable[[int], None], limit: int) -> tuple[int, float]:
    """Bytes that `move` moves within `_DISK_SECONDS`, up to a limit, and the seconds it takes."""
    moved, started = 0, time.perf_counter()
    while moved < limit and time.perf_counter() - started < _DISK_SECONDS:
        move(moved)
        moved += _CHUNK_BYTES
    return moved, time.perf_counter() - started


@dataclass(frozen=True)
class Facts:
    """Facts about a machine; None where the system does not report one."""

    folder: str
    disk_free_bytes: int
    quota_cores: float | None  # processor time that the cgroup allows, in cores
    huge_pages: str | None
    gpu: Gpu | None
    untested: str | None = None  # the part of the machine with which MegaTrain is untested
    cpu: str = field(default_factory=host.cpu_name)
    cores: int = field(default_factory=host.usable_cores)
    memory_bytes: int = field(default_factory=lambda: int(psutil.virtual_memory().total))
    # host memory allowed by cgroup and MEGATRAIN_HOST_MEMORY
    allowed_bytes: int = field(default_factory=host.host_limit_bytes)
    free_bytes: int = field(default_factory=host.host_available_bytes)
    kernels: str = implementation
    native_kernels: bool = is_native
    compiles: bool = field(default_factory=can_compile)
    torch_cuda: str | None = torch.version.cuda


def collect(device: str, folder: Path) -> Facts:
    """The facts about this machine and the disk of `folder`, where runs are written."""
    # A cgroup (version 2) has `max 100000` for no limit, or microseconds and their period.
    limits = [text.split() for text in host.cgroup_files("cpu.max")]
    cores = [int(cpu[0]) / int(cpu[1]) for cpu in limits if len(cpu) == 2 and cpu[0].isdigit()]
    huge_pages = ""
    with suppress(OSError):  # no Linux
        huge_pages = _HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    folders = (folder.resolve(), *folder.resolve().parents)
    existing = next(path for path in folders if path.is_dir())
    free, quota = shutil.disk_usage(existing).free, min(cores, default=None)
    gpu = find_gpu(device)
    return Facts(str(existing), free, quota, huge_pages or None, gpu, _untested(gpu))


@dataclass(frozen=True)
class Diagnostic:
    """A finding and its remedy; a fault (`wrong`) costs speed or stops a run, others are notes."""

    wrong: bool
    what: str
    remedy: str


def findings(facts: Facts, rates: Rates) -> list[Diagnostic]:
    """The findings about a machine, faults first."""
    gpu_faults = [] if facts.gpu is None else _gpu_faults(facts, facts.gpu, rates)
    diagnostics = [Diagnostic(True, *fault) for fault in (*_host_faults(facts), *gpu_faults)]
    if facts.gpu is None:
        is_gpu_build = facts.torch_cuda or torch.version.hip
        what = "the driver shows no GPU" if is_gpu_build else "torch is a build without CUDA"
        tool = "rocm-smi" if torch.version.hip else "nvidia-smi"
        remedy = f"check {tool} and the container's --gpus, or plan for a GPU by --gpu"
        diagnostics.append(Diagnostic(False, what, remedy))
    if facts.untested:
        what = f"MegaTrain is untested on {facts.untested} (docs/devices.md)"
        remedy = "please send what megatrain doctor --share prints"
        diagnostics.append(Diagnostic(False, what, remedy))
    return diagnostics


def _untested(gpu: Gpu | None) -> str | None:
    """The part of this machine with which MegaTrain is untested; None: it is tested."""
    listed = gpu and by_driver_name(gpu.name)
    parts = {
        "a GPU that shares the host's memory": listed and listed.shared,
        "AMD's GPUs": torch.version.hip,
        "Apple's machines and their GPU (device mps)": sys.platform == "darwin",
        "WSL2, which pins little memory": "microsoft" in platform.release().lower(),
    }
    return next((name for name, present in parts.items() if present), None)


def _host_faults(facts: Facts) -> Iterator[tuple[str, str]]:
    """The faults of the host, each with its remedy."""
    cores = min(facts.cores, facts.quota_cores or facts.cores)
    take_more = "take more tokens a step, behind which updates hide"
    if cores < facts.cores:
        yield (
            f"the optimizer's update has the time of {cores:.3g} cores; {facts.cores} are visible",
            f"allow this process more cores (docker run --cpus), or {take_more}",
        )
    elif cores < _FEW_CORES:
        yield (
            f"the optimizer's update has only {cores} cores",
            f"{take_more}, or if the machine has more cores, allow them to this process (taskset)",
        )
    if facts.allowed_bytes < 0.95 * facts.memory_bytes:
        yield (
            f"this process may use {gib(facts.allowed_bytes)} of the machine's "
            f"{gib(facts.memory_bytes)} of memory",
            "raise the container's memory limit (docker run --memory)",
        )
    if facts.huge_pages == "never":
        yield (
            "transparent huge pages are off, so that pinning and updates take longer",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if not facts.native_kernels:
        yield (
            f"host kernels: {facts.kernels}; the update is several times slower",
            "install a C++ compiler and CMake, then pip install megatrain again (make native in a "
            "checkout)",
        )
    if facts.disk_free_bytes < _LITTLE_DISK_BYTES:
        yield (
            f"{gib(facts.disk_free_bytes)} are free in {facts.folder}",
            "a checkpoint takes 12 bytes a parameter (84 GiB for 7.6 billion): put output.folder "
            "on a larger disk",
        )


def _gpu_faults(facts: Facts, gpu: Gpu, rates: Rates) -> Iterator[tuple[str, str]]:
    """The faults of the GPU and its link, each with its remedy."""
    if not facts.compiles:
        yield (
            "no Triton or no C compiler, so layers stay eager and no tile rests on the GPU",
            "install gcc and triton",
        )
    if rates.get("to_device_pageable_gbps"):
        yield (
            "host memory cannot be pinned: copies are several times slower",
            "ulimit -l unlimited (docker run --ulimit memlock=-1; LimitMEMLOCK in systemd)",
        )
    generation, lanes = gpu.pcie_generation, gpu.pcie_lanes
    reached = rates.get("to_device_pinned_gbps")
    if reached and generation and lanes and reached < _SLOW_BUS * pcie_gbps(generation, lanes):
        yield (
            f"copies to the GPU reach {reached:.1f} GB/s of {pcie_gbps(generation, lanes):.0f} on "
            f"its PCIe {generation} x{lanes} link",
            "look for other traffic on the link, a switch that several GPUs share, or IOMMU "
            "settings of a virtual machine",
        )
    if gpu.other_processes:
        pids = ", ".join(str(pid) for pid, _ in gpu.other_processes)
        taken_bytes = sum(num_bytes for _, num_bytes in gpu.other_processes)
        yield (
            f"other processes ({pids}) hold {gib(taken_bytes)} of the GPU's memory",
            "end them, or choose another GPU (CUDA_VISIBLE_DEVICES)",
        )


@dataclass(frozen=True)
class Diagnosis:
    """The result of `megatrain doctor`, with the names of its JSON output."""

    facts: Facts
    measurements: list[Measurement]
    machines: dict[str, Machine]  # by precision
    findings: list[Diagnostic]
    seconds: float
    kept: str | None  # the file in which `machines` are kept for plans
    not_kept: str | None  # why they are not kept


def diagnose(device_name: str, folder: Path, sizes: Sizes | None = None) -> Diagnosis:
    """Measure this machine, with the GPU that `device_name` names (`auto`, `cpu`, `cuda:N`, `mps`).

    Writes and removes a file of at most 2 GiB in `folder`. Raises InputError: no such device.
    """
    started = time.perf_counter()
    sizes = sizes or Sizes()
    gpu_before = find_gpu(device_name)
    device_faults = []
    try:
        device = open_device(device_name)
    except InputError:
        raise
    except (MegatrainError, RuntimeError, OSError) as error:
        problem = f"the GPU cannot be used ({in_one_line(error, 200)})"
        remedy = "look at nvidia-smi for a process that holds it alone, and at the driver's state"
        device = open_device("cpu")
        device_faults = [Diagnostic(wrong=True, what=problem, remedy=remedy)]
    facts = collect(device_name, folder)
    log.info("measuring the update on the host and the disk")
    measured = host_measurements(Path(facts.folder))
    has_gpu = device.can.counts_memory
    if has_gpu:
        log.info("measuring the bus, matrix products and attention")
        measured += bus_measurements(device, sizes.copy_bytes)
        measured += device_measurements(device, sizes)
        gpu_after = find_gpu(device_name)  # an idle GPU reports clocks and links that are too low
        facts = replace(facts, gpu=gpu_after or facts.gpu)

        def context_bytes() -> float:
            gpus = gpu_before, gpu_after
            used_before, used_after = (None if gpu is None else gpu.used_bytes for gpu in gpus)
            if used_before is None or used_after is None:
                raise RunFailed("the driver does not tell")
            num_bytes = used_after - used_before - device.memory()["device_bytes"]
            if not CONTEXT_BYTES / 10 <= num_bytes <= CONTEXT_BYTES * 10:
                raise RunFailed("the driver does not tell")
            return float(num_bytes)

        label = "device memory of the driver and its libraries"
        measured.append(attempt("context_bytes", label, "B", context_bytes))
    rates = {measurement.name: measurement.value for measurement in measured}
    machines: dict[str, Machine] = {}
    kept: str | None = None  # the file
    not_kept: str | None = "without a GPU there is nothing to keep"
    if has_gpu and facts.gpu is not None:
        memory = device.memory()["device_total_bytes"]
        try:
            machines = {p: machine_of(facts, rates, p, memory) for p in PRECISIONS}
            kept = str(machine_rates.write(machine_rates.key_of(device_name), machines))
            not_kept = None
        except KeyError as missing:
            not_kept = f"{missing.args[0]} could not be measured"
        except OSError as error:
            not_kept = f"cannot write {error.filename}: {error.strerror}"
    device.close()
    diagnostics = [*device_faults, *findings(facts, rates)]
    seconds = time.perf_counter() - started
    return Diagnosis(facts, measured, machines, diagnostics, seconds, kept, not_kept)


def machine_of(facts: Facts, rates: Rates, precision: str, device_memory: int) -> Machine:
    """The machine for forecasts. Raises KeyError with the name of a missing rate."""
    assert facts.gpu is not None
    measured = {name: value for name, value in rates.items() if value is not None}
    kind = "pinned" if "to_device_pinned_gbps" in rates else "pageable"
    return Machine(
        name=f"{facts.gpu.name}, {facts.cores} cores",
        device_memory_bytes=device_memory,
        device_context_bytes=int(rates.get("context_bytes") or CONTEXT_BYTES),
        host_memory_bytes=facts.allowed_bytes,
        cores=facts.cores,
        matmul_tflops=measured[f"{precision}_matmul_tflops"],
        attention_forward_tflops=measured[f"{precision}_attention_forward_tflops"],
        attention_backward_tflops=measured[f"{precision}_attention_backward_tflops"],
        device_gbps=measured["device_gbps"],
        to_device_gbps=measured[f"to_device_{kind}_gbps"],
        from_device_gbps=measured[f"from_device_{kind}_gbps"],
        update_gbps=measured["update_gparams"] * UPDATE_BYTES,
        disk_write_gbps=rates.get("disk_write_gbps"),
        disk_read_gbps=rates.get("disk_read_gbps"),
        disk_both_gbps=rates.get("disk_both_gbps"),
        launch_seconds=measured["launch_microseconds"] / 1e6,
        measured=True,
    )
