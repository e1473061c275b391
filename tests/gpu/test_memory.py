"""On a real GPU: limits of its memory, and what waits from the forward to the backward."""

import gc
import multiprocessing

import pytest
import torch
from transformers import LlamaConfig

from megatrain import AdamW, DoesNotFit, Engine, Placement
from megatrain.base.units import MIB
from megatrain.telemetry.gpu import find_gpu
from tests.families.tiny import decoder_sizes
from tests.gpu.test_cuda import model, steps, train
from tests.parity.cases import gradients, llama, make_batches, make_engine, relative_error

pytestmark = pytest.mark.gpu


def test_compiled_graphs_are_the_same_on_the_host():
    batches = steps(3, uneven=False)
    kept = train("cuda", batches, placement=Placement(slots=3, compile=True, save_activations=6))
    placement = Placement(slots=3, compile=True, offload_activations=6, layer_inputs="host")
    away = train("cuda", batches, placement=placement)
    assert away[:2] == kept[:2]
    assert all(torch.equal(away[2][name], kept[2][name]) for name in kept[2])


@pytest.mark.parametrize("compiled", [False, True])
def test_tiles_of_tokens_change_rounding_only(compiled):
    [step] = make_batches(1)
    results = []
    for choices in ({}, {"chunk_tokens": 8, "compile": compiled, "save_attention": "host"}):
        engine = make_engine(llama(), device="cuda", clip=1e9, placement=Placement(**choices))
        result = engine.step(step)
        dict(engine.named_masters())  # waits for host threads: one scatters the rows of the table
        results.append((result, gradients(engine)))
        engine.close()
    (one, whole), (other, cut) = results
    assert other.loss == pytest.approx(one.loss, rel=1e-5)
    assert relative_error(cut, whole) < 1e-3


def gpu_bytes():
    """What all processes take of the GPU."""
    state = find_gpu("cuda:0")
    return (state and state.used_bytes) or 0


def test_a_limit_holds_whatever_the_step_asks_for():
    """Steps grow until one does not fit; the driver never shows more than the limit.

    In a process of its own, so that what the driver takes for it counts, too.
    """
    limit, before = 1536 * MIB, gpu_bytes()
    process = multiprocessing.get_context("spawn").Process(target=grow, args=(limit,))
    process.start()
    highest = 0
    while process.is_alive():
        highest = max(highest, gpu_bytes())
    assert process.exitcode == 0
    assert 0 < highest - before <= limit


def grow(limit):
    """Steps of more and more rows, to the limit."""
    engine = Engine(
        model(), optimizer=AdamW(), device="cuda", placement=Placement(slots=2), device_memory=limit
    )
    shown = []
    with pytest.raises(DoesNotFit, match="no memory left|no device memory"):
        for rows in range(16, 4096, 16):
            ids = torch.randint(512, (rows, 1024))
            engine.step([{"input_ids": ids, "labels": ids}])
            memory = engine.memory()
            shown.append(memory["device_bytes"] + memory["device_context_bytes"])
    assert max(shown) <= limit
    assert engine.memory()["device_total_bytes"] == limit
    engine.close()


def test_less_than_the_least_is_refused():
    with pytest.raises(DoesNotFit, match="device"):
        Engine(model(), optimizer=AdamW(), device="cuda", device_memory=64 * MIB)


def test_weights_are_drawn_without_device_memory_and_alike_on_every_device():
    """Tables of 256 MiB in fp32 add nothing to what rests on the device afterwards."""
    config = LlamaConfig(**decoder_sizes(65536, 1024, 2048, 2, 8, 4))
    placement = Placement(slots=1, gradient_lanes=1, keep_rows=False)
    names = ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight")
    found = []
    gc.collect()
    for device in ("cuda", "cpu"):
        with Engine(config, optimizer=AdamW(), device=device, placement=placement) as engine:
            memory = engine.memory()
            assert memory["device_used_peak_bytes"] < memory["device_used_bytes"] + 32 * MIB
            masters = engine.named_masters()
            found.append({name: master for name, master in masters if name in names})
    on_gpu, on_cpu = found
    assert all(torch.equal(on_gpu[name], on_cpu[name]) for name in names)
