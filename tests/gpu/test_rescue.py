"""On a real GPU: what a step that fails leaves behind, saved or refused."""

from unittest import mock

import pytest
import torch

from megatrain import DoesNotFit, Engine, Placement, RunFailed
from megatrain.checkpoint import verify
from megatrain.engine.batch import halved
from megatrain.engine.layer import Layer
from megatrain.engine.update import Update
from tests.parity.cases import llama, make_batches, make_engine, masters, moments, same

pytestmark = pytest.mark.gpu
PLACEMENTS = [Placement(slots=3), Placement(slots=3, layer_inputs="host")]


def engine_of(placement, clip=1.0):
    return make_engine(llama(), device="cuda", placement=placement, clip=clip, precision="bf16")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_state_after_the_device_ran_out_of_memory_is_that_of_the_last_step(
    placement, monkeypatch, tmp_path
):
    """A real refusal of the allocator, in the middle of the backward."""
    steps = make_batches(4)
    whole, engine = engine_of(placement), engine_of(placement)
    for step in steps[:2]:
        whole.step(step)
        engine.step(step)
    vjp, calls = Layer.vjp, []

    def greedy(self, *args, **kwargs):
        calls.append(torch.empty(1 << 42, device="cuda") if calls else None)
        return vjp(self, *args, **kwargs)

    monkeypatch.setattr(Layer, "vjp", greedy)
    with pytest.raises(DoesNotFit, match="no weight has been changed"):
        engine.step(steps[2])
    monkeypatch.undo()
    engine.save(tmp_path / "saved")
    verify(tmp_path / "saved")
    resumed, cut = (Engine.load(tmp_path / "saved", device="cuda") for _ in range(2))
    for step in steps[2:]:
        whole.step(step)
        resumed.step(step)
        engine.step(step)  # from now on by halves of its micro-batches
        cut.step(halved(step))
    for one, other in ((resumed, whole), (engine, cut)):
        assert same(masters(one), masters(other))
        pairs = zip(moments(one), moments(other), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("clip", [1.0, None])
def test_an_update_thread_that_dies_leaves_nothing_to_save(clip, tmp_path):
    """The thread's own error is what the run ends with; there is no hang."""
    first, second = make_batches(2)
    engine = engine_of(PLACEMENTS[0], clip)
    engine.step(first)
    engine.save(tmp_path / "before")
    broken = mock.patch.object(Update, "_apply", side_effect=RuntimeError("out of ideas"))
    with broken, pytest.raises(RunFailed, match="update thread failed: out of ideas"):
        for _ in range(3):  # it may be noticed a step later
            engine.step(second)
    with pytest.raises(RunFailed):
        engine.save(tmp_path / "after")
    assert [path.name for path in tmp_path.iterdir()] == ["before"]
    verify(tmp_path / "before")
