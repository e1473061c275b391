"""What waits from the forward to the backward, wherever: not a bit of a gradient changes."""

import weakref

import pytest

from megatrain import Placement
from tests.families.tiny import tiny_model
from tests.inside import parts_of
from tests.parity.cases import (
    Counting,
    gradients,
    llama,
    make_batches,
    make_engine,
    masters,
    model_of,
    relative_error,
    same,
)
from tests.sweeps import few, placements

# The gradient of the last one, which norms its embedding, depends on rows that come again.
FAMILIES = ["llama", "gpt2", "phi3", "mixtral", "gemma2", "bloom"]


@pytest.mark.parametrize("family", few(FAMILIES, 3, 5))
def test_no_policy_changes_a_bit(family):
    steps = make_batches(2)
    wanted = make_engine(model_of(family), placement=Placement(slots=2))
    for step in steps:
        wanted.step(step)
    number = FAMILIES.index(family)
    for policy in list(placements("waiting").values())[number % 3 :: 3]:
        engine = make_engine(model_of(family), placement=policy)
        for step in steps:
            engine.step(step)
            assert not any(layer.waiting for layer in parts_of(engine).trunk[1:])
        assert same(gradients(engine), gradients(wanted)), policy
        assert same(masters(engine), masters(wanted)), policy


def test_states_wait_but_for_rounding():
    """torch takes another convolution on the CPU where gradients are wanted: in a kept forward."""
    [step] = make_batches(1)
    engines = [
        make_engine(tiny_model("mamba"), placement=Placement(**choices))
        for choices in ({"slots": 1}, {"save_activations": 9}, {"offload_activations": 9})
    ]
    for engine in engines:
        engine.step(step)
    plain, kept, offloaded = map(gradients, engines)
    assert same(kept, offloaded)
    assert relative_error(kept, plain) < 1e-5


@pytest.mark.parametrize("where", ["device", "host"])
def test_attention_is_computed_once(where):
    engines = make_engine(llama()), make_engine(llama(), placement=Placement(save_attention=where))
    [step], counts = make_batches(1), []
    for engine in engines:
        with Counting(lambda f, _: "scaled_dot" in str(f) and "backward" not in str(f)) as calls:
            engine.step(step)
        counts.append(calls.count)
    assert counts == [2 * 3 * 3, 3 * 3]


def test_a_kept_graph_holds_neither_weights_nor_inputs():
    """With boundaries on the host: all that is left are its own activations."""
    placement = Placement(slots=1, save_activations=3, layer_inputs="host")
    engine = make_engine(llama(), placement=placement)
    [step] = make_batches(1)
    engine.step(step)
    layers, seen = parts_of(engine).trunk[1:], []
    head = parts_of(engine).head.loss_and_vjp

    def look(slot, batch, h, room):
        for layer in layers:
            for waiting in layer.waiting.values():
                seen.append(waiting)
                assert all(not value.numel() for value in waiting.inputs.values())
        return head(slot, batch, h, room)

    parts_of(engine).head.loss_and_vjp = look
    engine.step(step)
    assert len(seen) == 9


@pytest.mark.parametrize("boundaries", ["device", "host"])
def test_the_last_activations_are_gone_when_the_backward_begins(boundaries):
    engine = make_engine(llama(), placement=Placement(layer_inputs=boundaries))
    head, last, seen = parts_of(engine).head, parts_of(engine).trunk[-1], []
    loss_and_vjp, vjp = head.loss_and_vjp, last.vjp

    def enter(slot, batch, h, room):
        seen.extend(weakref.ref(value) for values in h for value in values.values())
        return loss_and_vjp(slot, batch, h, room)

    def begin(*arguments):
        assert seen and not any(value() is not None for value in seen)
        return vjp(*arguments)

    head.loss_and_vjp, last.vjp = enter, begin
    engine.step(make_batches(1)[0])
