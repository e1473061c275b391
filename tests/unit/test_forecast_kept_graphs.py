"""What is foretold of graphs that wait, against what torch's partitioner lets them hold."""

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from transformers import GptOssConfig, LlamaConfig

from megatrain.engine.saved_tensors import OffloadPlan, SavedTensors
from megatrain.forecast.profile import Profile
from megatrain.model.probe import spec
from megatrain.model.program import ModelProgram
from megatrain.source.source import open_source
from tests.inside import compiled_by
from tests.unit.forecast_cases import layer_call

ROWS, TOKENS, WIDTH = 2, 512, 256


def partition(joint, inputs, **kwargs):
    """As torch._inductor does it."""
    joint_graph_passes(joint)
    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **kwargs)


@pytest.fixture
def quickly(monkeypatch):
    """torch.compile partitions graphs as always, but makes no kernels."""
    torch.compiler.reset()

    def boxed(graph, inputs):
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=boxed,
        bw_compiler=boxed,
        partition_fn=partition,
        decompositions=select_decomp_table,
    )
    compiled_by(monkeypatch, backend)


LORA = {"r": 4, "target_modules": "all-linear"}


def model_of(intermediate, kv_heads, adapter):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
    )
    return spec(open_source(config, adapter=adapter).model)


def held_bytes(model, saves):
    """What the compiled graph of a layer saves besides its weights and arguments."""
    program = ModelProgram(model, torch.device("cpu"), torch.float32)
    program.train(True)
    program.compile()
    flat, weights, micro, values = layer_call(program, 1, (ROWS, TOKENS))
    leaving = OffloadPlan()
    held = SavedTensors(flat, values, micro.calls[1].leaves, leaving)
    with torch.enable_grad(), held.saving():
        made = program.layer(1, weights, micro, values, saves)
    assert all(value.requires_grad for value in made.values())
    return sum(memory.nbytes for memory in leaving.memory)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("intermediate", "kv_heads", "saves", "adapter"),
    [(768, 2, "all", LORA), (768, 2, "graph", None), (1408, 1, "graph", None)],
)
def test_kept_graphs_hold_what_is_foretold(quickly, intermediate, kv_heads, saves, adapter):
    model = model_of(intermediate, kv_heads, adapter)
    assert held_bytes(model, saves) == pytest.approx(foretold_bytes(model, saves), rel=0.01)


def foretold_bytes(model, saves):
    work = Profile(model, torch.float32, TOKENS, compiled=True).layer(1, ROWS)
    return (work.keeping if saves == "graph" else work.again).kept_bytes


@pytest.mark.exhaustive
def test_kept_logits_of_eager_attention_are_foretold(quickly):
    """gpt-oss puts a sink beside them, and torch neither computes that nor their copy again."""
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
    )
    model = spec(open_source(config).model)
    assert held_bytes(model, "all") == pytest.approx(foretold_bytes(model, "all"), rel=0.01)
    kept = foretold_bytes(model, "graph")
    assert kept / 1.15 < held_bytes(model, "graph") < kept * 1.02
