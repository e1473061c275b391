"""The machine this process runs on: as `megatrain doctor` measured it, or as it is listed."""

from dataclasses import replace

from megatrain.errors import InputError
from megatrain.machine import cache
from megatrain.machine.published import machine_for
from megatrain.machine.rates import Machine
from megatrain.placement import Precision
from megatrain.telemetry.cores import usable_cores
from megatrain.telemetry.environment import cpu_name
from megatrain.telemetry.gpu import find_gpu
from megatrain.telemetry.memory import host_limit_bytes


def present_cpu() -> Machine:
    """This machine without a GPU, for counting memory; its unknown rates are all 1."""
    memory, cores = host_limit_bytes(), usable_cores()
    return Machine(
        name=f"{cpu_name()}, {cores} cores",
        device_memory_bytes=memory,
        device_context_bytes=0,
        host_memory_bytes=memory,
        cores=cores,
        matmul_tflops=1.0,
        attention_forward_tflops=1.0,
        attention_backward_tflops=1.0,
        device_gbps=1.0,
        to_device_gbps=1.0,
        from_device_gbps=1.0,
        update_gbps=1.0,
        disk_write_gbps=None,
        launch_seconds=1.0,
        measured=False,
        unified=True,
    )


def present_machine(device: str = "cuda", *, precision: Precision = "bf16") -> Machine | None:
    """The rates of this machine with GPU `device`.

    The host's memory is the amount that this process may use now.

    Returns:
        None without a GPU, or with one that was neither measured nor is listed.
    """
    gpu = find_gpu(device)
    if gpu is None:
        return None
    memory = host_limit_bytes()
    measured = cache.read(cache.key_of(device), "fp32" if precision == "fp32" else "bf16")
    if measured is not None:
        return replace(measured, host_memory_bytes=memory)
    try:
        return machine_for(
            gpu.name, memory, usable_cores(), int(gpu.memory_bytes * 0.99), precision=precision
        )
    except InputError:
        return None
