"""A device, or a host, that runs out of memory in the middle of a step."""

import logging
from typing import Any

import pytest
import torch

from megatrain import AdamW, DoesNotFit, Engine, Placement
from megatrain.base.units import MIB
from megatrain.engine.batch import halved
from megatrain.loss import DPO
from megatrain.telemetry.host import process_bytes
from tests.counted import CountedDevice
from tests.parity.cases import llama, make_batches, make_engine, masters, same
from tests.parity.test_preferences import replies
from tests.sweeps import swept

STEP = make_batches(1, ((4, 40), (3, 30), (1, 7)))[0]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "nothing is kept": {},
    "graphs on the device": {"save_activations": 3},
    "graphs on both": {"offload_activations": 2, "save_activations": 1, "layer_inputs": "host"},
    "passes": {"passes": 2, "save_activations": 2, "save_attention": "device"},
}


def peak_of(step, loss=None, **choices):
    """What a step takes at most where nothing is limited."""
    device = CountedDevice()
    with make_engine(llama(), placement=Placement(**choices), device=device) as engine:
        engine.step(step, *([loss] if loss else []))
    return device.peak_bytes


@swept(together=1, loss={"next tokens": None, "pairs": DPO(0.3)}, choices=PLACEMENTS)
def test_a_step_without_memory_is_computed_again_from_less(choices, loss, caplog):
    """As plain training on the halves of its micro-batches, to the bit; and so are later steps."""
    step, losses = STEP if loss is None else replies(loss), [] if loss is None else [loss]
    lean = {
        "passes": choices.get("passes", 1),
        "layer_inputs": choices.get("layer_inputs", "device"),
    }
    whole, least = peak_of(step, loss, **choices), peak_of(halved(step), loss, **lean)
    assert least < 0.95 * whole
    device = CountedDevice((whole + least) // 2)
    plain, uncut = (make_engine(llama(), placement=Placement(slots=1)) for _ in range(2))
    with (
        caplog.at_level(logging.WARNING),
        make_engine(llama(), placement=Placement(**choices), device=device) as engine,
    ):
        for _ in range(2):
            result, wanted = engine.step(step, *losses), plain.step(halved(step), *losses)
            assert (result.loss, result.grad_norm) == (wanted.loss, wanted.grad_norm)
            assert result.loss == pytest.approx(uncut.step(step, *losses).loss, rel=1e-4)
        assert same(masters(engine), masters(plain)) and engine.steps == 2
    [said] = [line for line in caplog.messages if "computed again" in line]
    assert said.startswith("step 1: the device has no memory left") and "\n" not in said


def test_micro_batches_whose_routers_are_weighed_one_by_one_are_not_cut():
    device = CountedDevice((peak_of(STEP) + peak_of(halved(STEP))) // 2)
    with make_engine(llama(), placement=Placement(slots=1), device=device) as engine:
        with pytest.raises(DoesNotFit):
            engine.step(STEP, router_shares=[0.5, 0.4, 0.1])
        assert engine.step(STEP).loss > 0  # without them they are
        with pytest.raises(DoesNotFit):
            engine.step(STEP, router_shares=[0.5, 0.4, 0.1])


def test_what_the_host_has_no_memory_for_is_computed_again():
    """Graphs of a step take 218 MiB, which the limit does not leave."""
    ids = torch.randint(100, (700, 60), generator=torch.Generator().manual_seed(0))
    step = [{"input_ids": ids, "labels": ids}]
    limit = process_bytes() + 80 * MIB
    engine = make_engine(llama(), placement=Placement(offload_activations=3), host_memory=limit)
    assert engine.step(step).loss > 0 and engine.memory()["host_kept_bytes"] == 0


@pytest.mark.parametrize("clip", [1.0, None])
def test_out_of_memory_is_one_line_and_changes_no_weight(clip):
    """Also where a step is tried again; without clipping updates may have begun, and it is not."""
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
