"""What torch may take of a GPU within a limit: what the driver leaves of it."""

import pytest
import torch

from megatrain import DoesNotFit
from megatrain.base.units import GIB, MIB
from megatrain.device.cuda import CudaDevice
from megatrain.machine import CONTEXT_BYTES

TOTAL = 140 * GIB


@pytest.fixture
def shares(monkeypatch):
    """The shares of the device that torch was allowed."""
    allowed: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    for name in ("max_memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: allowed.append(share)
    )

    class Runtime:
        @staticmethod
        def cudaHostRegister(address, num_bytes, flags):
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    return allowed


def a_gpu():
    """A device that has started nothing."""
    device = CudaDevice.__new__(CudaDevice)
    device.torch_device = torch.device("cuda", 0)
    device._pinned, device._limit, device._unpinned = {}, None, False
    return device


def test_without_a_limit_torch_may_take_all(shares):
    a_gpu().limit(None, None)
    assert shares == [1.0]


def test_the_driver_s_share_counts_and_grows_with_what_is_pinned(shares):
    device = a_gpu()
    device.limit(10 * GIB, None)
    assert shares[-1] * TOTAL == pytest.approx(10 * GIB - CONTEXT_BYTES)
    pinned = torch.empty(1, dtype=torch.uint8).expand(100 * GIB)
    assert device._pin("weights", pinned)
    assert shares[-1] * TOTAL == pytest.approx(10 * GIB - CONTEXT_BYTES - 100 * MIB)
    memory = device.memory()
    assert memory["device_context_bytes"] == CONTEXT_BYTES + 100 * MIB
    assert memory["device_free_bytes"] == 10 * GIB - CONTEXT_BYTES - 100 * MIB


def test_a_limit_below_what_the_driver_takes_is_refused(shares):
    with pytest.raises(DoesNotFit, match="device_memory is 0.5 GiB, of which the driver takes"):
        a_gpu().limit(512 * MIB, None)
    assert shares == []
