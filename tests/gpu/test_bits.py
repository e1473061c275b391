"""Checksums of tiles that rest on a real GPU, and of those that rest on its host."""

import pytest
import torch

from megatrain import Placement, RunFailed, kernels
from megatrain.kernels import reference
from megatrain.kernels.reference import SUMMED_BYTES
from tests.families.tiny import tiny_model
from tests.inside import store_of
from tests.parity.cases import llama, make_batches, make_engine, masters, same

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rule", ["adamw", "muon"])
@pytest.mark.parametrize("resident", [(), ("layer 1", "head")])
def test_bits_are_compared_and_nothing_changes(rule, resident):
    steps, results = make_batches(4), []
    options: dict = {"rule": rule, "precision": "bf16", "device": "cuda"}
    options["placement"] = Placement(slots=2, resident=resident)
    for verify in ("step", "off"):
        with make_engine(llama(), verify=verify, **options) as engine:
            for step in steps:
                engine.step(step)
            results.append(masters(engine))
    assert same(*results)
    for plane in range(4 if rule == "adamw" else 5):
        with make_engine(llama(), verify="step", **options) as engine:
            engine.step(steps[0])
            engine.flush()
            torch.cuda.synchronize()
            [tile] = [tile for tile in store_of(engine).tiles if tile.name == "layer 1"]
            buffer = [*tile.planes.values()][plane]
            if len(buffer.data):
                # Not in the norms before the matrices, whose momentum nothing reads.
                buffer.data.view(torch.uint8)[buffer.data.nbytes // 2] ^= 8
                torch.cuda.synchronize()
                with pytest.raises(RunFailed, match="layer 1: the plane of .*one flipped bit"):
                    for step in steps[1:]:
                        engine.step(step)


def test_a_mixture_of_experts_repeats_to_the_bit():
    steps, results = make_batches(3, [(8, 64)]), []
    for _ in range(2):
        with make_engine(tiny_model("qwen3_moe"), precision="bf16", device="cuda") as engine:
            for step in steps:
                engine.step(step)
            results.append(masters(engine))
    assert same(*results)


@pytest.mark.parametrize("at", [0, 8, SUMMED_BYTES - 16, 3 * SUMMED_BYTES + 4096, 4])
@pytest.mark.parametrize("size", [0, 3, 8, 24, 4100, SUMMED_BYTES, 5 * SUMMED_BYTES + 13])
def test_checksums_of_the_gpu_are_those_of_the_reference(at, size):
    generator = torch.Generator().manual_seed(size)
    first = at % 8  # a range lies in memory as it does in its plane
    plane = torch.randint(256, (first + size,), generator=generator, dtype=torch.uint8)
    wanted = torch.ones(10, 2, dtype=torch.int64)
    on_gpu = wanted.cuda()
    kernels.checksum(plane.cuda()[first:], on_gpu, at)
    reference.checksum(plane[first:], wanted, at)
    assert torch.equal(on_gpu.cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (4095,), (3, 4097), (1031, 4096)])
def test_gradients_are_added_up_as_on_the_cpu(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(shape, generator=generator)
    gradient = torch.randn(shape, generator=generator).to(dtype)
    for part in (gradient, gradient[:1].expand(shape)):
        on_gpu = sums.cuda()
        kernels.add(on_gpu, part.cuda())
        assert torch.equal(on_gpu.cpu(), sums + part)
