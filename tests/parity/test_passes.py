"""Steps in several passes: what is refused, and how micro-batches are cut."""

import pytest
import torch

from megatrain import InputError, Placement
from megatrain.engine.batch import Batch
from tests.parity.cases import Noting, llama, make_engine


def batch(count):
    return Batch(list(range(count)), 1.0, count, torch.zeros(1), 0)


@pytest.mark.parametrize(("count", "passes"), [(1, 1), (7, 1), (7, 3), (8, 4), (2, 5)])
def test_passes_are_even_and_hold_every_micro_batch_in_order(count, passes):
    parts = batch(count).passes(passes)
    assert [micro for part in parts for micro in part.micro] == list(range(count))
    assert [part.first for part in parts] == [part.micro[0] for part in parts]
    sizes = [len(part.micro) for part in parts]
    assert len(parts) == min(count, passes) and max(sizes) - min(sizes) <= 1


def test_several_passes_keep_rows():
    with pytest.raises(InputError, match=r"placement\.keep_rows"):
        Placement(passes=2, keep_rows=False)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_layer_that_rests_on_the_device_keeps_its_gradient_in_the_sums_of_passes(passes):
    device, placement = Noting(), Placement(passes=passes, resident=("layer 1",))
    make_engine(llama(), placement=placement, device=device).close()
    assert ("layer 1 gradient" in device.taken) == (passes == 1)
    assert ("layer 1 sums" in device.taken) == (passes == 2)
