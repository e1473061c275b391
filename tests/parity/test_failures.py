"""Steps that go wrong: weights and moments are those of the last good one, and the next one counts.

The damage is done where it would come from: in the logits (a bad loss) or on the way back through
the layers (a good loss, a bad gradient).
"""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from megatrain import InputError, Placement, RunFailed
from megatrain.device import CpuDevice
from tests.inside import parts_of, program_of, store_of
from tests.parity.cases import llama, make_batches, make_engine, masters, moments, qwen2, same
from tests.race.late import LateDevice
from tests.sweeps import swept

TIED = {"untied": False, "tied": True}
CLIPPED = {"clipped": 1.0, "not clipped": None}
DEVICES = {"in order": CpuDevice, "late": LateDevice}
PLACED = {"streamed": Placement(slots=1), "resident": Placement(resident=("layer 1", "head"))}


def engine_of(tied, clip, device, **options):
    model = llama(tie_word_embeddings=tied)
    return make_engine(model, clip=clip, device=device(), precision="bf16", **options)


def begun(tied, clip, device, **options):
    """An engine on the device and one on the CPU after the first of three steps."""
    engines = [engine_of(tied, clip, each, **options) for each in (device, CpuDevice)]
    steps = make_batches(3)
    for engine in engines:
        engine.step(steps[0])
    return *engines, steps


def versions(engine):
    return [tile.version for tile in store_of(engine).tiles]


def without(engine, damage, step):
    """The failure of a damaged step, after which the engine is as it was before that step."""
    before, state, counts = masters(engine), moments(engine), versions(engine)
    damage()
    with pytest.raises(RunFailed) as caught:
        engine.step(step)
    assert same(masters(engine), before)
    assert same(dict(enumerate(moments(engine))), dict(enumerate(state)))
    assert versions(engine) == counts
    return caught


def goes_on(engine, other, steps):
    """The next steps are those of an engine that never met the bad one."""
    for step in steps:
        one, wanted = engine.step(step), other.step(step)
        assert (one.loss, one.grad_norm) == (wanted.loss, wanted.grad_norm)
    assert same(masters(engine), masters(other))


@swept(
    together=1, tied=TIED, clip=CLIPPED, device=DEVICES, rule=["adamw", "muon"], placement=PLACED
)
def test_a_bad_loss(tied, clip, device, rule, placement):
    engine, other, steps = begun(tied, clip, device, rule=rule, placement=placement)
    program, logits = program_of(engine), program_of(engine).logits
    bad = steps[1][1]["input_ids"].shape[0]

    def damage():
        def damaged(weights, micro, output):
            found = logits(weights, micro, output)
            rows = micro.inputs["input_ids"].shape[0]
            return found * torch.nan if rows == bad else found

        program.logits = damaged

    caught = without(engine, damage, steps[1])
    assert "the loss is nan (micro-batches [1])" in str(caught.value)
    assert "weights and optimizer state are those of the last step" in str(caught.value)
    assert "\n" not in str(caught.value)
    without(engine, lambda: None, steps[1])  # and again
    program.logits = logits
    assert engine.optimizer.num_steps == 1
    goes_on(engine, other, steps[1:])


def spoil_gradient(engine, value):
    """The second layer hands on a bad gradient; returns what undoes it."""
    layer = parts_of(engine).trunk[2]
    pull = layer.vjp

    def damaged(*arguments):
        return [{ref: g * value for ref, g in micro.items()} for micro in pull(*arguments)]

    layer.vjp = damaged
    return lambda: setattr(layer, "vjp", pull)


@swept(
    together=1,
    value=[torch.nan, torch.inf],
    tied=TIED,
    device=DEVICES,
    rule=["adamw", "muon clipped"],
    placement=PLACED,
)
def test_a_bad_gradient_with_clipping(value, tied, device, rule, placement):
    engine, other, steps = begun(tied, 1.0, device, rule=rule, placement=placement)
    undo = spoil_gradient(engine, value)
    caught = without(engine, lambda: None, steps[1])
    assert "the gradient norm is" in str(caught.value)
    assert "weights and optimizer state are those of the last step" in str(caught.value)
    undo()
    goes_on(engine, other, steps[1:])


@swept(together=1, device=DEVICES)
def test_a_bad_gradient_without_clipping_is_not_called_harmless(device):
    """Updates do not wait for the norm then; what is told must be true."""
    engine, steps = engine_of(False, None, device), make_batches(2)
    engine.step(steps[0])
    before = masters(engine)
    with pytest.raises(InputError, match="norm_limit needs max_grad_norm"):
        engine.step(steps[1], norm_limit=1.0)
    assert same(masters(engine), before)
    spoil_gradient(engine, torch.nan)
    with pytest.raises(RunFailed, match="weights and optimizer state are damaged") as caught:
        engine.step(steps[1])
    assert "last checkpoint" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not same(masters(engine), before)


