"""What is foretold of layers and heads, against real ones."""

import contextlib
import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config

from megatrain import AdamW, Engine, Placement
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.inductor_model import compiled_work, eager_work, traced
from megatrain.forecast.measure import acts_alone, fakes
from megatrain.forecast.op_counter import OpCounter
from megatrain.forecast.profile import Profile
from megatrain.forecast.workload import Workload
from megatrain.loss import CROSS_ENTROPY, DPO
from megatrain.model import token_chunks
from megatrain.model.capture import Ref, Rows
from megatrain.model.micro_batch import MicroBatch
from megatrain.model.probe import spec
from megatrain.source.source import open_source, structure
from tests.families.plain import make_steps
from tests.families.tiny import decoder_sizes, tiny_model
from tests.parity.cases import Noting, make_engine
from tests.parity.test_tiles import TAKEN, model_of
from tests.race.schedule import Together
from tests.sweeps import few
from tests.unit.forecast_cases import (
    experts_config,
    small_machine,
    tiny_config,
    wide_config,
    wide_spec,
)
from tests.unit.test_forecast import forecasts


@contextlib.contextmanager
def tallied():
    """Tallies also count the forward of tiles."""
    with pytest.MonkeyPatch.context() as patch, torch.enable_grad():
        patch.setattr(token_chunks, "without_modes", contextlib.nullcontext)
        yield


@pytest.mark.parametrize("family", TAKEN)
def test_parts_that_run_in_tiles_are_known_without_weights(family):
    source = open_source(model_of(family)).model
    found = set()
    for layer in spec(source).layers:
        for name, part in layer.kind.module.named_children():
            bound = {**dict(part.named_parameters()), **dict(part.named_buffers())}
            taken = part in token_chunks.parts(layer.kind.module)
            if taken and acts_alone(part, bound, source.config.hidden_size):
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


# What is foretold of a large head, against the engine's own.

HEAD_ROWS, HEAD_TOKENS = 6, 32


class Keeping(Noting):
    """Knows the memory of all buffers, so that a counter may leave it out."""

    def __init__(self):
        super().__init__()
        self.kept: list[Tensor] = []

    def empty(self, name, numel, dtype):
        self.kept.append((buffer := super().empty(name, numel, dtype)).data)
        return buffer

    def host(self, name, numel, dtype, *, pinned):
        self.kept.append((buffer := super().host(name, numel, dtype, pinned=pinned)).data)
        return buffer


def head_seconds(found):
    spans = (span for span in found.spans if span.stream == "compute")
    return sum(span.seconds for span in spans if span.name.startswith("head"))


@pytest.mark.parametrize("compiled", few([True, False]))
def test_a_loss_of_all_tokens_computes_logits_once_more(compiled):
    machine, forecasts = replace(small_machine(), device_gbps=1e9), ForecastCache(wide_spec())
    workload = Workload(HEAD_ROWS * HEAD_TOKENS, HEAD_TOKENS, None, True, "bf16", compiled)
    placement = Placement(slots=3, compile=compiled)
    one, two = (
        head_seconds(forecasts.of(machine, placement, replace(workload, loss=loss), 4))
        for loss in (CROSS_ENTROPY, DPO())
    )
    product = 2 * HEAD_ROWS * HEAD_TOKENS * 256 * 8192 / (machine.matmul_tflops * 1e12)
    assert two - one == pytest.approx(product, rel=0.01)


def test_a_loss_of_all_tokens_is_foretold_in_one_pass_without_graphs():
    """As the engine takes it, whatever the placement says."""
    workload = Workload(HEAD_ROWS * HEAD_TOKENS, HEAD_TOKENS, None, True, "bf16", True, loss=DPO())
    kept = Placement(slots=3, passes=3, save_activations=2, compile=True)
    found, plain = (
        ForecastCache(wide_spec()).of(small_machine(), each, workload, 2)
        for each in (kept, replace(kept, passes=1, save_activations=0))
    )
    assert found.bounds == pytest.approx(plain.bounds)
    assert found.device_bytes["gradient sums"] > 0 and "kept graphs" not in found.device_bytes


