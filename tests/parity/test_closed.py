"""A closed engine holds no memory, which the next one has, and says that it is closed."""

import gc
import weakref

import pytest

from megatrain import Placement
from megatrain.errors import RunFailed
from tests.inside import store_of
from tests.parity.cases import make_batches, make_engine, qwen2

PLACEMENTS = {
    "streamed": Placement(slots=3),
    "graphs": Placement(slots=3, save_activations=1, layer_inputs="host"),
    "passes, resident": Placement(slots=3, resident=("layer 0", "head"), passes=2),
}


def closed(engine):
    """What holds the planes of an engine that is closed, before anything is collected."""
    held = [weakref.ref(buffer) for t in store_of(engine).tiles for buffer in t.planes.values()]
    engine.close()
    return held


@pytest.mark.parametrize("rule", ["adamw", "muon"])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_closed_engine_has_given_its_memory_back(placement, rule, tmp_path):
    gc.disable()
    try:
        engine = make_engine(qwen2(), rule=rule, placement=placement)
        [step] = make_batches(1)
        engine.step(step)
        engine.evaluate(step)
        engine.save(tmp_path / "saved", wait=False)
        held = closed(engine)
        assert held
        assert [each for each in held if each() is not None] == []
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
