"""NVIDIA's driver (libcuda) and its management library (NVML, by pynvml)."""

import ctypes
import os
from functools import cached_property
from typing import Any

from megatrain.driver.base import Driver, Gpu

_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ, cyclic on 32 bits


class Nvidia(Driver):
    """Waits by `cuStreamWaitValue32`."""

    unsupported = (801,)  # CUDA_ERROR_NOT_SUPPORTED

    def gpu(self, index: int) -> Gpu | None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no library, or no driver
            return None
        try:
            return _gpu(pynvml, index)
        except pynvml.NVMLError:
            return None
        finally:
            pynvml.nvmlShutdown()

    @cached_property
    def _cuda(self) -> ctypes.CDLL:
        return ctypes.CDLL("libcuda.so.1")

    def wait(self, stream: int, address: int, count: int) -> int:
        return self._cuda.cuStreamWaitValue32_v2(
            ctypes.c_void_p(stream),
            ctypes.c_uint64(address),
            ctypes.c_uint32(count),
            ctypes.c_uint(_GREATER_OR_EQUAL),
        )


def _gpu(nvml: Any, index: int) -> Gpu:
    # NVML also counts GPUs that CUDA_VISIBLE_DEVICES hides from torch.
    listed = map(str.strip, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    visible = [*filter(None, listed)]
    number_or_uuid = visible[index] if index < len(visible) else str(index)
    if number_or_uuid.isdigit():
        handle = nvml.nvmlDeviceGetHandleByIndex(int(number_or_uuid))
    else:
        handle = nvml.nvmlDeviceGetHandleByUUID(number_or_uuid)

    def ask(question: str) -> Any:
        try:
            return getattr(nvml, question)(handle)
        except (nvml.NVMLError, AttributeError):  # unknown to this GPU or this library
            return None

    memory = ask("nvmlDeviceGetMemoryInfo")
    processes = ask("nvmlDeviceGetComputeRunningProcesses") or ()
    return Gpu(
        name=str(ask("nvmlDeviceGetName")),
        memory_bytes=0 if memory is None else int(memory.total),
        driver=str(nvml.nvmlSystemGetDriverVersion()),
        uuid=str(ask("nvmlDeviceGetUUID") or ""),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_lanes=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        other_processes=tuple(
            (p.pid, p.usedGpuMemory or 0) for p in processes if p.pid != os.getpid()
        ),
        used_bytes=None if memory is None else int(memory.used),
    )
