"""What a plan costs: counted in layers that are recorded and steps that are followed."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import GPT2Config, PreTrainedConfig

from megatrain.autoplace.candidates import Budget, Spending
from megatrain.autoplace.search import fastest
from megatrain.base.units import GIB
from megatrain.cli.models import qwen2_config
from megatrain.device.trace import ClockDevice
from megatrain.forecast import cache, profile, simulate
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.profile import Profile
from megatrain.forecast.workload import Workload
from megatrain.machine import machine_for
from megatrain.model.probe import spec
from megatrain.placement import Placement
from megatrain.plan.planner import make_plan
from megatrain.source.source import open_source
from tests.sweeps import few
from tests.unit.forecast_cases import (
    experts_config,
    small_machine,
    tiny_config,
    tiny_spec,
)

FAMILIES = {
    "llama": tiny_config(2),
    "mixtral": experts_config(),
    "gpt2 with dropout": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4),
}


class Counted:
    """How often a function of a module is called."""

    def __init__(self, patch, module, name):
        self.calls, self._function = 0, getattr(module, name)
        patch.setattr(module, name, self)

    def __call__(self, *given, **named):
        self.calls += 1
        return self._function(*given, **named)

    def __get__(self, instance, owner):
        return partial(self, instance)


@pytest.mark.parametrize("name", few(FAMILIES, 1))
def test_layers_of_other_rows_follow_from_two_that_are_recorded(name, monkeypatch):
    """To the last byte what is recorded of so many rows."""
    config: PreTrainedConfig = FAMILIES[name]
    model = spec(open_source(config).model)
    measured = Profile(model, torch.bfloat16, 16, compiled=True)
    recorded = Counted(monkeypatch, profile, "traced")
    for rows in (6, 4):
        measured.layer(0, rows)
    for rows in (2, 40):
        follows = measured.layer(0, rows)
        assert recorded.calls == 2
        assert follows == Profile(model, torch.bfloat16, 16, compiled=True).layer(0, rows)
        recorded.calls = 2


def test_a_plan_follows_few_steps(monkeypatch):
    """Four layers of 7B, some of which rest on the device or keep graphs; passes are tried."""
    cache = ForecastCache(spec(open_source(qwen2_config("7b", layers=4)).model))
    machine = machine_for("H200", 60 * GIB, 16, 48 * GIB)
    recorded = Counted(monkeypatch, profile, "traced")
    followed = Counted(monkeypatch, simulate, "train_step")
    found = fastest(cache, machine, Workload(98304, 1024))
    assert found.placement.resident and found.placement.save_all and found.placement.passes > 1
    assert recorded.calls == 2  # for micro-batches of 48, 32, 16, and 8 rows
    assert followed.calls <= 26  # in 15 forecasts


def test_a_refusal_and_its_remedies_follow_few_steps(monkeypatch):
    """Of 25,000 micro-batches, beside a disk: what is certain tells whether a change is enough."""
    machine = replace(small_machine(64, host_gib=3), disk_space_bytes=GIB)
    followed = Counted(monkeypatch, simulate, "train_step")
    passed = Counted(monkeypatch, ClockDevice, "_pass")
    counted = Counted(monkeypatch, cache, "needs_of")
    plan = make_plan(tiny_spec(6), machine, Workload(25_000 * 64, 64, micro_batch=1))
    assert not plan.fits and len(plan.remedies) == 3
    assert followed.calls <= 30 and passed.calls <= 5600
    assert counted.calls <= 60


@pytest.mark.parametrize("passes", few([1, 2, 8], 2))
def test_that_each_pass_reads_the_disk_is_known_before_it_is_followed(passes):
    """No way takes less than is told of it, nor a sixth less than it likely does."""
    cache, workload = ForecastCache(tiny_spec(4)), Workload(512, 64)
    machine = replace(small_machine(64), disk_read_gbps=0.001, disk_space_bytes=GIB)
    placement = Placement(slots=2, disk_moments=6, disk_remainder=6, disk_weights=4)
    candidate = cache.of(machine, placement, workload, 1)
    spending = Spending(cache, workload, candidate, Budget(machine), passes)
    ways = [way for way in spending.all() if way.resident < 5]
    assert ways
    for way in ways:
        found = spending.spent(way)
        assert found is not None
        assert way.least <= found.seconds
        assert way.likely <= 7 / 6 * found.seconds
        if not way.staying and not way.resident:
            assert way.likely >= 0.65 * found.seconds
