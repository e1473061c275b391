"""Rates of a GPU and its bus, through the device protocol: the copies are those of the engine.

Shapes are those of a Qwen2.5-7B layer: M tokens, K in, N out; B rows, H heads, T tokens, D a head.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatrain.base.units import GIB, MIB
from megatrain.device import CpuDevice, Device
from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT, Buffer
from megatrain.errors import first_line
from megatrain.machine import Machine, present_cpu
from megatrain.placement import Precision
from megatrain.plan.host_rates import UPDATE_BYTES, update_gparams
from megatrain.plan.rate_measurement import Measurement, attempt, device_seconds
from megatrain.telemetry.cores import update_threads


@dataclass(frozen=True)
class Sizes:
    """How large the pieces of work are.

    Attributes:
        products: `(M, K, N)` and how often a layer has it.
        attention: `(B, T)`, shortest rows first.
    """

    copy_bytes: int = GIB
    products: tuple[tuple[int, int, int, int], ...] = (
        (16384, 3584, 18944, 3), (16384, 3584, 3584, 2), (8192, 8192, 8192, 0),
    )  # fmt: skip
    attention: tuple[tuple[int, int], ...] = ((16, 1024), (2, 8192), (1, 32768))
    fp32_product: tuple[int, int, int] = (4096, 4096, 4096)
    fp32_attention: tuple[int, int] = (4, 2048)
    heads: int = 28
    head_size: int = 128
    launches: int = 2000


# A step on a CPU is made of small pieces.
_CPU_SIZES = Sizes(
    copy_bytes=64 * MIB, fp32_product=(1024, 1024, 1024), fp32_attention=(1, 512), heads=8,
    head_size=64, launches=200,
)  # fmt: skip


def bus_measurements(device: Device, num_bytes: int) -> list[Measurement]:
    """Copies between host and device, pinned and pageable, each way and both at once."""
    numel = num_bytes // 4
    there, back = (device.empty(f"on device {i}", numel, torch.float32) for i in range(2))
    found = []
    for kind in ("pinned", "pageable"):
        try:
            ranges = [
                device.host(f"{kind} {i}", numel, torch.float32, pinned=kind == "pinned")
                for i in range(2)
            ]
        except Exception as error:
            found += _not_copied(kind, first_line(error))
            continue
        if kind == "pinned" and not all(map(is_pinned, ranges)):
            found += _not_copied(kind, "the driver refuses to pin host memory")
            continue
        found += list(_copies(device, kind, ranges, there, back))
        for buffer in ranges:
            device.free(buffer)
    return found


def is_pinned(buffer: Buffer) -> bool:
    """Whether the driver has locked a range; false where there is no GPU."""
    return buffer.data.is_pinned()


def _copies(
    device: Device, kind: str, ranges: list[Buffer], there: Buffer, back: Buffer
) -> Iterator[Measurement]:
    num_bytes = there.data.nbytes

    def into() -> None:
        device.copy(COPY_IN, there, ranges[0])

    def out() -> None:
        device.copy(COPY_OUT, ranges[1], back)

    def both() -> None:
        into()
        out()

    for name, label, streams, work, factor in (
        ("to_device", "host to device", (COPY_IN,), into, 1),
        ("from_device", "device to host", (COPY_OUT,), out, 1),
        ("both_ways", "both directions at once, together", (COPY_IN, COPY_OUT), both, 2),
    ):
        if name == "both_ways" and kind == "pageable":
            return  # copies of pageable memory block the thread that asks for them

        def rate(streams: Any = streams, work: Any = work, factor: int = factor) -> float:
            return factor * num_bytes / device_seconds(device, streams, work) / 1e9

        yield attempt(f"{name}_{kind}_gbps", f"{label}, {kind}", "GB/s", rate)


def _not_copied(kind: str, why: str) -> list[Measurement]:
    names = {"to_device": "host to device", "from_device": "device to host"}
    return [
        Measurement(f"{name}_{kind}_gbps", f"{label}, {kind}", None, "GB/s", why)
        for name, label in names.items()
    ]


def compute_measurements(device: Device, sizes: Sizes) -> list[Measurement]:
    """Matrix products and attention in bf16, then both in fp32."""
    found = []
    for m, k, n, _ in sizes.products:
        found += _product(device, (m, k, n), torch.bfloat16, "bf16")
    for rows, tokens in sizes.attention:
        found += _attention(device, sizes, rows, tokens, torch.bfloat16, "bf16")
    found += _product(device, sizes.fp32_product, torch.float32, "fp32")
    return [*found, *_attention(device, sizes, *sizes.fp32_attention, torch.float32, "fp32")]


def measured_cpu(precision: Precision) -> Machine:
    """This machine without a GPU, with rates that are measured in a few seconds."""
    device, sizes, there = CpuDevice(), _CPU_SIZES, present_cpu()
    dtype, product = torch.float32 if precision == "fp32" else torch.bfloat16, sizes.fp32_product
    found = [
        *_product(device, product, dtype, precision),
        *_attention(device, sizes, *sizes.fp32_attention, dtype, precision),
        *other_measurements(device, sizes),
    ]
    rates = [measurement.value or 1.0 for measurement in found]
    forward, backward, attention, attention_backward, gbps, microseconds = rates
    return replace(
        there,
        matmul_tflops=3 / (1 / forward + 2 / backward),
        attention_forward_tflops=attention,
        attention_backward_tflops=attention_backward,
        device_gbps=gbps,
        to_device_gbps=gbps / 2,
        from_device_gbps=gbps / 2,
        update_gbps=UPDATE_BYTES * update_gparams(update_threads(), 256 * MIB),
        launch_seconds=microseconds / 1e6,
        measured=True,
    )


def _product(
    device: Device, shape: tuple[int, int, int], dtype: torch.dtype, precision: str
) -> list[Measurement]:
    m, k, n = shape
    flop = 2 * m * k * n

    def forward() -> float:
        x_MK, w_NK = _normal(device, dtype, m, k), _normal(device, dtype, n, k)
        y_MN = x_MK.new_empty(m, n)
        return flop / _compute(device, lambda: torch.mm(x_MK, w_NK.T, out=y_MN)) / 1e12

    def backward() -> float:
        x_MK, w_NK = _normal(device, dtype, m, k), _normal(device, dtype, n, k)
        # Random gradients, too: of constant ones a product takes less power
        dy_MN = _normal(device, dtype, m, n)
        dx_MK, dw_NK = torch.empty_like(x_MK), torch.empty_like(w_NK)

        def both() -> None:
            torch.mm(dy_MN, w_NK, out=dx_MK)
            torch.mm(dy_MN.T, x_MK, out=dw_NK)

        return 2 * flop / _compute(device, both) / 1e12

    what = f"{m} x {k} x {n}"
    return [
        attempt(product_name(shape, precision, way), f"{precision} product {what}, {way}", "TFLOPS",
                work)
        for way, work in (("forward", forward), ("backward", backward))
    ]  # fmt: skip


def product_name(shape: tuple[int, int, int], precision: str, way: str) -> str:
    """The name of a product's measurement."""
    return f"{precision}_product_{'x'.join(map(str, shape))}_{way}_tflops"


