"""Where things are and when they move changes no bit; how sums are cut changes only rounding."""

import itertools
import shutil
from dataclasses import fields
from functools import partial

import numpy as np
import pytest
import torch

from megatrain import Placement
from megatrain.compat.transformers import set_experts
from megatrain.device import disk
from megatrain.device.disk import BLOCK
from megatrain.engine import sink
from megatrain.model.micro_batch import Batch
from tests.families.tiny import tiny_model
from tests.inside import sized
from tests.parity.cases import (
    VOCAB,
    llama,
    make_batches,
    make_engine,
    masters,
    moments,
    same,
    trained,
)
from tests.rules import with_rules
from tests.sweeps import few, placements

LAYERS = 4  # as many as the most slots tried
SHAPES = ((2, 8), (1, 5))

# Precision, tied embeddings, clipping.
CASES = list(itertools.product(("fp32", "bf16"), (False, True), (0.5, None)))


def train(steps, precision, tied, clip, vocab_size=VOCAB, **options):
    model = llama(tie_word_embeddings=tied, num_hidden_layers=LAYERS, vocab_size=vocab_size)
    engine = make_engine(model, precision=precision, clip=clip, **options)
    results = [engine.step(step) for step in steps]
    named = masters(engine)
    return [r.loss for r in results], [r.grad_norm for r in results], named, moments(engine)


def identical(one, other):
    return (
        one[:2] == other[:2]
        and same(one[2], other[2])
        and same(dict(enumerate(one[3])), dict(enumerate(other[3])))
    )


PLACEMENTS = placements("neutrality")


def test_every_choice_of_a_placement_is_tried():
    """But for those that change rounding or are of ranks, and how much memory a save may have."""
    left = {f.name for f in fields(Placement)}
    left -= {n for n in left for p in PLACEMENTS if getattr(p, n) != getattr(Placement(), n)}
    assert left == {"head_tokens", "chunk_tokens", "compile", "save_bytes", "own_experts"}


@pytest.mark.parametrize(
    ("precision", "tied", "clip", "rule", "every"),
    [
        *(pytest.param(*c.values, 8, marks=c.marks) for c in with_rules(CASES, 8, plain=8)),
        *(pytest.param(*case, "adamw", 3, marks=pytest.mark.exhaustive) for case in CASES),
    ],
)
def test_no_placement_changes_a_bit(precision, tied, clip, rule, every, monkeypatch):
    """Of the placements one in `every`, so that the cases together have all of them.

    Planes on a disk move in pieces that cut matrices.
    """
    if rule != "adamw int8":  # whose scales would be no whole blocks
        sized(monkeypatch, disk, PIECE=BLOCK)
    steps = make_batches(2, SHAPES)
    wanted = train(steps, precision, tied, clip, placement=Placement(slots=1), rule=rule)
    number = CASES.index((precision, tied, clip))
    for placement in PLACEMENTS[number % every :: every]:
        got = train(steps, precision, tied, clip, placement=placement, rule=rule)
        assert identical(got, wanted), placement


@pytest.mark.parametrize("other_rows", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("tied", few([False, True]))
def test_tiles_larger_than_a_slot_and_gradients_in_pieces_change_no_bit(
    tied, other_rows, monkeypatch
):
    """The head takes five slots, and leaves in 33 pieces; rows are kept, or brought again."""
    steps = make_batches(2, SHAPES)

    def run(**choices):
        return train(steps, "bf16", tied, 1.0, 1024, placement=Placement(**choices))

    wanted = run(slots=8)
    sized(monkeypatch, sink, PIECE=1000)
    for choices in ({"slots": 1}, {"slots": 2, "gradient_lanes": 1}, {"slots": 6, "prefetch": 3}):
        keep_rows = (tied == (choices["slots"] == 2)) != other_rows
        assert identical(run(**choices, keep_rows=keep_rows), wanted), choices


def batch(count):
    return Batch(list(range(count)), 1.0, count, torch.zeros(1), 0)


@pytest.mark.parametrize(("count", "passes"), [(1, 1), (7, 1), (7, 3), (8, 4), (2, 5)])
def test_passes_are_even_and_hold_every_micro_batch_in_order(count, passes):
    parts = batch(count).passes(passes)
    assert [micro for part in parts for micro in part.micro] == list(range(count))
    assert [part.first for part in parts] == [part.micro[0] for part in parts]
    sizes = [len(part.micro) for part in parts]
    assert len(parts) == min(count, passes) and max(sizes) - min(sizes) <= 1


# Compiled layers, by torch's own compiler for the CPU, train as eager ones but for rounding.


# By choice: computed again in the backward's graph, graphs kept by half and whole, and inputs back
# from the host.
CHOICES: tuple[dict, ...] = (
    {},
    {"save_activations": 1},
    {"save_activations": 2, "save_all": 1, "passes": 2},
    {"layer_inputs": "host"},
    {"offload_activations": 1},
)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
def test_compiled_layers_train_as_eager_ones():
    steps, options = make_batches(3), {"lr": 1e-3, "eps": 1e-8, "clip": 0.5}
    numbers, weights = trained(llama(), steps, placement=Placement(slots=2), **options)
    for choices in CHOICES:
        torch.compiler.reset()
        placement = Placement(slots=2, compile=True, **choices)
        found, compiled = trained(llama(), steps, placement=placement, **options)
        for (loss, norm), wanted in zip(found, numbers, strict=True):
            assert loss == pytest.approx(wanted[0], rel=1e-6)
            assert norm == pytest.approx(wanted[1], rel=1e-5)
        for name, master in weights.items():
            assert torch.allclose(compiled[name], master, rtol=0, atol=2e-5), (name, choices)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
@pytest.mark.parametrize(("chosen", "backend"), [(1, "aot_eager"), (2, "inductor")])
def test_compiled_experts_train_as_eager_ones_within_the_noise_of_bf16(
    chosen, backend, monkeypatch
):
    """By grouped products, whose rows are weighed in fp32: torch 2.11 lost their gradient."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model = tiny_model("mixtral", changes={"num_experts_per_tok": chosen})
    set_experts(model.config, "grouped_mm")
    numbers = []
    for compiled in (False, True):
        placement = Placement(slots=2, compile=compiled)
        numbers.append(trained(model, make_batches(1), precision="bf16", placement=placement)[0])
    assert np.allclose(numbers[1], numbers[0], rtol=5e-3)