@pytest.mark.parametrize(
    ("config", "tokens", "choices", "loss"),
    few(
        [
            (wide_config, 128, {"head_tokens": 100}, Together()),
            (wide_config, 128, {"head_tokens": 100, "layer_inputs": "host"}, CROSS_ENTROPY),
            (wide_config, 32, {"head_tokens": 100}, CROSS_ENTROPY),
            (partial(tiny_config, 2), 512, {"head_tokens": 64}, CROSS_ENTROPY),
            (partial(tiny_config, 2), 256, {"head_tokens": 64, "chunk_tokens": 64}, CROSS_ENTROPY),
        ],
        *(1, 4),
    ),
)
def test_what_a_step_works_with_is_foretold(config, tokens, choices, loss):
    """All device memory at the peak of a real step, but for its long-lived buffers.

    That is in a large head, or in the layers of long rows, whole or in tiles.
    """
    placement = Placement(**choices)
    workload = Workload(4 * tokens, tokens, 2, True, "fp32", False, loss=loss)
    forecasts = ForecastCache(spec(open_source(config()).model))
    found = forecasts.of(small_machine(), placement, workload, 2)
    told = sum(found.device_bytes.get(p, 0) for p in ("activations", "working set"))
    told += found.device_bytes["layer arguments"]
    options = {"optimizer": AdamW(), "precision": "fp32", "placement": placement}
    ids = torch.randint(512, (4, tokens), generator=torch.Generator().manual_seed(0))
    step, device = [{"input_ids": part, "labels": part} for part in ids.split(2)], Keeping()
    with Engine(config(), device=device, **options) as engine:
        engine.step(step, loss)
        with tallied(), OpCounter(real=True) as counts:
            counts.ignore(device.kept)
            engine.step(step, loss)
    assert counts.peak_bytes == pytest.approx(told, rel=0.03)


# What a compiled layer is foretold to work with, and what torch's compiled code allocates.

MLP_ROWS, MLP_TOKENS, MLP_WIDTH, MLP = 4, 512, 320, 1728  # 32B's proportions
UNIT = MLP_ROWS * MLP_TOKENS * MLP * 2  # bytes of an activation inside the MLP


@pytest.fixture(scope="module")
def measured():
    config = Qwen2Config(
        **decoder_sizes(512, MLP_WIDTH, MLP, 1, 5, 1),
        max_position_embeddings=MLP_TOKENS,
        tie_word_embeddings=False,
    )
    return Profile(spec(open_source(config).model), Workload(sequence_length=MLP_TOKENS))


def peak_of(work, saves):
    """From the start of the forward to the end of the backward."""
    if saves is None:
        return max(work.recompute.peak_bytes, work.backward.peak_bytes)
    if saves == "graph":
        return max(work.keeping.peak_bytes, work.kept_backward.peak_bytes)
    assert work.repeating is not None
    return max(work.forward.peak_bytes, work.repeating.peak_bytes)