def attention_name(tokens: int, precision: str, way: str) -> str:
    """The name of an attention's measurement."""
    return f"{precision}_attention_{tokens}_{way}_tflops"


def _attention(
    device: Device, sizes: Sizes, rows: int, tokens: int, dtype: torch.dtype, precision: str
) -> list[Measurement]:
    """Causal; the unmasked half counts: two products forward, five backward."""
    flop = 2 * rows * sizes.heads * tokens * tokens * sizes.head_size
    shape = (rows, sizes.heads, tokens, sizes.head_size)

    def inputs() -> list[Tensor]:
        return [_normal(device, dtype, *shape).requires_grad_() for _ in range(3)]

    def forward() -> float:
        q, k, v = inputs()
        work = lambda: scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        return flop / _compute(device, work, grad=True) / 1e12

    def backward() -> float:
        leaves = q, k, v = inputs()
        with torch.enable_grad():
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.randn_like(out)
        work = lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)  # noqa: E731
        return 2.5 * flop / _compute(device, work, grad=True) / 1e12

    label = f"{precision} attention, {rows} x {tokens} tokens"
    return [
        attempt(attention_name(tokens, precision, way), f"{label}, {way}", "TFLOPS", work)
        for way, work in (("forward", forward), ("backward", backward))
    ]


def other_measurements(device: Device, sizes: Sizes) -> list[Measurement]:
    """Device memory, and the way from one piece of work to the next."""

    def memory() -> float:
        one, two = (torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device.torch_device)
                    for _ in range(2))  # fmt: skip
        return 2 * one.numel() / _compute(device, lambda: one.copy_(two)) / 1e9

    def launch() -> float:
        little = torch.zeros(1, device=device.torch_device)

        def many() -> None:
            for _ in range(sizes.launches):
                device.run(COMPUTE, "nothing", little.zero_)

        return device_seconds(device, (COMPUTE,), many) / sizes.launches * 1e6

    return [
        attempt("device_gbps", "device memory, reads and writes", "GB/s", memory),
        attempt("launch_microseconds", "from one launch to the next", "us", launch),
    ]


def _normal(device: Device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Values of real size: a GPU draws less power, and clocks higher, on zeros."""
    return torch.randn(shape, dtype=dtype, device=device.torch_device)


def _compute(device: Device, work: Callable[[], Any], *, grad: bool = False) -> float:
    with torch.set_grad_enabled(grad):
        return device_seconds(device, (COMPUTE,), lambda: device.run(COMPUTE, "measured", work))
