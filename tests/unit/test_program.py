"""A program of a model: masks, what runs before layers, compiled and random layers, weights."""

import sys
import traceback
from functools import partial
from itertools import count, pairwise
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM, masking_utils
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks.options import num_compilations, peak_process_bytes
from megatrain import DoesNotFit, InputError, Placement
from megatrain.base.seeds import derived_seed
from megatrain.base.units import GIB
from megatrain.cli.models import qwen2_config
from megatrain.loss import cross_entropy_sum
from megatrain.model import init
from megatrain.model.capture import Capture
from megatrain.model.documents import check_masks
from megatrain.model.layer_template import compile_and_tell
from megatrain.model.probe import spec
from megatrain.model.program import ModelProgram
from megatrain.source.source import open_source
from tests.families.tiny import tiny_config, tiny_model
from tests.inside import compiled_by, program_of, sized
from tests.parity.cases import Counting, llama, make_batches, make_engine, trained
from tests.parity.test_dropout import gpt2, slope_error
from tests.unit.forecast_cases import tiny_config as llama_config
from tests.unit.forecast_cases import tiny_spec

PLAIN = SimpleNamespace(_attn_implementation="sdpa", sliding_window=None)
SLIDING = SimpleNamespace(_attn_implementation="sdpa", sliding_window=4096)
LONG = 65_536


def rows(**more):
    return [{"input_ids": torch.zeros(1, LONG, dtype=torch.int64), **more}]


def test_a_plain_row_is_taken_at_any_length():
    positions = torch.arange(LONG)[None]
    ones = torch.ones(1, LONG, dtype=torch.int64)
    check_masks(rows(position_ids=positions, attention_mask=ones), PLAIN, 2, GIB)
    config = SimpleNamespace(_attn_implementation="flash_attention_2", sliding_window=16)
    check_masks(rows(), config, 2, 0)


