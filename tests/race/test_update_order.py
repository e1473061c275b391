"""Updates run in the order in which the next forward needs them."""

import pytest

from megatrain import Placement
from tests.race.schedule import STEPS, trace


@pytest.mark.parametrize("tied", [False, True])
def test_what_the_next_forward_begins_with_is_updated_first(tied):
    """A table tied to the head is the last tile of a step and the first one of the next."""
    device = trace(Placement(slots=3), 1.0, tied)
    updates = [name for _, name in device.operations if name.startswith("update ")]
    first = updates[: len(updates) // STEPS]
    layers = [f"update layer {i}" for i in range(5)]
    table, head = ("update head", []) if tied else ("update embedding", ["update head"])
    assert first == [table, *layers, *head]
