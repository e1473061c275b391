"""The search: it stays within the budgets, uses what there is, and says what it did."""

import json
import logging
from dataclasses import replace
from itertools import pairwise

import pytest

from megatrain import Placement
from megatrain.device import CpuDevice
from megatrain.engine import fit
from megatrain.engine.search import Forecasts, Task
from megatrain.errors import DoesNotFit
from tests.unit.forecast_cases import H200, small_machine, tiny_outline

FORECASTS = Forecasts(tiny_outline())
BUDGETS = (3.0, 4.0, 6.0, 10.0, 20.0, 60.0, 200.0)  # MiB


def choose(device_mib: float, host_gib: float = 1e6, **given: object) -> fit.Forecast:
    arguments = {"tokens_per_step": 512, "sequence_length": 64, "forecasts": FORECASTS} | given
    return fit.choose(tiny_outline(), small_machine(device_mib, host_gib), **arguments)  # type: ignore[arg-type]


def test_budgets_are_never_exceeded_and_more_memory_is_never_slower() -> None:
    found = []
    for budget in BUDGETS:
        try:
            found.append(choose(budget))
        except DoesNotFit:
            assert not found  # once it fits, it fits with more
            continue
        assert found[-1].device_peak_bytes <= budget * 2**20
    assert 2 <= len(found) < len(BUDGETS)
    seconds = [forecast.seconds for forecast in found]
    assert all(b <= a * 1.02 for a, b in pairwise(seconds))
    assert seconds[-1] < 0.8 * seconds[0]


def test_with_much_memory_nothing_is_recomputed_and_no_update_waited_for() -> None:
    found = choose(1e4)
    assert found.placement.keep_layers == 6
    assert found.seconds == pytest.approx(found.bounds["compute"], rel=0.01)


def test_what_does_not_fit_is_refused_with_the_least_that_would() -> None:
    with pytest.raises(DoesNotFit, match=r"at least .* GiB of device memory and .* GiB of host"):
        choose(0.5)
    with pytest.raises(DoesNotFit, match="host memory"):
        choose(1e4, host_gib=0.01)


def test_micro_batches_are_even_and_a_given_one_is_kept() -> None:
    assert choose(1e4, tokens_per_step=64 * 9).micro_batch == 9
    assert choose(1e4, micro_batch=3).micro_batch == 3
    task = Task(96 * 1024, 1024, None, True, "bf16", True)
    sizes = fit.Search(FORECASTS, H200, task)._sizes()
    assert sizes == [48, 32, 16, 8, 4, 2, 1]


def test_no_hand_made_placement_in_the_budget_is_much_faster() -> None:
    budget = 40.0
    best = choose(budget)
    task = Task(512, 64, None, True, "bf16", True)
    names = [t.name for t in FORECASTS.layouts if t.name != "unused"]
    for count in range(0, len(names), 2):
        for keep in range(0, 7, 2):
            placement = Placement(
                slots=3, compile=True, resident=tuple(names[:count]), keep_layers=keep
            )
            other = FORECASTS.of(small_machine(budget), placement, task, 8)
            if other.device_peak_bytes <= 0.95 * budget * 2**20:
                assert best.seconds <= other.seconds * 1.05, placement


class Gpu(CpuDevice):
    """A GPU as far as its memory goes."""

    kind = "cuda"

    def memory(self) -> dict[str, int]:
        return {"device_free_bytes": 20 << 20, "device_bytes": 0}


def foreseen(monkeypatch: pytest.MonkeyPatch, machine: object) -> fit.Forecast | None:
    monkeypatch.setattr(fit, "present_machine", lambda device, precision: machine)
    monkeypatch.setattr(fit, "can_compile", lambda: True)
    return fit.foreseen_placement(
        tiny_outline(),
        Gpu(),
        tokens_per_step=512,
        sequence_length=64,
        micro_batch=None,
        clip=True,
        precision="bf16",
    )


def test_auto_takes_the_memory_that_is_free_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        found = foreseen(monkeypatch, small_machine(1e6))
    assert found is not None and found.device_peak_bytes <= 20 << 20
    text = caplog.text
    assert "micro-batches of" in text and "s a step expected" in text and "is busy" in text


def test_an_unknown_machine_is_left_to_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    assert foreseen(monkeypatch, None) is None


def test_a_forecast_is_plain_data() -> None:
    data = json.loads(json.dumps(choose(1e4).as_dict()))
    assert data["binds"] in data["bounds"] and data["micro_batch"] == 8
    assert Placement(**data["placement"] | {"resident": tuple(data["placement"]["resident"])})
    assert replace(small_machine(), **data["machine"]).device_memory_bytes
