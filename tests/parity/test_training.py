"""Several steps against torch.optim.AdamW: clipping, schedules, groups that the user changes."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from megatrain import InputError
from tests.families.plain import RoundedAdamW, train_in_place
from tests.inside import store_of
from tests.parity.cases import (
    gradients,
    llama,
    make_batches,
    make_engine,
    masters,
    parameters,
    qwen2,
    relative_error,
    same,
)
from tests.race.late import LateDevice
from tests.rules import FLAT, PLAIN
from tests.sweeps import swept
from tests.unit.kernel_cases import exact_roots  # noqa: F401  a fixture

Schedule = Callable[[torch.optim.Optimizer], LRScheduler | None]


def nothing(*arguments):
    """A user who has no schedule, or leaves the groups as they are."""


def check(model, *, clip=0.5, schedule=nothing, change=nothing, saveable=True):
    steps, start = make_batches(4), parameters(model)
    engine = make_engine(model, clip=clip, saveable=saveable)
    scheduler, results = schedule(engine.optimizer), []
    for index, step in enumerate(steps):
        change(index, engine.optimizer)
        results.append(engine.step(step))
        if scheduler is not None:
            scheduler.step()
    plain = train_in_place(model, steps, max_grad_norm=clip, schedule=schedule, change=change)
    assert [r.loss for r in results] == pytest.approx(plain.losses, rel=1e-6)
    assert [r.grad_norm for r in results] == pytest.approx(plain.norms, rel=1e-5)
    assert relative_error(masters(engine), parameters(model), start) < 1e-5


MODELS = {"llama": llama, "qwen2": qwen2, "tied": partial(llama, tie_word_embeddings=True)}


@swept(together=1, make=MODELS, clip=[0.5, 1e9, None])
def test_steps_equal_plain_training(make, clip):
    check(make(), clip=clip)


class Gated(LlamaDecoderLayer):
    """A layer with a parameter without dimensions."""

    def forward(self, hidden, *args, **kwargs):
        out = super().forward(hidden, *args, **kwargs)
        return hidden + self.gate * (out - hidden)


def test_parameters_without_dimensions_are_trained():
    model = llama()
    for layer in model.model.layers:
        layer.__class__, layer.gate = Gated, torch.nn.Parameter(torch.tensor(0.7))
    check(model, saveable=False)


SCHEDULES: dict[str, Schedule] = {
    "torch": lambda optimizer: LambdaLR(optimizer, lambda step: [1.0, 0.1, 3.0, 0.0, 1.0][step]),
    "one per group": lambda optimizer: LambdaLR(
        optimizer, [lambda step: 0.5**step, lambda step: 1.0 + step]
    ),
    "transformers": lambda optimizer: get_scheduler(
        "cosine", optimizer, num_warmup_steps=2, num_training_steps=4
    ),
}


@swept(together=1, schedule=SCHEDULES, clip=[0.5, None])
def test_a_schedule_takes_effect_at_the_step_it_is_for(schedule, clip):
    check(llama(), schedule=schedule, clip=clip)


@swept(together=1, rule=FLAT, clip=[0.5, 1e9], precision=["bf16", "fp32"])
@pytest.mark.usefixtures("exact_roots")
def test_a_rule_s_steps_are_its_plain_form_s_on_the_same_gradients(rule, clip, precision):
    """Bit for bit: a sign or a root hides no gradient that is a little off."""
    model = llama()
    engine = make_engine(model, clip=clip, rule=rule, precision=precision)
    named = {name: torch.nn.Parameter(p) for name, p in parameters(model).items()}
    first, rest = engine.optimizer.param_groups
    first["weight_decay"] = 0.3
    if rule == "sgd":
        first["dampening"] = 0.3
    settings = {name: first[name] for name in engine.optimizer.rule.settings}
    plain = PLAIN[rule](
        [
            {"params": [named[n] for n in group["param_names"]]}
            | {name: group[name] for name in settings}
            for group in (first, rest)
        ],
        **settings,
    )
    if isinstance(plain, RoundedAdamW):
        for tile, entry in store_of(engine).entries():  # where its random numbers begin
            plain.at[named[entry.name]] = (tile.index << 40) + entry.offset
    for step in make_batches(3):
        norm = engine.step(step).grad_norm
        engine.flush()
        for name, gradient in gradients(engine).items():
            named[name].grad = gradient.float() * min(1.0, clip / (norm + 1e-6))
        plain.step()
        assert same(masters(engine), {name: p.detach() for name, p in named.items()})


def take(group, part):
    """Remove the parameters whose names have `part` from a group, names and all."""
    both = list(zip(group["param_names"], group["params"], strict=True))
    stay = [(name, p) for name, p in both if part not in name]
    group["param_names"], group["params"] = [n for n, _ in stay], [p for _, p in stay]
    return [(name, p) for name, p in both if part in name]


def split_by_torch(optimizer, **settings):
    taken = take(optimizer.param_groups[0], "layers.1") + take(optimizer.param_groups[0], "q_proj")
    optimizer.add_param_group({"params": taken, **settings})


def split_without_names(optimizer, **settings):
    """As who has learned that a group is a dictionary with `params`; the names stay as they are."""
    first = optimizer.param_groups[0]
    names = [n for n in first["param_names"] if "layers.1" in n or "q_proj" in n]
    places = [first["param_names"].index(n) for n in names]
    taken = [first["params"][i] for i in places]
    first["params"] = [p for i, p in enumerate(first["params"]) if i not in places]
    optimizer.param_groups.insert(0, {**first, "params": taken, **settings})


@swept(
    clip=[0.5, None],
    split=[split_by_torch, split_without_names],
    settings={"rate": {"lr": 0.0}, "betas": {"betas": (0.5, 0.7), "weight_decay": 0.4}},
)
def test_parameters_that_the_user_moves_to_another_group(split, settings, clip):
    """And so are those of the groups that there are, changed between steps."""

    def change(step, optimizer):
        if step == 1:
            optimizer.param_groups[1].update(lr=5e-2, weight_decay=0.3, eps=1e-2)
        if step == 2:
            split(optimizer, **settings)

    check(llama(), change=change, clip=clip)


@pytest.mark.parametrize("clip", [1.0, None])
def test_what_changes_after_a_step_does_not_reach_back(clip):
    """Updates may still be on their way when the learning rate of the next step is set."""
    one = make_engine(llama(), clip=clip)
    other = make_engine(llama(), clip=clip, device=LateDevice())
    [step] = make_batches(1)
    one.step(step)
    other.step(step)
    for group in other.optimizer.param_groups:
        group.update(lr=1e3, betas=(0.0, 0.0), weight_decay=0.9)
    assert same(masters(one), masters(other))


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", math.nan), ("lr", torch.tensor(math.inf)), ("lr", "fast"), ("eps", -1.0),
     ("betas", (0.9, 1.0)), ("weight_decay", None)],
)  # fmt: skip
def test_what_is_no_setting_never_reaches_a_weight(name, value):
    engine, [step] = make_engine(llama()), make_batches(1)
    before, group = masters(engine), engine.optimizer.param_groups[1]
    good, group[name] = group[name], value
    with pytest.raises(InputError, match=f"AdamW {name}"):
        engine.step(step)
    assert same(masters(engine), before)
    group[name] = good
    assert engine.step(step).grad_norm > 0