def test_an_mlp_s_three_results_are_alive_with_what_they_are_computed_from(measured):
    """As the test below saw the compiled code do it (torch 2.13)."""
    work = measured.layer(0, MLP_ROWS)
    peaks = [peak_of(work, saves) / UNIT for saves in ("nothing", "graph", None)]
    assert peaks == pytest.approx([7.008, 6.002, 5.164], abs=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("saves", ["nothing", "graph", None])
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
def test_compiled_code_works_with_what_is_foretold(measured, saves, tmp_path):
    torch.compiler.reset()
    program = measured._measurer.program
    program.compile()
    weights, micro, values = layer_call(program, (MLP_ROWS, MLP_TOKENS))

    def step():
        made = list(program.layer(0, weights, micro, values, saves).values())
        leaves = [*values.values(), *weights.values()]
        torch.autograd.grad(made, leaves, [torch.randn_like(value) for value in made])

    step()  # compiles
    taken = _peak_bytes(step, tmp_path / "trace.json")
    ends = 2 * MLP_ROWS * MLP_TOKENS * MLP_WIDTH * 2  # the result, and its gradient
    assert taken - ends == pytest.approx(peak_of(measured.layer(0, MLP_ROWS), saves), rel=0.005)


def layer_call(program, shape):
    """Random weights, a micro-batch and inputs of a program's first layer."""
    layer, ids = program.spec.layers[0], torch.zeros(shape, dtype=torch.long)
    named = dict(program.spec.capture.model.named_parameters())

    def drawn(*shape):
        return torch.randn(*shape).div(50).to(program.dtype).requires_grad_()

    tables = {name: drawn(1, named[name].shape[1]) for name in program.spec.gathered}
    rows = Rows(ids, ids, tables, torch.zeros(1, dtype=torch.long))
    micro = MicroBatch({"input_ids": ids}, ids, rows)
    with torch.enable_grad():
        program.prologue({}, micro)
    weights = {name: drawn(*p.shape) for name, p in layer.module.named_parameters()}
    return weights, micro, {ref: drawn(*shape, MLP_WIDTH) for ref in layer.inputs}


def _peak_bytes(run, trace):
    """The most that was allocated at a time while `run` ran, over what was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    events = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    live = peak = 0
    for event in events:
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def test_what_lies_where_an_uncounted_tensor_ended_is_counted():
    """A head lets go of its routers' activations, and the next logits often lie there."""
    counter = OpCounter()
    with fakes():
        ended = [torch.empty(1) for _ in range(100)]
        counter.ignore(ended)
        del ended
        with counter:
            kept = [torch.empty(1) for _ in range(100)]
    assert counter.total_bytes == len(kept) * 256


def test_the_backward_of_a_kept_graph_computes_products_of_experts_again():
    """torch's partitioner does not count them as heavy, so a kept graph does not hold them.

    On an H200 a layer's graph of 12 x 4,096 tokens takes 0.84 GB in gpt-oss-120B (LoRA of attention
    and experts); 0.88 are foretold, and 3.58 were while it was foretold to hold them.
    """
    profile = Profile(spec(open_source(experts_config()).model), Workload(sequence_length=512))
    # A token has two experts, and of twelve experts' last pairs of tiles half is empty.
    work, rows = profile.layer(0, 4), 4 * 512 * 2 + 12 * 128
    products = 2 * rows * 256 * (2 * 256 + 256)
    assert work.kept_backward.expert_flops - work.backward.expert_flops == products
    assert work.in_float8(trained=True).backward.expert_flops == work.backward.expert_flops
    assert work.keeping.kept_bytes < work.recompute.kept_bytes / 4


def test_what_a_backward_makes_is_counted_beside_what_was_kept_for_it():
    """Here the kept matrix is let go of before most is made; of a graph on the host it stays."""
    x, matrix = torch.empty(64, device="meta", requires_grad=True), 64 * 64 * 4
    work = eager_work(lambda: {Ref(0, 0): (x[:, None] * x).exp().sum(1)}, [x])
    assert work.recompute.kept_bytes == matrix
    assert matrix * 3 <= work.backward.made_bytes < matrix * 3.5
    assert work.backward.peak_bytes - work.recompute.kept_bytes < matrix * 2.5
    x = x.view(8, 8).detach().requires_grad_()
    work = compiled_work(traced(lambda: {Ref(0, 0): ((x @ x).exp() @ x).exp()}, [x]))
    made = work.kept_backward.made_bytes
    assert made > work.kept_backward.peak_bytes - work.recompute.kept_bytes > 0


def test_the_last_of_thousands_of_operations_in_a_row_is_followed():
    """As in linear attention of long rows, where torch has no kernel: Qwen3-Next's 16k tokens."""
    x = torch.empty(8, 8, device="meta", requires_grad=True)

    def run():
        states = [x]
        for _ in range(280):
            states.append(states[-1].sin() + x)
        return {Ref(0, 0): torch.cat([state @ x for state in states])}

    assert compiled_work(traced(run, [x])).backward.product_flops


@pytest.mark.parametrize("family", ["codegen", "ctrl", "apertus", "cpmant"])
def test_a_model_is_trained_as_if_nothing_had_been_foretold_of_it(family):
    """Forwards of these replace buffers, read them whole, keep them in parts, and check sizes."""
    model = tiny_model(family)
    source, [step] = open_source(model), make_steps(model.config)[:1]
    size = Workload(96, 48, 2, precision="fp32")
    for compiled, chunk_tokens in ((True, None), (False, 16)):
        placement = Placement(compile=compiled, chunk_tokens=chunk_tokens)
        workload = replace(size, compile=compiled)
        assert ForecastCache(structure(source)).of(small_machine(1e4), placement, workload, 2)
    with make_engine(source) as engine, make_engine(model) as other:
        assert engine.step(step).loss == other.step(step).loss
