"""A step of several ranks is foretold as one of them takes it, with its shards and the link."""

from dataclasses import replace
from unittest import mock

import pytest

from megatrain import Muon
from megatrain.autoplace.candidates import FirstTiles, disk_bytes
from megatrain.autoplace.search import fastest, least
from megatrain.device import disk
from megatrain.device.base import DISK_STREAMS, GATHER, HOSTS, REDUCE
from megatrain.errors import DoesNotFit
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.workload import Generation, Workload
from megatrain.machine import NETWORK_GBPS
from megatrain.placement import Placement
from megatrain.tile import TileKind
from tests.inside import sized
from tests.unit.forecast_cases import small_machine, tiny_spec, wide_spec

WHOLE = Workload(tokens_per_step=2048, sequence_length=64, compile=False)
RANKS = 4
SHARED = WHOLE.shared(RANKS)
FORECASTS = ForecastCache(tiny_spec())


def told(workload, machine, **placement):
    return FORECASTS.of(machine, Placement(slots=3, **placement), workload, 4)


def seconds(found, stream):
    """Of layers and head; a table's rows apart."""
    spans = [s for s in found.spans if s.stream == stream and "embed" not in s.name]
    return sum(span.seconds for span in spans)


def test_shards_cross_the_bus_and_the_rest_the_link():
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


@pytest.mark.exhaustive
def test_planes_on_a_disk_are_shared(monkeypatch):
    """Each rank moves its blocks at its share of the rate, and is given its share of the space."""
    sized(monkeypatch, disk, PIECE=4096)
    choices = {"disk_moments": 8, "disk_remainder": 4, "disk_weights": 6}
    alone, shared = told(WHOLE, small_machine(), **choices), small_machine().shared(RANKS, 8.0)
    found = told(SHARED, shared, **choices)
    assert found.host_bytes["host_moments_bytes"] == alone.host_bytes["host_moments_bytes"] == 0
    for stream in DISK_STREAMS:
        assert seconds(found, stream) == pytest.approx(seconds(alone, stream), rel=0.1)
        assert seconds(found, stream) > 0
    layouts = [FORECASTS.model(each).layouts for each in (WHOLE, SHARED)]
    whole, part = (next(disk_bytes(each, WHOLE, [Placement(**choices)])) for each in layouts)
    assert part == pytest.approx(whole / RANKS, rel=0.02)
    tight = replace(shared, device_memory_bytes=1 << 20, host_memory_bytes=1 << 30)
    enough = least(FORECASTS, tight, SHARED).machine
    half = 4 * sum(each.trainable_numel for each in layouts[1]) // RANKS  # of the moments
    short = replace(enough, host_memory_bytes=enough.host_memory_bytes - half)
    with pytest.raises(DoesNotFit):
        fastest(FORECASTS, short, SHARED)
    chosen = fastest(FORECASTS, replace(short, disk_space_bytes=1 << 30), SHARED).placement
    assert chosen.disk_moments > 0


def test_matrices_of_ranks_are_gathered_to_be_directed():
    """4 bytes a parameter of a layer; a rank takes the products of its own matrices."""
    both = [replace(each, rule=Muon()) for each in (WHOLE, SHARED)]
    machine = small_machine().shared(RANKS, link_gbps=8.0)
    alone, found = told(both[0], small_machine()), told(both[1], machine)
    moments = [each.host_bytes["host_moments_bytes"] for each in (alone, found)]
    assert moments[1] == pytest.approx(moments[0] / RANKS, rel=0.03)
    layouts = FORECASTS.model(both[1]).layouts
    layers = sum(each.trainable_numel for each in layouts if each.kind is TileKind.LAYER)
    more = seconds(found, GATHER) - seconds(told(SHARED, machine), GATHER)
    assert more == pytest.approx(4 * layers * (1 - 1 / RANKS) / 8e9, rel=0.02)
    directing = [
        sum(span.seconds for span in each.spans if span.name.startswith("direct layer"))
        for each in (alone, found)
    ]
    assert directing[0] / RANKS < directing[1] < 2.5 * directing[0] / RANKS


