"""What `placement="auto"` takes on a GPU: by forecast, or where nothing can be foreseen."""

import logging
from dataclasses import replace

import pytest

from megatrain import AdamW
from megatrain.autoplace import auto
from megatrain.base.units import GIB
from megatrain.device import CpuDevice
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.loss import CROSS_ENTROPY, DPO
from megatrain.model.probe import spec
from megatrain.placement import Placement
from megatrain.source.source import EngineSetup, Model, open_source
from tests.inside import answering
from tests.race.schedule import Alike
from tests.unit.forecast_cases import small_machine, tiny_config

FREE = 20 << 20


class Gpu(CpuDevice):
    """A GPU as far as its memory goes."""

    kind = "cuda"

    def memory(self):
        return {"device_free_bytes": FREE, "device_bytes": 0, "device_total_bytes": 1 << 40}


def opened(layers=2, *, train=True):
    source = open_source(tiny_config(layers))
    found = spec(source.model)
    model = Model.trained(found, AdamW()) if train else Model(found, None)
    return EngineSetup(source, model, 1.0, "bf16", Gpu(), None, None, None, 0)


def settled(
    monkeypatch, asked, tokens=512, length=64, *, machine=None, compiler=True, loss=CROSS_ENTROPY
):
    answering(monkeypatch, auto, present_machine=machine)
    answering(monkeypatch, auto, can_compile=compiler)
    answering(monkeypatch, auto, check_fits=None)
    return auto.settle(asked, "auto", tokens, length, None, loss)


def test_auto_takes_the_memory_that_is_free_and_says_why(monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        found = settled(monkeypatch, opened(), machine=small_machine(1e6))
    assert found.planned is not None and found.planned.tokens_per_step == 512
    assert found.planned.micro_batch_tokens == 64 * found.micro_batch
    text = caplog.text
    assert "micro-batches of" in text and "s a step expected" in text and "bound by " in text


@pytest.mark.parametrize(("tokens", "length", "wanted"), [
    (None, None, (98_304, 1024)), (512, None, (512, 512)), (None, 64, (98_304, 64)),
])  # fmt: skip
def test_sizes_that_nobody_gives_are_stated_ones(monkeypatch, tokens, length, wanted):
    seen: list[Workload] = []
    monkeypatch.setattr(auto, "_fastest", lambda opened, workload: seen.append(workload))
    settled(monkeypatch, opened(), tokens, length, loss=DPO())
    assert [(each.tokens_per_step, each.sequence_length) for each in seen] == [wanted]
    assert seen[0].loss == DPO()


def test_of_several_ranks_each_is_planned_with_its_part(monkeypatch):
    """Of a step's rows, of host memory and of updates, by the link that was measured."""
    alone, ranks = opened(), Alike(0, 3, on_host=3, link_gbps=0.25)
    model = Model(alone.model.spec, alone.model.optimizer, ranks.size)
    seen: list[Forecast] = []
    search = auto.fastest
    monkeypatch.setattr(auto, "fastest", lambda *given: seen.append(search(*given)) or seen[-1])
    machine = small_machine(1e6, host_gib=12)
    found = settled(monkeypatch, replace(alone, model=model, ranks=ranks), machine=machine)
    assert found.planned is not None and found.planned.tokens_per_step == 64 * 3  # of 8 rows
    [told] = seen
    assert told.machine.host_memory_bytes == 4 * GIB and told.machine.link_gbps == 0.25
    assert told.machine.update_gbps == pytest.approx(machine.update_gbps / 3)
    assert told.placement == found.placement


@pytest.mark.parametrize("compiler", [True, False])
def test_on_an_unknown_machine_all_is_streamed(monkeypatch, compiler):
    found = settled(monkeypatch, opened(), compiler=compiler)
    assert found.planned is None and found.placement.resident == ()
    assert found.placement.compile == compiler


def test_a_model_that_is_run_rests_on_a_device_with_twice_the_room(monkeypatch):
    small, large = opened(2, train=False), opened(8, train=False)
    rests = settled(monkeypatch, small).placement.resident
    assert {"embedding", "layer 0", "layer 1", "head"} <= set(rests) and "unused" not in rests
    assert settled(monkeypatch, large).placement == Placement(slots=3, head_tokens=8192)