@pytest.mark.parametrize(
    ("micro", "config", "reason"),
    [
        (rows(attention_mask=(torch.arange(LONG) < 9)[None].long()), PLAIN, "padding"),
        (rows(position_ids=(torch.arange(LONG) % 4096)[None]), PLAIN, "several documents"),
        (rows(), SLIDING, "a sliding window of 4096"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(micro, config, reason):
    with pytest.raises(DoesNotFit, match=f"65536 tokens with {reason}: .* 12.0 GiB, 11.0 GiB"):
        check_masks(micro, config, 2, 11 * GIB)
    check_masks(micro, config, 2, 12 * GIB)


def test_layers_of_a_plain_long_row_get_no_mask():
    tokens = 3000
    engine = make_engine(llama(max_position_embeddings=tokens), placement=Placement())
    sizes = []
    layer = program_of(engine).layer

    def listen(visit, weights, batch, values, *options):
        leaves = batch.calls[visit].leaves
        sizes.extend(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
        return layer(visit, weights, batch, values, *options)

    program_of(engine).layer = listen
    ids = torch.ones(1, tokens, dtype=torch.int64)
    engine.evaluate([{"input_ids": ids, "labels": ids}])
    assert sizes and max(sizes) <= tokens * 64


# What runs before the layers: Python that a GPU waits for, so as little of it as there need be.

LAYERS = 6
[STEP] = make_batches(1)


@pytest.fixture
def looks(monkeypatch):
    """The positions that transformers looks at for packed rows, which waits for the device."""
    looked: list[Any] = []
    find = masking_utils.find_packed_sequence_indices

    def look(position_ids):
        looked.append(position_ids)
        return find(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", look)
    return looked


def test_positions_are_looked_at_once_for_rows_of_a_length(looks):
    """And never where they are given: they are known before they are on the device."""
    engine, (micro, other) = make_engine(llama()), STEP[:2]
    assert micro["input_ids"].shape != other["input_ids"].shape
    del looks[:]  # those of the structure's runs
    for _ in range(2):
        engine.step([micro, {name: ids.flip(0) for name, ids in micro.items()}])
        assert len(looks) == 1
    engine.step([other])
    assert len(looks) == 2
    places = torch.arange(micro["input_ids"].shape[1]).expand_as(micro["input_ids"])
    engine.step([{**micro, "position_ids": places}])
    # Documents are tried on rows of their own first, once.
    engine.step([{**micro, "position_ids": places % 5}])
    del looks[:]
    engine.step([{**micro, "position_ids": places % 5}])
    assert not looks


def interrupting(at):
    """A tracer that raises KeyboardInterrupt at one of the places where Ctrl-C may come.

    These are the begin of each call, and each round of a loop, in contexts and of them.
    """
    places = count()

    def trace(frame, event, _):
        context = getattr(frame.f_locals.get("self"), "gen", None)
        code = frame.f_code if context is None else context.gi_code
        files = "base/changed.py", "compat/transformers.py", "torch/utils/hooks.py"
        if not code.co_filename.endswith(files):
            return None
        if (event == "call" or code.co_name == "_put_back") and next(places) == at:
            raise KeyboardInterrupt
        return trace

    return trace


def test_an_interrupt_anywhere_leaves_the_functions_of_transformers_as_they_were():
    """Also while something holds the exception, as a notebook does."""
    engine, functions = make_engine(llama(num_hidden_layers=1)), vars(masking_utils).copy()
    previous, interrupts = sys.gettrace(), 0
    while True:
        sys.settrace(interrupting(interrupts))
        try:
            engine.evaluate(STEP[:1])
            break
        except KeyboardInterrupt as error:
            held = error
            interrupts += 1
        finally:
            sys.settrace(previous)
        for frame, _ in traceback.walk_tb(held.__traceback__):
            _ = frame.f_locals  # tracing has copied them
        assert vars(masking_utils) == functions, f"while {held!r} is held"
    assert interrupts > 20


def test_a_mask_that_hides_tokens_is_not_looked_at():
    engine, micro = make_engine(llama()), dict(STEP[0])
    micro["attention_mask"] = torch.ones_like(micro["input_ids"])
    micro["attention_mask"][0, -2:] = 0
    looks = Counting(lambda function, _: "_local_scalar_dense" in str(function))
    program = program_of(engine)
    prologue = program.prologue

    def watched(*given):
        with looks:
            return prologue(*given)

    program.prologue = watched
    engine.step([micro])
    assert looks.count == 0


def test_a_forward_in_another_thread_beside_a_step_makes_masks_of_its_own(monkeypatch):
    [loss], _ = trained(llama(), [STEP])
    engine, plain, forward = make_engine(llama()), llama(), Capture.forward
    before, beside = list[Any](), list[Tensor]()
    row = {"input_ids": torch.arange(8)[None], "position_ids": torch.arange(8)[None] % 5}
    wanted = plain(**row, use_cache=False).logits

    def after_another(*given):
        before.append(given)
        if len(before) > len(STEP):  # the engine has looked at its own rows
            thread = Thread(target=lambda: beside.append(plain(**row, use_cache=False).logits))
            thread.start()
            thread.join()
        return forward(*given)

    monkeypatch.setattr(Capture, "forward", after_another)
    result = engine.step(STEP)
    assert beside and all(torch.equal(logits, wanted) for logits in beside)
    assert (result.loss, result.grad_norm) == loss


class Copied(LlamaDecoderLayer):
    """What it gives is made contiguous before the next layer, which copies some tensors."""

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs).contiguous()


class MaskMarked(LlamaForCausalLM):
    """Reads the batch's mask itself; long rows have a weight of their own."""

    def __init__(self, config):
        super().__init__(config)
        self.long = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, input_ids=None, attention_mask=None, **given):
        embeds = self.model.embed_tokens(input_ids)
        if attention_mask is not None:
            embeds = embeds * (1 + attention_mask[..., None] * (embeds > 0))
        if input_ids.shape[1] > 12:
            embeds = embeds * self.long
        return super().forward(None, attention_mask, inputs_embeds=embeds, **given)


class Again(LlamaDecoderLayer):
    def forward(self, hidden, **kwargs):
        call = partial(super().forward, **kwargs)
        return checkpoint(call, hidden, use_reentrant=True)


def with_layers(kind):
    model = llama()
    for layer in model.model.layers:
        layer.__class__ = kind
    return model


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Copied, "before model.layers.1, the model's forward computes"), (Again, "keeps its weights")],
)
def test_what_no_structure_run_shows_is_refused_in_a_step(kind, message):
    with pytest.raises(InputError, match=message):
        make_engine(with_layers(kind), saveable=False).step(STEP)


