"""News of compilations, and how many there are."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from transformers import LlamaConfig

from megatrain import AdamW, Engine, Placement
from megatrain.compat.torch import num_compilations
from megatrain.model.layer_template import compile_and_tell
from megatrain.model.probe import spec
from megatrain.model.program import ModelProgram
from tests.families.tiny import tiny_model
from tests.inside import compiled_by

BF16 = torch.bfloat16


@pytest.fixture
def quickly(monkeypatch):
    """torch.compile takes graphs as always, but leaves them as they are."""
    compiled_by(monkeypatch, "eager")


def _engine(vocab_size=32, hidden_size=8, **changes):
    sizes = dict(intermediate_size=8, num_hidden_layers=3, num_attention_heads=2)
    config = LlamaConfig(vocab_size=vocab_size, hidden_size=hidden_size, **sizes)
    return Engine(config, optimizer=AdamW(), device="cpu", placement=Placement(**changes))


def _step(engine, width=4):
    ids = torch.ones(2, width).long()
    return engine.step([{"input_ids": ids, "labels": ids}] * 2)


def test_kernels_are_launched_without_python_s_lock():
    """By torch's own launcher, which keeps it, a GPU that waits for the host waits for ever."""
    with torch._inductor.config.patch(use_static_cuda_launcher=True):
        compile_and_tell(torch.sin, "a sine")
        assert not torch._inductor.config.use_static_cuda_launcher


def test_a_large_tensor_is_not_copied_to_the_host_to_time_a_kernel():
    """Inductor restores what a kernel overwrites from pinned copies, rounded to powers of two."""
    compile_and_tell(torch.sin, "a sine")
    tuner = SimpleNamespace(fn=SimpleNamespace(arg_names=["read", "written"]))
    tuner.launchers, tuner.mutated_arg_names = ["first", "second"], {"written"}
    large, small = torch.empty((1 << 29) + 1, dtype=BF16, device="meta"), torch.empty(4)
    assert CachingAutotuner.benchmark_all_configs(tuner, small, large) == {"first": 0.0}
    with pytest.raises(AttributeError, match="inductor_meta"):  # torch goes on and times them
        CachingAutotuner.benchmark_all_configs(tuner, large, small)


@pytest.mark.exhaustive
def test_layers_of_a_kind_are_compiled_once_for_a_purpose(quickly):
    before = num_compilations()
    with _engine(compile=True, save_activations=1) as engine:
        _step(engine)
        assert num_compilations() - before == 3  # computed again, kept graph; the loss
        _step(engine)
        assert num_compilations() - before == 3
        _step(engine, width=6)  # another length
        assert num_compilations() - before > 3


@pytest.fixture
def calls(monkeypatch):
    """Of each graph that has run, whether it is for any size."""
    found = []

    def kept(graph, inputs):
        sizes = [size for each in inputs for size in (each, *getattr(each, "shape", ()))]
        any_size = any(isinstance(size, torch.SymInt) for size in sizes)

        def run(*args):
            found.append(any_size)
            return graph.forward(*args)

        return run

    compiled_by(monkeypatch, kept)
    return found


@pytest.mark.parametrize(
    ("family", "changes", "repeats"),
    [
        ("llama", {}, True),
        ("gpt_oss", {}, True),
        ("gpt_oss", {"attention_dropout": 0.5}, False),
        ("gpt2", {"resid_pdrop": 0.5}, False),
        ("gemma3n_text", {}, True),  # layers write to a dictionary that they are given
    ],
)
def test_whether_layers_draw_is_tried_on_a_few_tokens(family, changes, repeats):
    """Whatever the batch has: eager attention over its rows may take more than all of a step."""
    program = ModelProgram(spec(tiny_model(family, 0, changes)), torch.device("cpu"), BF16)
    program.train(True)
    program.compile()
    for visit, layer in enumerate(program.spec.layers):
        weights = {n: torch.ones(p.shape).to(BF16) for n, p in layer.module.named_parameters()}
        assert program.repeats(visit, partial(dict, weights), None) == repeats


def test_layers_with_a_buffer_that_others_lack_keep_their_graphs(calls):
    fast = compile_and_tell(lambda x, given: x + sum(given), "a sum")
    one, two = [torch.ones(3)], [torch.ones(3), torch.ones(3)]
    for rows in (2, 5, 2):
        fast(torch.ones(rows, 3), one)
        fast(torch.ones(rows, 3), two)
    assert calls[:2] == calls[4:] == [False, False]


@pytest.mark.exhaustive
def test_what_only_a_layers_result_needs_is_not_computed_again(monkeypatch):
    """Seven products of a forward, two of a backward for each, and all but the last again."""
    products = []

    def backward(graph, inputs):
        products.append(sum("mm" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
    )
    compiled_by(monkeypatch, backend)
    norms = []
    for compiled in (False, True):
        with _engine(compile=compiled) as engine:
            norms += [_step(engine).grad_norm for _ in range(2)]
    assert products == [0, 7 * 2 + 6]  # none in the loss
    assert norms[2:] == pytest.approx(norms[:2], rel=1e-5)


def test_nothing_is_compiled_or_told_without_being_asked(caplog, quickly):
    before = num_compilations()
    with caplog.at_level(logging.INFO), _engine() as engine:
        _step(engine)
    assert num_compilations() == before
    assert "compiling" not in caplog.text


def test_what_is_compiled_computes_the_same(quickly):
    double = compile_and_tell(lambda x: x * 2, "a product")
    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
