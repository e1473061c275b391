"""What is foretold of layers in tiles, and of attention that waits, against real layers."""

import contextlib

import pytest
import torch
from torch import Tensor

from megatrain import AdamW, Placement
from megatrain.device import Buffer, CpuDevice
from megatrain.engine.batch import Batch
from megatrain.engine.head import Head
from megatrain.engine.sink import GradAccumulator
from megatrain.forecast import op_counter
from megatrain.forecast.profile import Profile, acts_alone, eager_work
from megatrain.forecast.workload import Workload
from megatrain.model import token_chunks
from megatrain.model.capture import Rows
from megatrain.model.probe import spec
from megatrain.model.program import MicroBatch, ModelProgram
from megatrain.optim import StreamedOptimizer, tile_planes
from megatrain.source.source import open_source, tile_layouts
from megatrain.store.store import Tile
from tests.parity.test_tiles import TAKEN, model_of
from tests.sweeps import few
from tests.unit.forecast_cases import small_machine, tiny_config
from tests.unit.test_forecast import forecasts

TOKENS, ROWS, WIDTH = 512, 2, 256


def tensors(values):
    """As the counter finds them, but those with data."""
    if isinstance(values, Tensor):
        return [values]
    values = list(values.values()) if isinstance(values, dict) else values
    return [t for v in values for t in tensors(v)] if isinstance(values, list | tuple) else []


@contextlib.contextmanager
def tallied():
    """Tallies count real tensors, also in the forward of tiles."""
    with pytest.MonkeyPatch.context() as patch, torch.enable_grad():
        patch.setattr(op_counter, "tensors", tensors)
        patch.setattr(token_chunks, "without_modes", contextlib.nullcontext)
        yield


def real_work(chunk_tokens):
    """A layer run on the CPU, under a counter."""
    model = spec(open_source(tiny_config()).model)
    program, layer = ModelProgram(model, torch.device("cpu"), torch.float32), model.layers[1]
    program.train(True)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    table = {name: torch.randn(1, WIDTH, requires_grad=True) for name in model.gathered}
    rows = Rows(ids, ids, table, torch.zeros(1, dtype=torch.long))
    micro = MicroBatch({"input_ids": ids}, ids, rows)
    program.prologue({}, micro)
    values = {ref: torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True) for ref in layer.inputs}
    weights = {
        name: (torch.randn(p.shape) / 16).requires_grad_()
        for name, p in layer.module.named_parameters()
    }
    if chunk_tokens is not None:
        program.tile(chunk_tokens, compiled=False)
    program.layer(1, weights, micro, values)  # parts are tried at the first call
    given = [*values.values(), *weights.values(), *micro.calls[1].leaves]
    with tallied():
        return eager_work(lambda: program.layer(1, weights, micro, values), given)


@pytest.mark.parametrize("chunk_tokens", few([None, 64, 256], 1))
def test_memory_of_a_layer_is_that_of_a_real_one(chunk_tokens):
    real = real_work(chunk_tokens)
    model = spec(open_source(tiny_config()).model)
    found = Profile(model, torch.float32, TOKENS, compiled=False, chunk_tokens=chunk_tokens)
    told = found.layer(1, ROWS)
    for name in ("forward", "again", "backward"):
        peak, was = getattr(told, name).peak_bytes, getattr(real, name).peak_bytes
        assert peak == pytest.approx(was, rel=0.03), name
    assert told.again.kept_bytes == real.again.kept_bytes
    assert told.backward.product_flops == real.backward.product_flops


def head_layout(model):
    optimizer = StreamedOptimizer(AdamW(), model.capture.model)
    layouts = tile_layouts(model, optimizer.group_of())
    return next(layout for layout in layouts if layout.name == "head")


def real_head_bytes(head_tokens):
    """At the peak of a head run on the CPU, under a counter."""
    model = spec(open_source(tiny_config()).model)
    program, layout = ModelProgram(model, torch.device("cpu"), torch.float32), head_layout(model)
    program.train(True)
    program.tile_epilogue(head_tokens)
    slot = Buffer("slot", torch.randn(layout.numel) / 16)
    sums = Buffer("sums", torch.zeros(layout.trainable_numel))
    tile = Tile(0, layout, dict.fromkeys(tile_planes(None, slot.data.dtype), slot))
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    table = {name: torch.randn(1, WIDTH) for name in model.gathered}
    micro = MicroBatch({"input_ids": ids}, ids, Rows(ids, ids, table, torch.zeros(1).long()))
    h = [{ref: torch.randn(ROWS, TOKENS, WIDTH) for ref in model.epilogue_inputs}]
    batch = Batch([micro], 1, ROWS * TOKENS, torch.zeros(1), 0)
    head = Head(CpuDevice(), program, tile, head_tokens, lambda loss: loss.summed)
    room = GradAccumulator(tile, sums)
    head.loss_and_vjp(slot, batch, [*h], room)  # parts are tried at the first call
    with tallied(), op_counter.OpCounter() as counts:
        counts.ignore([slot.data, sums.data, h, micro.inputs, micro.targets])
        head.loss_and_vjp(slot, batch, h, room)
    return counts.peak_bytes


@pytest.mark.parametrize("head_tokens", few([64, 100, ROWS * TOKENS], 1))
def test_memory_of_a_head_is_that_of_a_real_one(head_tokens):
    model = spec(open_source(tiny_config()).model)
    found = Profile(model, torch.float32, TOKENS, compiled=False)
    for visit in range(len(model.layers)):
        found.layer(visit, ROWS)
    told = found.head(head_layout(model), ROWS, head_tokens).peak_bytes
    assert told == pytest.approx(real_head_bytes(head_tokens), rel=0.03)
    # Nothing of it stays behind in the model.
    assert not any("forward" in vars(part) for _, part in found.program.rest)


@pytest.mark.parametrize("family", TAKEN)
def test_parts_that_run_in_tiles_are_known_without_weights(family):
    source = open_source(model_of(family)).model
    found = set()
    for layer in spec(source).layers:
        for name, part in token_chunks.parts(layer.kind.module):
            bound = {**dict(part.named_parameters()), **dict(part.named_buffers())}
            if "." not in name and acts_alone(part, bound, source.config.hidden_size):
                found.add(name)
    assert found == TAKEN[family]


def long(save_attention):
    """6 rows of 32 tokens, in tiles of 16."""
    placement = Placement(chunk_tokens=16, layer_inputs="host", save_attention=save_attention)
    workload = Workload(6 * 32, 32, None, True, "bf16", False)
    return forecasts().of(small_machine(), placement, workload, 6)


def test_attention_that_waits_is_not_computed_again():
    none, device, host = long("none"), long("device"), long("host")
    # 6 layers, 6 rows, 4 heads: half of two products of [32, 64] with [64, 32], at 1 TFLOPS.
    attention = 6 * 6 * 4 * 2 * 32 * 32 * 64 / 1e12
    saved = none.bounds["compute"] - device.bounds["compute"]
    assert saved == pytest.approx(attention, rel=0.01)
    results = 6 * 6 * 32 * (256 * 2 + 4 * 4)  # and the logarithms of sums
    # When most memory is in use, those of the last layer are gone.
    assert device.device_bytes["kept attention"] == results * 5 // 6
    assert host.host_bytes["host_kept_bytes"] == results
    assert host.bounds["copy out"] > device.bounds["copy out"]
    assert host.device_bytes["lanes of the host"] > device.device_bytes["lanes of the host"]
