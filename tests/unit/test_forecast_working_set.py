"""What a compiled layer is foretold to work with, and what torch's compiled code allocates."""

import json
import shutil

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GptOssConfig, Qwen2Config

from megatrain.forecast.profile import Profile
from megatrain.model.probe import spec
from megatrain.source.source import open_source
from tests.unit.forecast_cases import layer_call

ROWS, TOKENS, WIDTH, MLP = 4, 512, 320, 1728  # 32B's proportions
UNIT = ROWS * TOKENS * MLP * 2  # bytes of an activation inside the MLP


@pytest.fixture(scope="module")
def measured():
    config = Qwen2Config(
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_attention_heads=5,
        num_key_value_heads=1,
        num_hidden_layers=1,
        vocab_size=512,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
    )
    return Profile(spec(open_source(config).model), torch.bfloat16, TOKENS, compiled=True)


def peak_of(work, saves):
    """From the start of the forward to the end of the backward."""
    if saves is None:
        return max(work.again.peak_bytes, work.backward.peak_bytes)
    if saves == "graph":
        return max(work.keeping.peak_bytes, work.kept_backward.peak_bytes)
    assert work.repeating is not None
    return max(work.forward.peak_bytes, work.repeating.peak_bytes)


def test_an_mlp_s_three_results_are_alive_with_what_they_are_computed_from(measured):
    """As the test below saw the compiled code do it (torch 2.13)."""
    work = measured.layer(0, ROWS)
    peaks = [peak_of(work, saves) / UNIT for saves in ("nothing", "graph", None)]
    assert peaks == pytest.approx([7.008, 6.002, 5.164], abs=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("saves", ["nothing", "graph", None])
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
def test_compiled_code_works_with_what_is_foretold(measured, saves, tmp_path):
    torch.compiler.reset()
    measured.program.compile()
    _, weights, micro, values = layer_call(measured.program, 0, (ROWS, TOKENS))

    def step():
        made = list(measured.program.layer(0, weights, micro, values, saves).values())
        leaves = [*values.values(), *weights.values()]
        torch.autograd.grad(made, leaves, [torch.randn_like(value) for value in made])

    step()  # compiles
    taken = _peak_bytes(step, tmp_path / "trace.json")
    ends = 2 * ROWS * TOKENS * WIDTH * 2  # the result, and its gradient
    assert taken - ends == pytest.approx(peak_of(measured.layer(0, ROWS), saves), rel=0.005)


def test_eager_attention_works_with_what_is_foretold(tmp_path):
    """Logits beside a sink, their softmax, and the product that its backward writes out."""
    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_hidden_layers=2,
        vocab_size=64,
    )
    eager = Profile(spec(open_source(config).model), torch.bfloat16, TOKENS, compiled=False)
    _, weights, micro, values = layer_call(eager.program, 1, (ROWS, TOKENS))

    def step():
        made = list(eager.program.layer(1, weights, micro, values).values())
        torch.autograd.grad(made, [*values.values(), *weights.values()], values.values())

    taken, ends = _peak_bytes(step, tmp_path / "trace.json"), ROWS * TOKENS * 64 * 2
    assert taken - ends == pytest.approx(peak_of(eager.layer(1, ROWS), None), rel=0.03)


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