def test_a_mask_of_ones_reaches_code_that_is_not_of_transformers():
    model = MaskMarked(llama().config).eval()
    micro = {"input_ids": torch.arange(24).view(2, 12), "attention_mask": torch.ones(2, 12).long()}
    engine = make_engine(model, saveable=False)
    wanted = model(**micro).logits
    torch.testing.assert_close(engine.logits(micro), wanted, rtol=1e-5, atol=1e-5)
    assert not wanted.allclose(model(input_ids=micro["input_ids"]).logits, rtol=0.1)
    with pytest.raises(InputError, match="weights for this batch that plain short rows do not"):
        engine.logits({"input_ids": torch.arange(26).view(2, 13)})


@pytest.mark.parametrize("adapter", [None, {"r": 2, "target_modules": "all-linear"}])
def test_a_mask_of_ones_does_not_reach_transformers_code(adapter, monkeypatch):
    """Attention to a mask is slower, and making the mask waits for the device."""
    masks, plain = [], modeling_llama.create_causal_mask

    def noted(*args, **given):
        masks.append(given["attention_mask"])
        return plain(*args, **given)

    engine = make_engine(llama(), adapter=adapter, saveable=False)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", noted)
    engine.step([micro | {"attention_mask": torch.ones_like(micro["input_ids"])} for micro in STEP])
    assert masks
    assert all(mask is None for mask in masks)


def test_weights_without_gradients_reach_what_follows_the_layers():
    """BLT cuts its bytes into patches by another model's entropies, before its layers and after."""
    model = tiny_model("blt").eval()
    ids = make_batches(1)[0][0]["input_ids"]
    with torch.no_grad():
        for weight in model.model.patcher.parameters():
            weight.add_(torch.randn(weight.shape), alpha=0.3)
        whole = model(input_ids=ids, use_cache=False).logits
        model.config.patching_threshold = 3.5
        wanted = model(input_ids=ids, use_cache=False).logits
    assert not wanted.allclose(whole, rtol=0.1)
    engine = make_engine(model, saveable=False)
    torch.testing.assert_close(engine.logits({"input_ids": ids}), wanted, rtol=1e-5, atol=1e-5)


class Divided(LlamaForCausalLM):
    """Positions start anew behind each token 1."""

    def forward(self, input_ids=None, labels=None, **given):
        places = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        ends = torch.where(input_ids == 1, places + 1, 0).cummax(1).values
        positions = places - F.pad(ends[:, :-1], (1, 0))
        return super().forward(input_ids, position_ids=positions, labels=labels, **given)


def test_positions_that_depend_on_the_ids_are_looked_at_for_all_rows(looks):
    model, ids = Divided(llama().config).eval(), torch.arange(2, 18).view(2, 8)
    engine = make_engine(model, saveable=False)
    for divided in (False, True):
        ids[:, 3] = 1 if divided else 2
        micro = {"input_ids": ids, "labels": ids}
        plain = model(**micro, use_cache=False)
        assert engine.evaluate([micro]) == pytest.approx(plain.loss.item(), rel=1e-6)
    assert len(looks) >= 2


def test_the_backward_ends_where_the_layers_begin(monkeypatch):
    engine = make_engine(llama(num_hidden_layers=LAYERS), placement=Placement(slots=2))
    called: list[int] = []
    forward = Capture.forward

    def counted(self, handler, *rest):
        def one(*given):
            called.append(1)
            return handler(*given)

        return forward(self, one, *rest)

    monkeypatch.setattr(Capture, "forward", counted)
    engine.step(STEP)
    # All layers in the forward and behind them, and the first one in the backward.
    assert len(called) == (2 * LAYERS + 1) * len(STEP)


# Layers that draw random numbers are kept without recomputation: it would draw others.


@pytest.mark.exhaustive
def test_a_partitioned_graph_keeps_its_masks(monkeypatch):
    """With a budget, this gradient is wrong by 30 %."""
    compiled_by(monkeypatch, "aot_eager_decomp_partition")
    [step] = make_batches(1, ((2, 12),))
    assert slope_error(gpt2(), step, Placement(slots=1, compile=True, save_activations=2)) < 5e-3


# News of compilations, and how many there are.

BF16 = torch.bfloat16


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
def test_layers_of_a_kind_are_compiled_once_for_a_purpose(monkeypatch):
    compiled_by(monkeypatch, "eager")
    before, placement = num_compilations(), Placement(compile=True, save_activations=1)
    [short, again], [longer] = make_batches(2, ((2, 4), (2, 4))), make_batches(1, ((2, 6),))
    with make_engine(llama(), placement=placement, precision="bf16") as engine:
        for step in (short, again):
            engine.step(step)
            assert num_compilations() - before == 3  # computed again, kept graph; the loss
        engine.step(longer)
        assert num_compilations() - before > 3


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
def test_layers_that_draw_are_known_by_the_structure_run(family, changes, repeats):
    program = ModelProgram(spec(tiny_model(family, 0, changes)), torch.device("cpu"), BF16)
    program.train(True)
    program.compile()
    for visit in range(len(program.spec.layers)):
        assert program.repeats(visit, None) == repeats


