"""Dropout: the same masks in forward and recomputation, others everywhere else, none in evaluation.

The gradient is checked against the loss itself. Two engines of one seed draw the same masks in
their first step, so their losses are one smooth function of the weights, whose slope along the
gradient must be the gradient's norm. A recomputation with other masks gives another gradient.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from megatrain import AdamW, Engine, Placement
from megatrain.device import CpuDevice
from megatrain.model.capture import PROLOGUE
from tests.families.tiny import tiny_model
from tests.parity.cases import (
    gradients,
    llama,
    make_batches,
    make_engine,
    masters,
    parameters,
    same,
)
from tests.sweeps import few, on_gpu, placements

RATES = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}


def gpt2():
    """Dropout on embeddings, attention and residuals."""
    return tiny_model("gpt2", changes=RATES)


def slope_error(model, step, placement, device="cpu"):
    """Relative difference between the slope of the loss along the gradient and its norm."""
    engine = make_engine(model, clip=1e9, placement=placement, device=device)
    norm = engine.step(step).grad_norm
    direction = {name: g / norm for name, g in gradients(engine).items()}
    before, distance = parameters(model), 1e-2

    def loss(way):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name] + way * direction[name])
        return make_engine(model, placement=placement, device=device).step(step).loss

    slope = (loss(distance) - loss(-distance)) / (2 * distance)
    return abs(slope / norm - 1)


COMPILED = [Placement(slots=3, compile=True, save_activations=n) for n in (0, 2)]


@pytest.mark.parametrize(
    ("placement", "device"),
    few([(placement, "cpu") for placement in placements("dropout")], 1, 6)
    + on_gpu(Placement(slots=3), *COMPILED),
    ids=str,
)
def test_the_gradient_is_that_of_the_masks_of_the_forward(placement, device):
    [step], most = make_batches(1), 2e-3 if device == "cpu" else 5e-3
    assert slope_error(gpt2(), step, placement, device) < most
    if device == "cpu":
        assert slope_error(llama(attention_dropout=0.3), step, placement) < most


@pytest.mark.parametrize("passes", [1, 2])
def test_every_place_has_random_numbers_of_its_own(passes):
    """Forward and backward of a layer share theirs; places, micro-batches and steps do not."""
    seen: list[int] = []

    class Noting(CpuDevice):
        def seed(self, seed):
            seen.append(seed)
            super().seed(seed)

    engine = make_engine(gpt2(), placement=Placement(passes=passes), device=Noting())
    steps, layers, micro_batches = make_batches(2), 3, 3
    for step in steps:
        seen.clear()
        engine.step(step)
        uses = {seed: seen.count(seed) for seed in seen}
        twice = len([PROLOGUE, *range(layers)]) * micro_batches
        assert sorted(uses.values()) == [1] * micro_batches + [2] * twice  # once: the head
        if step is steps[0]:
            first = set(uses)
    assert first.isdisjoint(uses)


def test_the_seed_decides():
    [step] = make_batches(1)
    losses = [make_engine(gpt2(), seed=seed).step(step).loss for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_evaluation_has_no_dropout_and_leaves_no_trace():
    steps = make_batches(3)
    plain, evaluated = make_engine(gpt2()), make_engine(gpt2())
    without = make_engine(tiny_model("gpt2"))
    assert evaluated.evaluate(steps[0]) == without.evaluate(steps[0])
    for step in steps:
        one = plain.step(step)
        first = evaluated.evaluate(steps[1])
        assert evaluated.evaluate(steps[1]) == first
        evaluated.logits({"input_ids": steps[2][0]["input_ids"]})
        other = evaluated.step(step)
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert same(masters(plain), masters(evaluated))


def test_the_caller_s_random_numbers_stay_as_they_were():
    """Else whoever draws data between two steps would draw the same every time."""
    [step], config = make_batches(1), llama().config

    def draw():
        return [float(torch.rand(())), random.random()]

    def work():
        engine = make_engine(config)
        engine.step(step)
        engine.evaluate(step)
        engine.logits({"input_ids": step[0]["input_ids"]})
        engine.close()

    drawn = []
    for between in (lambda: None, work):
        torch.manual_seed(3)
        random.seed(3)
        draw()
        between()
        drawn.append(draw())
    assert drawn[0] == drawn[1]


@contextmanager
def bf16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def another_seed():
    torch.manual_seed(7)
    yield


MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad, bf16_by_default, another_seed]


@pytest.mark.parametrize("mode", few(MODES, 1, 3, 4))
def test_the_caller_s_modes_and_seeds_decide_nothing(mode):
    [given], model = make_batches(1), gpt2()

    def work(source):
        step = [{name: value.clone() for name, value in micro.items()} for micro in given]
        engine = make_engine(source, precision="bf16")
        numbers = [engine.step(step).loss, engine.evaluate(step)]
        return numbers, engine.logits({"input_ids": step[0]["input_ids"]}), masters(engine)

    for source in (model, model.config):
        wanted = work(source)
        with mode():
            got = work(source)
        assert got[0] == wanted[0] and torch.equal(got[1], wanted[1]) and same(got[2], wanted[2])


def test_engines_that_step_in_threads_draw_as_alone():
    steps, model = make_batches(5), llama(attention_dropout=0.5)

    def results(seed):
        options = {"optimizer": AdamW(lr=1e-2), "precision": "fp32", "device": "cpu", "seed": seed}
        with Engine(model, **options) as engine:
            return [engine.step(step).loss for step in steps]

    alone = [results(seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(results, (1, 2))) == alone
