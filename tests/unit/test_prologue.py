"""What runs before the layers: Python that a GPU waits for, so as little of it as there need be."""

from collections import Counter
from typing import Any

import pytest
from transformers import masking_utils

from megatrain import Placement
from megatrain.model.capture import Capture
from megatrain.model.program import ModelProgram
from tests.parity.cases import llama, make_batches, make_engine

LAYERS = 6
[STEP] = make_batches(1)


@pytest.fixture
def engine():
    """Streamed; what it does when it is made is not counted."""
    made = make_engine(llama(num_hidden_layers=LAYERS), placement=Placement(slots=2))
    yield made
    made.close()


def test_the_backward_ends_where_the_layers_begin(engine, monkeypatch):
    called: Counter[str] = Counter()
    running = ["epilogue"]
    prologue, forward = ModelProgram.prologue, Capture.forward

    def told(self, weights, batch, *features):
        running[0] = "backward" if batch.calls else "forward"
        values = prologue(self, weights, batch, *features)
        running[0] = "epilogue"
        return values

    def counted(self, handler, *rest):
        def one(*given):
            called[running[0]] += 1
            return handler(*given)

        return forward(self, one, *rest)

    monkeypatch.setattr(ModelProgram, "prologue", told)
    monkeypatch.setattr(Capture, "forward", counted)
    engine.step(STEP)
    every = LAYERS * len(STEP)
    assert called == {"forward": every, "epilogue": every, "backward": len(STEP)}


def test_positions_are_looked_at_once_for_each_micro_batch(engine, monkeypatch):
    """transformers' look for packed rows waits for the device; three forwards would take one."""
    looks: list[Any] = []
    find = masking_utils.find_packed_sequence_indices

    def look(position_ids):
        looks.append(position_ids)
        return find(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", look)
    engine.step(STEP)
    assert len(looks) == len(STEP)
