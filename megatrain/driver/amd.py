"""AMD's driver: HIP's runtime (libamdhip64), and what the kernel's amdgpu shows in files.

Untested on hardware. The runtime's numbers of GPUs are torch's.
"""

import ctypes
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch

from megatrain.driver.base import Driver, Gpu

_GREATER_OR_EQUAL = 0  # hipStreamWaitValueGte, not cyclic: counters stay below 2**32
_ALL_BITS = 2**32 - 1
_SYSTEM = Path("/sys")


class Amd(Driver):
    """Waits by `hipStreamWaitValue32`."""

    # hipErrorNotSupported; and hipErrorInvalidValue, where GPU_STREAMOPS_CP_WAIT is set and only
    # HIP's own signals may be waited for (clr, hip_stream_ops.cpp).
    unsupported = (1, 801)

    @cached_property
    def _hip(self) -> ctypes.CDLL:
        """The runtime of the version that torch has loaded. Raises OSError: there is none."""
        name = "libamdhip64.so"
        with suppress(OSError):
            return ctypes.CDLL(f"{name}.{str(torch.version.hip).partition('.')[0]}")
        return ctypes.CDLL(name)

    def gpu(self, index: int) -> Gpu | None:
        name, address = ctypes.create_string_buffer(256), ctypes.create_string_buffer(64)
        try:
            hip = self._hip
        except OSError:
            return None
        if hip.hipDeviceGetName(name, ctypes.c_int(len(name)), ctypes.c_int(index)):
            return None
        if hip.hipDeviceGetPCIBusId(address, ctypes.c_int(len(address)), ctypes.c_int(index)):
            return None
        files = _SYSTEM / "bus/pci/devices" / address.value.decode().lower()
        used = _line(files / "mem_info_vram_used")
        return Gpu(
            name=name.value.decode(),
            memory_bytes=int(_line(files / "mem_info_vram_total") or 0),
            driver=_line(_SYSTEM / "module/amdgpu/version") or str(torch.version.hip),
            uuid=_line(files / "unique_id"),
            used_bytes=int(used) if used else None,
        )

    def wait(self, stream: int, address: int, count: int) -> int:
        hip, on_device = self._hip, ctypes.c_void_p()
        return hip.hipHostGetDevicePointer(
            ctypes.byref(on_device), ctypes.c_void_p(address), ctypes.c_uint(0)
        ) or hip.hipStreamWaitValue32(
            ctypes.c_void_p(stream),
            on_device,
            ctypes.c_uint32(count),
            ctypes.c_uint(_GREATER_OR_EQUAL),
            ctypes.c_uint32(_ALL_BITS),
        )


def _line(file: Path) -> str:
    """The text of a one-line file under /sys; empty if the file cannot be read."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
