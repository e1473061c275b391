"""On a real GPU: whoever launches does not keep host threads from what the GPU waits for."""

import time

import pytest
import torch

from megatrain.device import open_device
from megatrain.device.base import COMPUTE, COPY_OUT, UPDATE
from megatrain.model.layer_template import compile_and_tell

pytestmark = pytest.mark.gpu


def double(values):
    return values + values.sin()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pieces", [4000, 2], ids=["many pieces", "large pieces"])
def test_the_gpu_may_wait_for_a_host_thread_whatever_is_launched(pieces):
    """4,000 kernels behind one that needs Python's lock and the driver again and again."""
    device, fast = open_device("cuda"), compile_and_tell(double, "a test")
    values = torch.ones(1024, device="cuda")

    def piece():
        for _ in range(4000 // pieces):
            fast(values)

    device.run(COMPUTE, "piece", piece)  # now it is known how large such a piece is
    for _ in range(100):
        device.run(UPDATE, "update", lambda: time.sleep(0.01))
        device.wait(UPDATE, device.record(COPY_OUT), "landed")  # and the event is destroyed there
    device.wait(COMPUTE, device.record(UPDATE), "updated")
    for _ in range(pieces):
        device.run(COMPUTE, "piece", piece)
    device.synchronize(device.record(COMPUTE), "all done")
    device.close()
