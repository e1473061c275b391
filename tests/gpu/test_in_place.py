"""Layers on a real GPU that compute with weights where they rest in host memory."""

from functools import partial

import pytest
import torch

from megatrain import InputError, Placement
from megatrain.device import Buffer
from megatrain.device.base import COMPUTE, UPDATE
from megatrain.device.cuda import CudaDevice
from tests.parity.cases import llama, make_batches, make_engine, masters, same

pytestmark = pytest.mark.gpu

NUMEL = 1 << 22


def trained(placement, **options):
    """Losses, norms, an evaluation after each step and the masters at the end."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": True}
    with make_engine(llama(**sizes), placement=placement, device="cuda", **options) as engine:
        numbers = []
        for step in make_batches(4, [(2, 64), (2, 64)]):
            result = engine.step(step)
            numbers += [result.loss, result.grad_norm, engine.evaluate(step[:1])]
        return numbers, masters(engine)


def same_bits(one, other):
    return one[0] == other[0] and same(one[1], other[1])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_no_bit_differs_from_weights_in_slots(precision, clip, rule):
    options = {"precision": precision, "clip": clip, "rule": rule, "lr": 0.1, "verify": "step"}
    wanted = trained(Placement(slots=2), **options)
    for choices in (
        {},
        {"passes": 2, "save_activations": 1, "host_grad_buffers": 1},
        {"keep_rows": False, "layer_inputs": "host", "resident": ("layer 0",)},
        {"offload_activations": 2, "keep_weights": 2},
    ):
        now = trained(Placement(slots=0, **choices), **options)
        assert same_bits(now, wanted), choices


def test_no_bit_of_compiled_layers_differs():
    options = {"precision": "bf16", "lr": 0.1}
    assert same_bits(
        trained(Placement(slots=0, compile=True), **options),
        trained(Placement(slots=2, compile=True), **options),
    )


def test_each_side_sees_what_the_other_wrote():
    """The GPU waits for a host thread's writes, and the thread for the GPU's, many times."""
    device = CudaDevice()
    try:
        host = device.host("values", NUMEL, torch.float32, pinned=True)
        there = device.in_place(host)
        assert there.data.is_cuda and there.data.data_ptr() == host.data.data_ptr()

        def double():
            host.data.mul_(2)

        for _ in range(50):
            device.run(COMPUTE, "add", partial(there.data.add_, 1), writes=[there])
            device.wait(UPDATE, device.record(COMPUTE), "added")
            device.run(UPDATE, "double", double, writes=[host])
            device.wait(COMPUTE, device.record(UPDATE), "doubled")
        device.run(COMPUTE, "halve", partial(there.data.div_, 2**50), writes=[there])
        device.synchronize(device.record(COMPUTE), "halved")
        assert torch.equal(host.data, torch.full((NUMEL,), 2.0 - 2.0**-49).float())
        empty = device.in_place(host.piece(0, 0)).data
        assert empty.is_cuda and not len(empty)
        with pytest.raises(InputError, match="not pinned.*ulimit -l"):
            device.in_place(Buffer("others", torch.zeros(8)))
    finally:
        device.close()
