"""A device, or a host, that runs out of memory in the middle of a step."""

import pytest
import torch

from megatrain import AdamW, DoesNotFit, Engine, Placement
from tests.counted import CountedDevice
from tests.parity.cases import llama, make_batches, make_engine

STEP = make_batches(1, ((4, 40), (3, 30), (1, 7)))[0]


def peak_of(step, loss=None, **choices):
    """What a step takes at most where nothing is limited."""
    device = CountedDevice()
    with make_engine(llama(), placement=Placement(**choices), device=device) as engine:
        engine.step(step, *([loss] if loss else []))
    return device.peak_bytes


@pytest.mark.parametrize("clip", [1.0, None])
def test_out_of_memory_is_one_line_and_changes_no_weight(clip):
    device = CountedDevice()
    rule = AdamW(lr=0.1)
    with Engine(llama(), optimizer=rule, device=device, precision="fp32", max_grad_norm=clip) as e:
        before = {name: master.clone() for name, master in e.named_masters()}
        device.most_bytes = 1 + peak_of(STEP[2:])
        with pytest.raises(DoesNotFit, match="out of memory.*micro-batches") as told:
            e.step(STEP)
        assert "\n" not in str(told.value)
        if clip is not None:
            assert "no weight has been changed" in str(told.value)
            assert all(torch.equal(master, before[name]) for name, master in e.named_masters())
            device.most_bytes = None
            assert e.step(STEP).loss > 0  # and the engine goes on
            assert any(not torch.equal(m, before[name]) for name, m in e.named_masters())
