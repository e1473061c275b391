"""A step of several ranks is foretold as one of them takes it, with its shards and the link."""

from dataclasses import replace
from unittest import mock

import pytest

from megatrain.autoplace.candidates import Candidates
from megatrain.autoplace.spend import FirstTiles
from megatrain.device.base import GATHER, REDUCE
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Generation, Workload
from megatrain.machine import Machine
from megatrain.placement import Placement
from megatrain.tile import TileKind
from tests.unit.forecast_cases import small_machine, tiny_spec, wide_spec

WHOLE = Workload(tokens_per_step=2048, sequence_length=64, compile=False)
RANKS = 4
FORECASTS = ForecastCache(tiny_spec())


def told(workload: Workload, machine: Machine, **placement: object) -> Forecast:
    return FORECASTS.of(machine, Placement(slots=3, **placement), workload, 4)  # type: ignore[arg-type]


def seconds(found: Forecast, stream: str) -> float:
    """Of layers and head; a table's rows apart."""
    spans = [s for s in found.spans if s.stream == stream and "embed" not in s.name]
    return sum(span.seconds for span in spans)


def test_shards_cross_the_bus_and_the_rest_the_link() -> None:
    alone = told(WHOLE, small_machine())
    part = WHOLE.shared(RANKS)
    machine = small_machine().shared(RANKS, link_gbps=8.0)
    found = told(part, machine)
    assert part.rows == WHOLE.rows // RANKS
    for name in ("host_weights_bytes", "host_moments_bytes", "host_remainder_bytes"):
        assert found.host_bytes[name] == pytest.approx(alone.host_bytes[name] / RANKS, rel=0.02)
    layouts = FORECASTS.model(part).layouts
    layers = sum(each.numel for each in layouts if each.kind is TileKind.LAYER)
    [head] = [each.numel for each in layouts if each.kind is TileKind.HEAD]
    others = (1 - 1 / RANKS) / 8e9
    assert seconds(found, GATHER) == pytest.approx(2 * (2 * layers + head) * others, rel=0.01)
    assert seconds(found, REDUCE) == pytest.approx(4 * (layers + head) * others, rel=0.01)
    assert found.bounds["copy in"] == pytest.approx(alone.bounds["copy in"] / RANKS, rel=0.05)
    # Each updates its share with its share of the host.
    assert found.bounds["update"] == pytest.approx(alone.bounds["update"], rel=0.05)
    slow = told(part, replace(machine, link_gbps=0.01))
    assert slow.seconds > 3 * found.seconds


def test_what_rests_on_the_device_is_counted_as_the_engine_cuts_it() -> None:
    part = WHOLE.shared(RANKS)
    first = FirstTiles(FORECASTS.model(part).layouts, part, Placement())
    count = len(first.tiles)
    found = told(part, small_machine(), resident=first.names(count)).device_bytes
    there = found["resident tiles"] + found["kept weights"]
    assert first.device_bytes(count) == pytest.approx(there, rel=0.01)
    assert seconds(told(part, small_machine(), resident=first.names(count)), GATHER) < seconds(
        told(part, small_machine()), GATHER
    )


def test_no_way_is_tried_that_ranks_do_not_have() -> None:
    """A head in slices."""
    forecasts = ForecastCache(wide_spec())
    slices = [
        Candidates(forecasts, small_machine(), each).slice_bytes
        for each in (WHOLE, WHOLE.shared(RANKS))
    ]
    assert slices[0] is not None and slices[1] is None


@pytest.mark.parametrize("rows", [None, 8])
def test_each_rank_keeps_keys_and_values_of_its_own_replies(rows: int | None) -> None:
    """Of all of a step of 32, or of those that all ranks make at once."""
    replied, asked = replace(WHOLE, generation=Generation(16, rows)), rows or WHOLE.rows
    with mock.patch("megatrain.forecast.cache.generation_bytes", return_value=0) as counted:
        forecasts = ForecastCache(tiny_spec())
        for workload in (replied, replied.shared(RANKS)):
            forecasts.of(small_machine(), Placement(slots=3), workload, 4)
    assert [call.args[2] for call in counted.call_args_list] == [asked, asked // RANKS]
