"""Rates of this machine: the GPU and its bus, the optimizer's update on the host, the disk.

Copies go through the device protocol, as those of the engine do. Shapes are those of a Qwen2.5-7B
layer: M tokens, K in, N out; B rows, H heads, T tokens, D a head.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatrain.base.units import GIB, MIB
from megatrain.device import Device
from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT, Buffer
from megatrain.device.host_mappings import host_range
from megatrain.device.plane_file import PlaneFile
from megatrain.errors import DoesNotFit, MegatrainError, first_line
from megatrain.optim import (
    AdamW,
    TileRange,
    UpdateOptions,
    gradient_plane,
    moved_bytes,
    parameter_bytes,
    tile_planes,
)
from megatrain.placement import Precision
from megatrain.telemetry.host import host_available_bytes, update_threads

PRECISIONS: tuple[Precision, Precision] = ("bf16", "fp32")
_ROUNDS = 3
_ROUND_SECONDS = 0.15
_LONG_SECONDS = 0.4  # a call of this length need not be repeated
_MOST_CALLS = 100
_RULE, _DTYPE = AdamW(), torch.bfloat16
UPDATE_BYTES = moved_bytes(_RULE, _DTYPE)  # of a parameter
_CHUNK = 64 * MIB
_DISK_SECONDS = 2.0  # for each of filling, writing, reading, and both at once


@dataclass(frozen=True)
class Measurement:
    """One number about a machine.

    Attributes:
        name: for programs.
        label: for people, without the unit.
        why_not: the reason why `value` is None.
    """

    name: str
    label: str
    value: float | None
    unit: str
    why_not: str | None = None


def attempt(name: str, label: str, unit: str, work: Callable[[], float]) -> Measurement:
    """Measure by `work`; a failure costs this measurement only."""
    try:
        return Measurement(name, label, work(), unit)
    except Exception as error:  # drivers and libraries raise errors of any type
        return Measurement(name, label, None, unit, first_line(error)[:200])


class Sizes(NamedTuple):
    """The sizes of the work to measure.

    Attributes:
        products: `(M, K, N)` and its count in a layer, by precision.
        attention: `(B, T)` by precision; the first that fits into memory is measured.
        load_width: width of the products during which the GPU's state is read.
    """

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
    load_width: int = 8192


def bus_measurements(device: Device, num_bytes: int) -> list[Measurement]:
    """Copies between host and device each way, with pinned memory if the driver pins any."""
    numel = num_bytes // 4
    on_device = device.empty("copies", numel, torch.float32)
    on_host = device.host("copies", numel, torch.float32, pinned=True)
    kind = "pinned" if on_host.data.is_pinned() else "pageable"

    def rate(stream: str, to: Buffer, source: Buffer) -> float:
        copy = partial(device.copy, stream, to, source)
        return on_device.data.nbytes / device_seconds(device, stream, copy) / 1e9

    into = partial(rate, COPY_IN, on_device, on_host)
    out = partial(rate, COPY_OUT, on_host, on_device)
    measured = [
        attempt(f"to_device_{kind}_gbps", f"host to device, {kind}", "GB/s", into),
        attempt(f"from_device_{kind}_gbps", f"device to host, {kind}", "GB/s", out),
    ]
    device.free(on_host)
    return measured


def compute_measurements(device: Device, sizes: Sizes, precision: Precision) -> list[Measurement]:
    """A layer's matrix products, and attention forward and backward."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16

    def products() -> float:
        shapes = sizes.products[precision]
        flop = sum(6 * m * k * n * times for m, k, n, times in shapes)
        seconds = (times * _product_seconds(device, size, dtype) for *size, times in shapes)
        return flop / sum(seconds) / 1e12

    measured = [attempt(f"{precision}_matmul_tflops", f"{precision} products", "TFLOPS", products)]
    for rows, tokens in sizes.attention[precision]:
        forward, backward = (
            attempt(
                f"{precision}_attention_{way}_tflops",
                f"{precision} attention, {rows} x {tokens} tokens, {way}",
                "TFLOPS",
                partial(_attention_tflops, device, sizes, (rows, tokens), dtype, way),
            )
            for way in ("forward", "backward")
        )
        if forward.value and backward.value:
            break
    return [*measured, forward, backward]


def _product_seconds(device: Device, shape: Sequence[int], dtype: torch.dtype) -> float:
    """Seconds of a product's forward and backward."""
    m, k, n = shape
    # Gradients are random, too: with constant ones a product takes less power.
    x_MK, w_NK, dy_MN = (_normal(device, dtype, *s) for s in ((m, k), (n, k), (m, n)))
    y_MN, dx_MK, dw_NK = (torch.empty_like(t) for t in (dy_MN, x_MK, w_NK))

    def backward() -> None:
        torch.mm(dy_MN, w_NK, out=dx_MK)
        torch.mm(dy_MN.T, x_MK, out=dw_NK)

    forward = partial(torch.mm, x_MK, w_NK.T, out=y_MN)
    return _compute_seconds(device, forward) + _compute_seconds(device, backward)