# Weights that are drawn, their seeds, and structures learnt without weights.


PIECE = 4096


def drawn(model, *, threads=2, seed=3, alike=False):
    values: dict[str, Tensor] = {}
    names = [name for name, _ in model.capture.model.named_parameters()]
    with torch.random.fork_rng(devices=[]):
        init.initialise(
            model,
            seed,
            lambda name, v: values.update({name: v.clone()}),
            names,
            threads=threads,
            alike=alike,
        )
    return values


@pytest.fixture
def pieces(monkeypatch):
    sized(monkeypatch, init, _PIECE=PIECE)


@pytest.mark.usefixtures("pieces")
def test_the_number_of_threads_changes_no_value():
    one, many = drawn(tiny_spec(), threads=1), drawn(tiny_spec(), threads=5)
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.usefixtures("pieces")
def test_no_piece_is_drawn_twice_and_all_have_the_class_s_spread():
    values = drawn(tiny_spec())
    large = [v.flatten() for v in values.values() if v.numel() > PIECE]
    cut = [piece[:PIECE] for flat in large for piece in flat.split(PIECE)]
    assert len(cut) > 1000
    assert len({tuple(piece[:4].tolist()) for piece in cut}) == len(cut)
    spread = llama_config().initializer_range
    assert all(0.9 * spread < float(piece.std()) < 1.1 * spread for piece in cut)
    followed = torch.stack([a @ b for a, b in pairwise(p for p in cut if len(p) == PIECE)])
    assert float(followed.abs().max()) < 6 * spread**2 * PIECE**0.5  # unlike their neighbours


@pytest.mark.parametrize(("family", "some"), [("llama", True), ("jamba", False)])
def test_layers_that_are_alike_are_drawn_once_where_that_is_asked_for(family, some):
    """Layers of jamba differ from the one before them, in attention or in experts."""
    model = spec(open_source(tiny_config(family)).model)
    usual, values = drawn(model), drawn(model, alike=True)
    assert values.keys() == usual.keys()
    layers = [
        {n.split(".", 3)[3]: v for n, v in values.items() if n.startswith(f"model.layers.{i}.")}
        for i in range(len(model.layers))
    ]
    follow = [(a, b) for a, b in pairwise(layers) if a.keys() == b.keys()]
    assert len(follow) == some * (len(layers) - 1)
    assert all(torch.equal(a[name], b[name]) for a, b in follow for name in a)


# Seeds of drawn weights and dropout: other values would change every run there is.

VALUES = {
    (0,): 4066689987807800415,
    (0, 0): 6113538345208582997,
    (0, 1): 8845802290766231721,
    (1, 0): 3435587645334476312,
    (-1, 3): 7420005760911551600,
    (2**70, 12, 5): 66050740447722534,
}


@pytest.mark.parametrize(("path", "seed"), VALUES.items())
def test_seeds_are_the_same_for_ever(path, seed):
    assert derived_seed(*path) == seed


# Learning a large model's structure takes neither its memory nor its time.


def test_the_structure_of_72_billion_parameters_is_learned_in_little_memory():
    source = open_source(qwen2_config("72b"))
    before = peak_process_bytes()  # of less than 4 GiB
    assert len(spec(source.model).layers) == 80
    assert peak_process_bytes() - before < 1 << 30  # 12 GiB with zeros that are written


# Cross entropy of many tokens, at once and in chunks.


def test_bf16_logits_are_summed_in_fp32():
    """And the sum of many chunks, whatever torch's default dtype is."""
    logits = torch.randn(1000, 31).bfloat16()
    targets = torch.zeros(1000, dtype=torch.long)
    wanted = F.cross_entropy(logits.double(), targets, reduction="sum")
    loss = cross_entropy_sum(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        engine = make_engine(llama(), precision="bf16", placement=Placement(head_tokens=1))
        torch.set_default_dtype(dtype)
        try:
            losses.append((engine.evaluate(STEP), engine.step(STEP).loss))
        finally:
            torch.set_default_dtype(torch.float32)
    assert losses[0] == losses[1]
