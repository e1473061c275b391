"""Ranks that share every row train as one rank does on the whole rows."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megatrain import Engine, InputError, Placement
from megatrain.device import CpuDevice
from megatrain.loss import CROSS_ENTROPY, DPO, LabelSmoothing, TokenWeights
from megatrain.model.trained import Trained
from tests.families.tiny import tiny_model
from tests.parity.cases import (
    SIZES,
    llama,
    make_batches,
    make_engine,
    masters,
    padded,
    qwen2,
    replies,
    same,
)
from tests.parity.ranks import refused, run_ranks, train_as_one, training
from tests.parity.test_dropout import RATES
from tests.parity.test_ranks import LORA
from tests.parity.test_ranks import case as case_of

SHAPES = ((2, 12), (1, 7), (3, 5), (1, 2))  # of which no length is a multiple of 5, and two are odd
MANY = {"hidden_size": 48, "num_attention_heads": 12}  # heads that 2, 3 and 4 ranks can share


def shared(group):
    """How many ranks share every row."""
    return 1 if group is None else dist.get_world_size(group)


def train(group, model, loss=CROSS_ENTROPY, batches=None, **options):
    """What two steps leave, and say, and what is said of whole rows afterwards."""
    options["sequence_parallel"] = shared(group)
    with make_engine(model, group=group, **options) as engine:
        steps = batches or make_batches(2, SHAPES)
        plain = [{name: micro[name] for name in ("input_ids", "labels")} for micro in steps[-1]]
        found = training(engine, steps, loss)
        found["logits"] = engine.logits({"input_ids": steps[-1][1]["input_ids"]})
        found |= {f"logprobs {n}": each for n, each in enumerate(engine.logprobs(plain))}
        for n, (ids, values) in enumerate(engine.top_logprobs(plain, 2)):
            found |= {f"top ids {n}": ids.float(), f"top {n}": values}
        return found


def weighed(steps):
    """With a weight of its own for each token."""
    generator = torch.Generator().manual_seed(0)
    return [
        [m | {"token_weights": torch.rand(m["labels"].shape, generator=generator)} for m in step]
        for step in steps
    ]


def filled_up(steps):
    """With a mask that hides the end of the first rows, which have no labels there."""
    for step in steps:
        step[0] = padded(step)[0]
        rows, tokens = step[1]["input_ids"].shape
        step[1] |= {"position_ids": torch.arange(tokens).expand(rows, -1).contiguous()}
    return steps


case = partial(case_of, by=train)
heads, biases = partial(llama, **MANY), partial(qwen2, **MANY, tie_word_embeddings=True)
CASES: dict[str, Callable[[Any], dict]] = {
    "few heads of keys, clipped": case(heads, clip=0.5),
    "tied, not clipped": case(biases, clip=None),
    "graphs that wait": case(
        biases, placement=Placement(slots=3, keep_rows=False, save_activations=2, keep_weights=2)
    ),
    "graphs that wait on the host": case(
        heads, placement=Placement(slots=2, offload_activations=2, layer_inputs="host")
    ),
    "a single head of keys, attention kept, tokens in chunks": case(
        partial(heads, num_key_value_heads=1),
        placement=Placement(slots=2, save_attention="device", chunk_tokens=3, head_tokens=2),
    ),
    "resident, in passes": case(
        heads, clip=0.5, placement=Placement(passes=3, resident=("embedding", "layer 0", "head"))
    ),
    "frozen in part": case(heads, trained=Trained(freeze=("embed_tokens", "q_proj", "norm"))),
    "adapter": case(partial(qwen2, **MANY), adapter=LORA),
    "weights of tokens": case(heads, TokenWeights(), weighed(make_batches(2, SHAPES))),
    "smoothed labels, rows with a mask": case(
        heads, LabelSmoothing(0.1), filled_up(make_batches(2, SHAPES))
    ),
    "learnt positions": case(partial(tiny_model, "gpt2")),
    "keys wider than values": case(partial(tiny_model, "deepseek_v3")),
}
# Three ranks share the heads of the first ones, not those of tiny models.
OF_ANY = [*CASES][:-2]
USUAL = ("a single head of keys, attention kept, tokens in chunks",)


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, USUAL),
        pytest.param(2, [n for n in CASES if n not in USUAL], marks=pytest.mark.exhaustive),
        pytest.param(3, OF_ANY, marks=pytest.mark.exhaustive),
        pytest.param(4, OF_ANY[::2], marks=pytest.mark.exhaustive),
    ],
    ids=["2", "2 exhaustive", "3", "4"],
)
def test_ranks_that_share_rows_train_as_one(size, names, tmp_path):
    """To the order of sums, with rows of lengths that they cannot share evenly."""
    train_as_one(size, tmp_path, CASES, names)


@pytest.mark.exhaustive
def test_compiled_layers_exchange_as_eager_ones_do(tmp_path):
    """Whole graphs, and such as compute some of it again."""
    steps, model = make_batches(2, SHAPES[:1]), llama(**MANY, num_hidden_layers=2)

    def work(group):
        placement = Placement(compile=group is not None, save_activations=1)
        options = {"sequence_parallel": shared(group), "placement": placement}
        engine = make_engine(model, group=group, **options)
        said = [engine.step(step) for step in steps]
        return [each for result in said for each in (result.loss, result.grad_norm)]

    wanted = work(None)
    assert run_ranks(2, tmp_path, work) == [pytest.approx(wanted, rel=2e-6)] * 2


def test_a_checkpoint_of_ranks_that_share_rows_is_that_of_any(tmp_path):
    """Both go on from what they have saved, and one alone."""
    first, second = make_batches(2, SHAPES)

    def work(group):
        options = {"group": group, "sequence_parallel": shared(group)}
        engine = make_engine(llama(**MANY), **options)
        engine.step(first)
        engine.save(tmp_path / "two")
        loaded = Engine.load(tmp_path / "two", **options)
        return [each.step(second).loss for each in (engine, loaded)]

    losses = run_ranks(2, tmp_path, work)
    with Engine.load(tmp_path / "two", device="cpu") as alone:
        wanted = alone.step(second).loss
    assert losses == [pytest.approx([wanted] * 2, rel=2e-6)] * 2


def test_random_numbers_of_ranks_differ(tmp_path):
    """Each rank drops of its own tokens what no other drops of its own."""
    [step] = make_batches(1, SHAPES)

    def work(group):
        seeds: list[int] = []
        model = tiny_model("gpt2", changes=RATES)
        engine = make_engine(model, group=group, sequence_parallel=2)
        engine.evaluate(step)
        with mock.patch.object(CpuDevice, "seed", lambda device, seed: seeds.append(seed)):
            return seeds, engine.step(step).loss

    (one, loss), (other, same_loss) = run_ranks(2, tmp_path, work)
    assert loss == same_loss and len(one) == len(other) and not {*one} & {*other}


def long_rotary():
    """Whose rotary embedding is another one in rows of more than eight tokens."""
    torch.manual_seed(0)
    few = {"factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 8}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", **few, **factors}
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope))


def eager():
    """Of which nobody else may attend."""
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation="eager")


# Models whose rows cannot be shared, and why not.
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "eager": (eager, "its losses change by"),
    "states": (lambda: tiny_model("rwkv"), "its losses change by"),
    "convolutions": (
        lambda: tiny_model("lfm2", changes={"layer_types": ["conv", "full_attention"] * 3}),
        "its losses change by",
    ),
    "a window": (lambda: tiny_model("mistral"), "its attention reaches 6 tokens, rows have 12"),
    "chunks": (lambda: tiny_model("llama4_text"), "its attention reaches 4 tokens, rows have 12"),
    "positions": (lambda: tiny_model("camembert"), "if positions are given as 0, 1, 2"),
    "rotary": (long_rotary, "changes with the length of a row (at 12 tokens)"),
    "heads": (lambda: llama(num_attention_heads=1, num_key_value_heads=1), "1 heads of queries"),
}
FEW = {"eager", "a window", "positions", "heads"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [FEW, MODELS.keys() - FEW], ids=["some", "rest"])
def test_what_ranks_cannot_share_is_refused_by_all(names, tmp_path):
    """A short row of a model with a window can be shared, a longer one not."""
    [step] = make_batches(1, SHAPES)

    def work(group):
        options = {"group": group, "sequence_parallel": 2}
        for make, words in (MODELS[name] for name in sorted(names)):
            with make_engine(make(), **options) as engine:
                before = masters(engine)
                refused(InputError, words, engine.step, step)
                refused(InputError, words, engine.evaluate, step)
                assert same(masters(engine), before)
        with make_engine(tiny_model("mistral"), **options) as engine:
            assert engine.step(step[2:]).loss > 0
            refused(InputError, "its attention reaches 6 tokens", engine.step, step)
        routed = tiny_model("mixtral", changes={"output_router_logits": True})
        refused(InputError, "a loss of its routers", make_engine, routed, **options)
        rank = dist.get_rank(group)
        for number, words in ((3, "number of ranks, which is 2"), (1 + rank, "another sequence")):
            refused(InputError, words, make_engine, llama(), group=group, sequence_parallel=number)
        with make_engine(llama(max_position_embeddings=63), **options) as engine:
            for call, words in bad_calls(engine, step, rank):
                refused(InputError, words, call)
            assert engine.steps == 0 and engine.step(step).loss > 0

    run_ranks(2, tmp_path, work)
    refused(InputError, "number of ranks, which is 1", make_engine, llama(), sequence_parallel=2)


def bad_calls(engine, step, rank):
    """Calls that ranks which share rows do not take, and what all say."""
    micro = step[0]
    shape = micro["input_ids"].shape
    packed = torch.cat([torch.arange(5), torch.arange(shape[1] - 5)]).expand(shape).contiguous()
    late = torch.ones(shape, dtype=torch.int64)
    late[0, :3] = 0
    ended = torch.ones(shape, dtype=torch.int64)
    ended[0, 3:] = 0
    full = torch.full((1, 63), 20)
    pairs, *_ = replies(DPO()), None

    def as_a_whole():
        with engine.whole_model():
            pass

    return [
        (lambda: engine.step(step[rank : rank + 1]), "another checksum of the step's rows"),
        (lambda: engine.step([micro | {"position_ids": packed}]), "position_ids other than"),
        (lambda: engine.step([micro | {"attention_mask": late}]), "more than the end of rows"),
        (lambda: engine.step([micro | {"attention_mask": ended}]), "more than the end of rows"),
        (lambda: engine.logits({"input_ids": full}), "2 ranks fill up to 64, and the model has 63"),
        (lambda: engine.step(pairs, DPO()), "DPO compares rows"),
        (as_a_whole, "not for ranks that share rows"),
    ]
