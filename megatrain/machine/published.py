"""A machine that nobody measured: published figures times what is usually reached of them."""

from itertools import pairwise

from megatrain.base.units import GIB, MIB
from megatrain.machine.rates import Machine
from megatrain.placement import Precision
from megatrain.telemetry.known_gpus import KnownGpu, named_gpu

# The driver keeps some of the memory on the label: 0.4 % on an H200, 1.5 % on a 24 GiB card.
_VISIBLE = 0.98
# What the driver shows of an H200's process beside tensors (context, cuBLAS, cuDNN, Triton's
# modules): 837 to 859 MiB in five steps with up to 35 GiB of planes on the host
# (benchmarks/results/driver-memory-h200.json).
CONTEXT_BYTES = 840 * MIB
# 55.5 of 63 GB/s that a PCIe 5 x16 link carries (H200).
_BUS_SHARE = 0.87
# What `megatrain doctor` measured on a virtual machine with an H200: 22 and, while other jobs
# compiled, 27 us.
_LAUNCH_SECONDS = 22e-6

# Host memory while AdamW runs on so many cores, GB/s. To 16 cores: measured on a Xeon with 8
# channels of DDR5; above, what such a socket gives at most.
_SERVER_GBPS = ((1, 13.0), (2, 27.0), (4, 54.0), (8, 86.0), (16, 120.0), (32, 180.0), (64, 220.0))
# Two channels of DDR5, four channels.
_HOST_LIMIT_GBPS = {"desktop": 60.0, "workstation": 120.0, "server": 220.0}


def machine_for(
    gpu_name: str,
    host_memory: int,
    cores: int,
    device_memory: int | None = None,
    *,
    precision: Precision = "bf16",
) -> Machine:
    """The expected rates of a GPU in `gpus.json`.

    Args:
        gpu_name: the common name or the driver's.
        host_memory: bytes that a process may use.
        cores: CPU cores that it may use.
        device_memory: bytes that programs see; None: the advertised size, less 2 %.

    Raises:
        InputError: the GPU is not listed; the message has the nearest names.
    """
    gpu = named_gpu(gpu_name)
    memory = int(gpu.memory_gib * GIB * _VISIBLE) if device_memory is None else device_memory
    matmul, forward, backward = compute_rates(gpu, precision)
    return Machine(
        name=f"{gpu.name}, {cores} cores",
        device_memory_bytes=memory,
        device_context_bytes=CONTEXT_BYTES,
        host_memory_bytes=host_memory,
        cores=cores,
        matmul_tflops=matmul,
        attention_forward_tflops=forward,
        attention_backward_tflops=backward,
        device_gbps=gpu.memory_gbps * gpu.shares["memory"],
        to_device_gbps=gpu.bus_gbps * _BUS_SHARE,
        from_device_gbps=gpu.bus_gbps * _BUS_SHARE,
        update_gbps=update_gbps(cores, gpu.host),
        disk_write_gbps=None,
        launch_seconds=_LAUNCH_SECONDS,
        measured=False,
    )


def compute_rates(gpu: KnownGpu, precision: str) -> tuple[float, float, float]:
    """TFLOPS of matrix products, attention forward, attention backward."""
    peak = gpu.fp32_tflops if precision == "fp32" else gpu.bf16_tflops
    shares = gpu.shares
    return (
        peak * shares["matmul"],
        peak * shares["attention_forward"],
        peak * shares["attention_backward"],
    )


def update_gbps(cores: int, host: str = "server") -> float:
    """The expected rate of host memory during updates, GB/s."""
    known = _SERVER_GBPS[-1][1]
    for (few, low), (many, high) in pairwise(_SERVER_GBPS):
        if cores <= many:
            known = low + (high - low) * (max(cores, few) - few) / (many - few)
            break
    return min(known, _HOST_LIMIT_GBPS[host])