BREAKS = {
    "slots": Placement(slots=3),
    "boundaries": Placement(layer_inputs="host"),
    "graphs": Placement(save_activations=2),
}


@swept(together=1, where=["forward", "head", "backward"], placement=BREAKS)
def test_a_step_that_breaks_off_leaves_nothing_behind(where, placement):
    """Out of memory, or Ctrl-C: the caller may go on with other micro-batches."""
    model, steps = llama(tie_word_embeddings=True), make_batches(3)
    options = {"clip": 1.0, "placement": placement}
    engine = make_engine(model, device=LateDevice(), **options)
    other = make_engine(model, **options)
    engine.step(steps[0])
    other.step(steps[0])
    parts = parts_of(engine)
    unit, name = {
        "forward": (parts.trunk[2], "run"),
        "head": (parts.head, "loss_and_vjp"),
        "backward": (parts.trunk[1], "vjp"),
    }[where]
    broken = mock.patch.object(unit, name, side_effect=MemoryError("no more"))
    with broken, pytest.raises(MemoryError, match="no more"):
        engine.step(steps[1])
    goes_on(engine, other, [steps[1][:1], *steps[1:]])


class Breaking(CpuDevice):
    """Breaks off behind the work called `last`."""

    last: str | None = None

    def run(self, stream, name, *work, **buffers):
        result = super().run(stream, name, *work, **buffers)
        if name == self.last:
            raise RuntimeError("out of ideas")
        return result


@swept(together=1, tied=TIED, clip=CLIPPED)
def test_a_step_that_fails_in_its_updates_leaves_nothing_to_save(tied, clip, tmp_path, caplog):
    """Also when all tiles count it already, and after later steps."""
    device = Breaking()
    engine = engine_of(tied, clip, lambda: device)
    first, second, third = make_batches(3)
    engine.step(first)
    trained = [tile.name for tile in store_of(engine).tiles if tile.layout.trainable_numel]
    device.last = f"update {trained[-1 if clip else 0]}"
    with pytest.raises(RuntimeError, match="out of ideas"):
        engine.step(second)
    device.last = None
    for _ in range(2):
        with pytest.raises(RunFailed, match="a step was broken off"):
            engine.save(tmp_path / "saved")
        engine.step(third)
    assert not list(tmp_path.iterdir())
    engine.save_pretrained(tmp_path / "exported")
    assert "the weights that are written are not all of one step" in caplog.text


def test_a_call_while_another_runs_is_refused(tmp_path):
    """Within it and in another thread: both would change what is the engine's own."""
    engine, [step] = make_engine(llama()), make_batches(1)
    calls = (
        lambda: engine.step(step),
        lambda: engine.evaluate(step),
        lambda: engine.save(tmp_path / "saved"),
        lambda: engine.save_pretrained(tmp_path / "exported"),
    )
    with engine.whole_model(), ThreadPoolExecutor() as pool:
        for call in calls:
            for run in (call, lambda call=call: pool.submit(call).result()):
                with pytest.raises(InputError, match="another call of this engine is running"):
                    run()
    assert not list(tmp_path.iterdir())
    assert engine.step(step).loss == make_engine(llama()).step(step).loss


# A closed engine holds no memory, which the next one has, and says that it is closed.


CLOSED_AFTER = {
    "streamed": Placement(slots=3),
    "graphs": Placement(slots=3, save_activations=1, layer_inputs="host"),
    "passes, resident": Placement(slots=3, resident=("layer 0", "head"), passes=2),
}


@swept(together=1, placement=CLOSED_AFTER, rule=["adamw", "muon"])
def test_a_closed_engine_has_given_its_memory_back(placement, rule, tmp_path):
    gc.disable()  # nothing may need it
    try:
        engine = make_engine(qwen2(), rule=rule, placement=placement)
        [step] = make_batches(1)
        engine.step(step)
        engine.evaluate(step)
        engine.save(tmp_path / "saved", wait=False)
        tiles = store_of(engine).tiles
        held = [weakref.ref(buffer) for tile in tiles for buffer in tile.planes.values()]
        del tiles
        engine.close()
        assert held and not any(each() is not None for each in held)
    finally:
        gc.enable()


def test_a_closed_engine_says_that_it_is_closed(tmp_path):
    engine = make_engine(qwen2())
    [step] = make_batches(1)
    engine.step(step)
    engine.close()
    engine.close()  # again, as a `with` block around it does
    for use in (
        lambda: engine.step(step),
        lambda: engine.evaluate(step),
        lambda: engine.logits({"input_ids": step[0]["input_ids"]}),
        lambda: list(engine.named_masters()),
        lambda: engine.save(tmp_path / "saved"),
        lambda: engine.save_pretrained(tmp_path / "exported"),
        engine.memory,
    ):
        with pytest.raises(RunFailed, match="the engine is closed; make a new one"):
            use()
    assert not list(tmp_path.iterdir())
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        engine.nonsense  # noqa: B018