def test_what_rests_on_the_device_is_counted_as_the_engine_cuts_it():
    part = WHOLE.shared(RANKS)
    first = FirstTiles(FORECASTS.model(part).layouts, part, Placement())
    count = len(first.tiles)
    found = told(part, small_machine(), resident=first.names(count)).device_bytes
    there = found["resident tiles"] + found["kept weights"]
    assert first.device_bytes[count] == pytest.approx(there, rel=0.01)
    assert seconds(told(part, small_machine(), resident=first.names(count)), GATHER) < seconds(
        told(part, small_machine()), GATHER
    )


@pytest.mark.parametrize("rows", [None, 8])
def test_each_rank_keeps_keys_and_values_of_its_own_replies(rows):
    """Of all of a step of 32, or of those that all ranks make at once."""
    replied, asked = replace(WHOLE, generation=Generation(16, rows)), rows or WHOLE.rows
    with mock.patch("megatrain.forecast.cache.generation_bytes", return_value=0) as counted:
        forecasts = ForecastCache(tiny_spec())
        for workload in (replied, replied.shared(RANKS)):
            forecasts.of(small_machine(), Placement(slots=3), workload, 4)
    assert [call.args[2] for call in counted.call_args_list] == [asked, asked // RANKS]


def test_each_rank_keeps_a_part_of_the_reference_model():
    replied = replace(WHOLE, generation=Generation(None, reference=True))
    alone, part = (
        told(each, small_machine()).host_bytes["host_reference_model_bytes"]
        for each in (replied, replied.shared(RANKS))
    )
    # The rows of the table for all tokens are on every rank.
    assert alone / RANKS < part < 1.1 * alone / RANKS


HOSTS_N = 8


def test_every_rank_has_the_rows_that_ranks_of_other_hosts_need():
    """As much memory for them as where one host's ranks have all of the step's tokens."""
    forecasts, placement = ForecastCache(wide_spec()), Placement(slots=3)
    step = replace(WHOLE, tokens_per_step=2 * HOSTS_N * 64)
    one, many = step.shared(2), step.shared(2, HOSTS_N)
    assert (one.rows, many.rows) == (HOSTS_N, 1)
    rows, least = (
        [found(each) for each in (one, many, replace(many, hosts=1))]
        for found in (
            lambda each: forecasts.of(small_machine(), placement, each, 1).device_bytes[
                "gradients and rows"
            ],
            lambda each: forecasts.needs(each, placement).device["sums and rows"],
        )
    )
    distinct = [len(forecasts.measured(WHOLE).distinct(count)) for count in (16, 2)]
    # 256 elements of a row, in bf16; sums of their gradients lie where the head's were.
    more = (distinct[0] - distinct[1]) * 256 * 2
    for of_one, of_many, not_counted in (rows, least):
        assert of_one == of_many
        assert of_many - not_counted == pytest.approx(more, abs=8192)


def test_sums_between_hosts_take_the_network_and_are_waited_for():
    machine = small_machine().shared(RANKS, 8.0, network_gbps=1.0)
    part, one_host = WHOLE.shared(RANKS, HOSTS_N), replace(WHOLE.shared(RANKS, HOSTS_N), hosts=1)
    found, alone = told(part, machine), told(one_host, machine)
    layouts = FORECASTS.model(part).layouts
    summed = sum(
        each.trainable_numel for each in layouts if each.kind in (TileKind.LAYER, TileKind.HEAD)
    )
    crossing = 2 * (1 - 1 / HOSTS_N) * 4 * summed / RANKS / 1e9
    assert seconds(found, HOSTS) == pytest.approx(crossing, rel=0.01)
    assert seconds(alone, HOSTS) == 0
    for stream in (GATHER, REDUCE):
        assert seconds(found, stream) == pytest.approx(seconds(alone, stream), rel=0.01)
    slow = told(part, replace(machine, network_gbps=0.1))
    assert slow.seconds - found.seconds > 0.9 * 9 * crossing  # no compute hides it
    usual = told(part, replace(machine, network_gbps=None))
    assert seconds(usual, HOSTS) == pytest.approx(crossing * RANKS / NETWORK_GBPS, rel=0.01)
    single = told(WHOLE.shared(1, 2), machine)  # each host has one card with all of the model
    assert seconds(single, HOSTS) == pytest.approx(4 * summed / 1e9, rel=0.01)