def _attention_tflops(
    device: Device, sizes: Sizes, shape: tuple[int, int], dtype: torch.dtype, way: str
) -> float:
    """Rate of causal attention; only the unmasked half counts: 2 products forward, 5 backward."""
    rows, tokens = shape
    flop = 2 * rows * sizes.heads * tokens * tokens * sizes.head_size
    q, k, v = (
        _normal(device, dtype, rows, sizes.heads, tokens, sizes.head_size).requires_grad_()
        for _ in range(3)
    )
    forward = partial(scaled_dot_product_attention, q, k, v, is_causal=True)
    if way == "forward":
        return flop / _compute_seconds(device, forward, grad=True) / 1e12
    with torch.enable_grad():
        out = forward()
    grad = torch.randn_like(out)
    backward = partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True)
    return 2.5 * flop / _compute_seconds(device, backward, grad=True) / 1e12


def device_measurements(device: Device, sizes: Sizes) -> list[Measurement]:
    """Matrix products and attention by precision, device memory, and launches."""

    def memory() -> float:
        one, two = (
            torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device.torch_device)
            for _ in range(2)
        )
        return 2 * one.numel() / _compute_seconds(device, lambda: one.copy_(two)) / 1e9

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

    first = min(seconds(1), seconds(1))
    if first > _LONG_SECONDS:
        return first
    count = max(1, min(_MOST_CALLS, int(_ROUND_SECONDS / max(first, 1e-9))))
    return statistics.median(seconds(count) / count for _ in range(_ROUNDS))


def host_measurements(folder: Path) -> list[Measurement]:
    """The optimizer's update, in a tenth of the free memory, and the disk of a folder."""
    threads = update_threads()
    label = f"AdamW on the host, {threads} thread{'s' if threads > 1 else ''}"
    room = min(4 * GIB, host_available_bytes() // 10)
    update = partial(update_gparams, threads, room)
    return [attempt("update_gparams", label, "Gparam/s", update), *disk_measurements(folder)]


def update_gparams(threads: int, room_bytes: int) -> float:
    """Billions of parameters a second through the update, split master and bf16 gradient."""
    numel = min(int(room_bytes / parameter_bytes(_RULE, _DTYPE)), 256 << 20)
    if numel < 1 << 20:
        raise DoesNotFit("too little host memory is free")
    types = [plane.dtype for plane in (*tile_planes(_RULE, _DTYPE), gradient_plane(_DTYPE))]
    weights, remainder, *states, grad = (host_range("update", numel, dtype) for dtype in types)
    grad.fill_(0.01)
    tile, options = TileRange(weights, remainder, states, grad), UpdateOptions(0, 10, 1.0, threads)
    times = []
    for _ in range(_ROUNDS + 1):
        started = time.perf_counter()
        _RULE.update(tile, vars(_RULE), options)
        times.append(time.perf_counter() - started)
    return numel / statistics.median(times[1:]) / 1e9


def disk_measurements(folder: Path, *, num_bytes: int = 2 * GIB) -> list[Measurement]:
    """Sequential writes and reads of a file of planes in `folder`, by the engine's own requests."""
    labels = {
        "disk_write_gbps": "disk, write",
        "disk_read_gbps": "disk, read",
        "disk_both_gbps": "disk, read while as much is written",
    }
    try:
        free = os.statvfs(folder)
        wanted = min(num_bytes, free.f_bavail * free.f_frsize // 10) // _CHUNK * _CHUNK
        if not wanted:
            raise DoesNotFit("too little disk space is free")
        file = PlaneFile.create(folder, wanted)
    except (MegatrainError, OSError) as error:
        why = first_line(error)
        return [Measurement(name, label, None, "GB/s", why) for name, label in labels.items()]
    rooms = [host_range("disk", _CHUNK, torch.uint8).random_() for _ in range(2)]
    filled = 0

    def write(at: int) -> None:
        file.write(at, rooms[0])

    def read(at: int) -> None:  # backwards, to stay clear of the blocks being written
        file.read(filled - _CHUNK - at, rooms[1])

    def gbps(*moves: Callable[[int], None]) -> float:
        nonlocal filled
        # The first write of a block takes longer; steps write the same blocks again.
        filled = filled or _moved(write, wanted)[0]
        with ThreadPoolExecutor(len(moves)) as threads:
            done = list(threads.map(lambda move: _moved(move, filled), moves))
        return sum(moved for moved, _ in done) / len(moves) / max(s for _, s in done) / 1e9

    try:
        return [
            attempt(name, label, "GB/s", partial(gbps, *moves))
            for (name, label), moves in zip(
                labels.items(), ((write,), (read,), (write, read)), strict=True
            )
        ]
    finally:
        file.close()


def _moved(move: Callable[[int], None], most: int) -> tuple[int, float]:
    """Bytes moved in at most `_DISK_SECONDS`, and the time that took."""
    moved, started = 0, time.perf_counter()
    while moved < most and time.perf_counter() - started < _DISK_SECONDS:
        move(moved)
        moved += _CHUNK
    return moved, time.perf_counter() - started
