"""On a real GPU: heads that are streamed in ranges of their table's rows."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from megatrain import AdamW, Engine, Placement
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.workload import Workload
from megatrain.machine import present_machine
from megatrain.model.probe import spec
from megatrain.source.source import open_source
from megatrain.units import GIB, MIB
from tests.gpu.test_split import trained

pytestmark = pytest.mark.gpu

VOCAB = 65536
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
}
# A layer has 32 MiB of weights, the head 128.
SPLIT = Placement(max_stream_bytes=40 * MIB, gradient_lanes=1, keep_rows=False, head_tokens=256)


def train(
    placement: Placement, *, tied: bool = False, **options: Any
) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses and norms, final masters, and device memory at its peak."""
    config = LlamaConfig(**CONFIG, tie_word_embeddings=tied)
    config._attn_implementation = options.pop("attention", "sdpa")
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 256), (1, 512), (3, 100)]
    drawn = [[torch.randint(VOCAB, s, generator=generator) for s in shapes] for _ in range(3)]
    return trained(config, drawn, placement, **options)


@pytest.mark.parametrize("tied", [False, True])
def test_schedules_change_no_bit_and_it_is_a_whole_head(tied: bool) -> None:
    """torch's fused attention does not repeat in fp32, so it is the plain one here."""
    plain: dict[str, Any] = {"tied": tied, "precision": "fp32", "attention": "eager"}
    whole = train(Placement(), **plain)
    choices: list[dict[str, Any]] = [
        {"slots": 1, "layer_inputs": "host"},
        {"slots": 3, "keep_rows": True, "gradient_lanes": None},
        {"slots": 2, "save_activations": 1, "layer_inputs": "host"},
    ]
    split = replace(SPLIT, max_stream_bytes=80 * MIB)
    first, *others = (train(replace(split, **c), **plain) for c in choices)
    assert first[0] == pytest.approx(whole[0], rel=1e-4)
    for numbers, masters, _ in others:
        assert numbers == first[0]
        assert all(torch.equal(masters[name], first[1][name]) for name in masters)


@pytest.mark.parametrize("clip", [1.0, None])
def test_compiled_in_bf16_within_its_noise(clip: float | None) -> None:
    whole = train(Placement(), max_grad_norm=clip)
    split = train(replace(SPLIT, compile=True), max_grad_norm=clip)
    assert split[0] == pytest.approx(whole[0], rel=2e-2)


def test_a_head_takes_the_memory_of_a_layer() -> None:
    """Whole: slots of 128 MiB, sums of 256, a gradient of 128; in ranges: 64, 64 and 32."""
    frugal = replace(SPLIT, max_stream_bytes=None)
    whole, split = (train(placement)[2] for placement in (frugal, SPLIT))
    assert split < whole - 300 * MIB


def test_what_it_takes_is_foretold() -> None:
    """Memory within 3 %; seconds of a tiny step are the launches', so they are not compared."""
    machine = present_machine("cuda", precision="bf16")
    assert machine is not None
    gc.collect()
    torch.cuda.empty_cache()  # what earlier tests left cached would count
    found = spec(open_source(LlamaConfig(**CONFIG)).model)
    rows, length = 8, 1024
    placement = replace(SPLIT, compile=True, layer_inputs="host", head_tokens=2048)
    workload = Workload(rows * length, length, 2, True, "bf16", True)
    told = ForecastCache(found).of(machine, placement, workload, 2)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (rows, length), generator=generator)
    step = [{"input_ids": part, "labels": part} for part in ids.split(2)]
    with Engine(
        LlamaConfig(**CONFIG), optimizer=AdamW(), device="cuda", placement=placement
    ) as engine:
        for _ in range(3):
            engine.step(step)
        taken = engine.memory()["device_peak_bytes"]
    foretold = told.device_peak_bytes - told.device_bytes["context"]
    assert abs(taken - foretold) < max(0.03 * taken, 0.05 * GIB)
