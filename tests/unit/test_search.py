"""The search: it stays within the budgets, uses what there is, says what it did, and is quick."""

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product

import pytest
from transformers import GPT2Config, PreTrainedConfig

from megatrain import DoesNotFit, Muon, Placement
from megatrain.autoplace import candidates, search
from megatrain.autoplace.search import could_fit, fastest, least
from megatrain.base.units import GIB
from megatrain.cli.models import qwen2_config
from megatrain.device import disk
from megatrain.forecast import cache as forecast_cache
from megatrain.forecast import measure, simulate
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.profile import Profile
from megatrain.forecast.workload import Workload
from megatrain.loss import DPO
from megatrain.machine import machine_for
from megatrain.model.probe import spec
from megatrain.plan.planner import make_plan
from megatrain.source.source import open_source
from tests.inside import answering, sized
from tests.sweeps import few
from tests.unit.forecast_cases import (
    experts_config,
    experts_spec,
    small_machine,
    tiny_config,
    tiny_spec,
    wide_spec,
)

MIB = 2**20
FORECASTS = ForecastCache(tiny_spec(4))
FEW_LAYERS = ForecastCache(tiny_spec(2))
WORKLOAD = Workload(512, 64, None, True, "bf16", True)


def choose(device_mib, host_gib=1e6, **given):
    forecasts = given.pop("forecasts", FORECASTS)
    workload = replace(WORKLOAD, **given)
    return fastest(forecasts, small_machine(device_mib, host_gib), workload)


@cache
def least_mib(forecasts=FORECASTS):
    """Device memory that the most frugal way needs."""
    return least(forecasts, small_machine(1.0), WORKLOAD).machine.device_memory_bytes / MIB


def test_no_more_goes_to_a_disk_than_the_host_lacks(monkeypatch):
    """Moments first, then remainders, then weights; lanes count, and the disk's space holds."""
    sized(monkeypatch, disk, PIECE=4096)
    short = small_machine(1.1 * least_mib(FEW_LAYERS), host_gib=1.0)
    enough = replace(least(FEW_LAYERS, short, WORKLOAD).machine, disk_space_bytes=1 << 40)
    tiles = FEW_LAYERS.model(WORKLOAD).layouts
    moments = 8 * sum(each.trainable_numel for each in tiles)

    def spilled(lacking, machine):
        host = int(machine.host_memory_bytes - lacking / 0.95)
        found = fastest(FEW_LAYERS, replace(machine, host_memory_bytes=host), WORKLOAD)
        assert found.host_peak_bytes <= 0.95 * host
        there = found.placement
        return there.disk_moments, there.disk_remainder, there.disk_weights

    assert spilled(moments / 4, enough) == (1, 0, 0)
    count, *rest = spilled(1.1 * moments, enough)
    assert count == sum(each.trainable_numel > 0 for each in tiles)
    assert rest[0] > 0 and not rest[1]
    *before, weights = spilled(1.3 * moments, enough)
    assert before == [count, count] and weights > 0
    with pytest.raises(DoesNotFit, match="of host memory"):
        spilled(moments / 4, replace(enough, disk_space_bytes=moments // 5))
    assert could_fit(FEW_LAYERS, enough, WORKLOAD)


def test_budgets_are_never_exceeded_and_more_memory_is_never_slower():
    budgets = [least_mib(FEW_LAYERS) * times for times in (1.0, 1.4, 2.0, 8.0)]
    found = [choose(budget, forecasts=FEW_LAYERS) for budget in budgets]
    for budget, forecast in zip(budgets, found, strict=True):
        assert forecast.device_peak_bytes <= budget * 2**20
    seconds = [forecast.seconds for forecast in found]
    assert all(b <= a * 1.02 for a, b in pairwise(seconds))
    assert seconds[-1] < 0.8 * seconds[0]


def test_with_much_memory_nothing_is_recomputed_and_no_update_waited_for():
    found = choose(1e4)
    assert found.placement.save_activations == found.placement.save_all == 4
    assert found.seconds == pytest.approx(found.bounds["compute"], rel=0.01)


STEP = replace(WORKLOAD, tokens_per_step=16384, micro_batch=8)  # 32 micro-batches


def test_a_step_is_taken_in_passes_where_all_its_graphs_do_not_fit():
    machine = small_machine(110)
    found = fastest(FORECASTS, machine, STEP)
    assert found.placement.passes > 1 and found.device_peak_bytes <= machine.device_memory_bytes
    joint = fastest(FORECASTS, machine, replace(STEP, loss=DPO()))  # sees all tokens at once
    assert joint.placement.passes == 1 and found.seconds < 0.97 * joint.seconds


def test_weights_stay_where_the_bus_is_slow():
    machine = small_machine(60)
    slow = replace(machine, to_device_gbps=0.1 * machine.to_device_gbps)
    found = fastest(FORECASTS, slow, STEP)
    assert found.placement.passes > 1 and found.placement.keep_weights == 5
    assert found.binds == "compute" and found.device_peak_bytes <= 0.95 * 60 * 2**20


def test_what_does_not_fit_is_refused_with_the_least_that_would():
    for budget in (0.5, 0.97 * least_mib()):
        with pytest.raises(
            DoesNotFit, match=r"of device memory are missing \([^ ]* MiB would do, .* allowed"
        ):
            choose(budget)
    with pytest.raises(DoesNotFit, match=r"host memory are missing \(2.[23] GiB would do, 11 MiB"):
        choose(1e4, host_gib=0.01, forecasts=FEW_LAYERS)
    with pytest.raises(
        DoesNotFit, match=r"of device memory are .* and .* of host memory are .*\(2.[23] GiB would"
    ):
        choose(0.5, host_gib=0.01, forecasts=FEW_LAYERS)


def test_micro_batches_are_even_and_a_given_one_is_kept():
    assert choose(1e4, tokens_per_step=64 * 9, forecasts=FEW_LAYERS).micro_batch == 9
    assert choose(1e4, micro_batch=3, forecasts=FEW_LAYERS).micro_batch == 3
    sizes = candidates.sizes_of(WORKLOAD)
    assert sizes == [8, 4, 2, 1]  # of short rows, too
    workload = Workload(96 * 1024, 1024, None, True, "bf16", True)
    sizes = candidates.sizes_of(workload)
    assert sizes == [48, 32, 16, 8, 4, 2, 1]


@cache
def by_hand():
    """Forecasts of placements that somebody might write."""
    names = [t.name for t in FORECASTS.model(Workload()).layouts if t.name != "unused"]
    every = product([8, 4], [0, 3], [(0, 0), (4, 0), (0, 4)])
    return [
        FORECASTS.of(
            small_machine(),
            Placement(
                slots=3,
                compile=True,
                resident=tuple(names[:count]),
                save_activations=keep,
                offload_activations=offload,
            ),
            WORKLOAD,
            rows,
        )
        for rows, count, (keep, offload) in every
    ]


@cache
def just_mib():
    """Host memory that is enough where nothing rests on the device and nothing is kept."""
    plain = Placement(slots=3, compile=True)
    found = FORECASTS.of(small_machine(), plain, WORKLOAD, 8)
    return found.host_peak_bytes / 0.95 / 2**20


# Device memory beside the least that there can be, and host memory beside `just_mib()`. Where the
# host lacks some, the embedding and a layer rest on the device: 14 MiB.
@pytest.mark.parametrize("spare_mib, more_mib", [(28.3, 1e6), (5.3, 1e6), (28.3, -10.0)])
def test_no_hand_made_placement_in_the_budget_is_much_faster(spare_mib, more_mib):
    device_mib, host_mib = least_mib() + spare_mib, just_mib() + more_mib
    best = choose(device_mib, host_mib / 1024)
    fitting = [
        other
        for other in by_hand()
        if other.device_peak_bytes <= 0.95 * device_mib * MIB
        and other.host_peak_bytes <= 0.95 * host_mib * MIB
    ]
    other = min(fitting, key=lambda each: each.seconds)
    assert best.seconds <= other.seconds * 1.05, (other.placement, other.micro_batch)


def fast_bus(device_mib, host_gib):
    machine = small_machine(device_mib, host_gib)
    return replace(machine, to_device_gbps=50.0, from_device_gbps=50.0)


def test_host_memory_is_spent_on_graphs_where_the_device_has_no_room():
    def with_host(mib):
        machine, workload = fast_bus(16.0, mib / 1024), replace(WORKLOAD, micro_batch=2)
        return fastest(FORECASTS, machine, workload)

    much, little = with_host(1e6), with_host(just_mib() + 5)
    assert much.placement.offload_activations >= 3
    assert much.host_bytes["host_kept_bytes"] > 0
    plain = replace(much.placement, offload_activations=0)
    assert much.seconds < 0.99 * FORECASTS.of(fast_bus(16.0, 1e6), plain, WORKLOAD, 2).seconds
    assert little.placement.offload_activations < much.placement.offload_activations


@pytest.fixture
def soon_long(monkeypatch):
    sized(monkeypatch, candidates, _LONG=1024, _TILE=128)


def long_row(device_mib, attention_tflops, host_gib=1e6):
    machine = replace(
        fast_bus(device_mib, host_gib),
        attention_forward_tflops=attention_tflops,
        attention_backward_tflops=attention_tflops,
    )
    return fastest(FEW_LAYERS, machine, Workload(2048, 2048))


def test_a_long_row_runs_in_tiles_where_attention_is_most_of_it(soon_long):
    slow = long_row(40.0, 0.02).placement
    assert slow.chunk_tokens == 128 and slow.save_attention != "none"
    assert long_row(40.0, 20.0).placement.chunk_tokens is None


def test_a_long_row_runs_in_tiles_where_it_fits_no_other_way(soon_long, monkeypatch):
    workload = Workload(2048, 2048, None, True, "bf16", True)
    needed = least(FEW_LAYERS, fast_bus(1.0, 1e6), workload).machine
    budget = needed.device_memory_bytes / 2**20
    assert long_row(budget, 20.0).placement.chunk_tokens == 128
    sized(monkeypatch, candidates, _LONG=1 << 20)
    with pytest.raises(DoesNotFit):
        long_row(budget, 20.0)


@pytest.fixture
def a_small_process(monkeypatch):
    """Beside its gigabytes a tiny model's bytes would not count."""
    sized(monkeypatch, simulate, PROCESS_BYTES=20 * MIB, _EARLY_PROCESS_BYTES=10 * MIB)


def machine(device_mib, host_mib):
    return small_machine(device_mib, host_mib / 1024)


@cache
def small_forecasts(model):
    """Made while a process counts as small."""
    return ForecastCache(model())


def few_layers():
    return tiny_spec(3)


def checked(forecasts, there, workload):
    """The machine with the least memory, tried out."""
    assert not could_fit(forecasts, there, workload)
    needed = least(forecasts, there, workload)
    enough = needed.machine
    ample = replace(
        enough,
        device_memory_bytes=int(1.1 * enough.device_memory_bytes),
        host_memory_bytes=int(1.1 * enough.host_memory_bytes),
    )
    assert could_fit(forecasts, ample, workload)
    for found in (needed, fastest(forecasts, enough, workload)):
        assert found.device_peak_bytes <= 0.95 * enough.device_memory_bytes
        assert found.host_peak_bytes <= 0.95 * enough.host_memory_bytes
    for kind in ("device_memory_bytes", "host_memory_bytes"):
        size = getattr(enough, kind)
        if size > getattr(there, kind):
            with pytest.raises(DoesNotFit):
                fastest(forecasts, replace(enough, **{kind: int(0.97 * size)}), workload)
    return enough


PLENTY = 1e6
# Device and host memory in MiB, which of it is too little, the model, the workload.
LEAST = {
    "host": (24, 30, "host", few_layers, WORKLOAD),
    "device": (4, PLENTY, "device", few_layers, WORKLOAD),
    "device, host for boundaries that wait on it": (4, 72, "device", few_layers, WORKLOAD),
    "both": (4, 30, "device and host", few_layers, WORKLOAD),
    "no clipping": (24, 30, "host", few_layers, replace(WORKLOAD, clip=False)),
    "micro-batch, device": (8, PLENTY, "device", few_layers, replace(WORKLOAD, micro_batch=8)),
    "a large head, device": (10, PLENTY, "device", wide_spec, WORKLOAD),
    "host, a device for half of it": (50, 20, "host", few_layers, WORKLOAD),
    "host, a device for all": (PLENTY, 10, "host", few_layers, WORKLOAD),
    "fp32": (50, 30, "host", few_layers, replace(WORKLOAD, precision="fp32")),
}


@pytest.mark.parametrize("name", few([*LEAST], 2, 3, 5, 6))
def test_the_least_is_enough_and_no_less_is(name, a_small_process):
    device, host, short, model, workload = LEAST[name]
    there = machine(device, host)
    enough = checked(small_forecasts(model), there, workload)
    assert (enough.device_memory_bytes > there.device_memory_bytes) == ("device" in short)
    assert (enough.host_memory_bytes > there.host_memory_bytes) == ("host" in short)


def test_no_larger_device_is_asked_for_than_there_are(a_small_process, monkeypatch):
    """But for more of both, where boundaries on the device would do if there were such a one."""
    many = replace(WORKLOAD, tokens_per_step=32_768)

    def asked():
        found = least(small_forecasts(few_layers), machine(16, 60), many).machine
        return found.device_memory_bytes / MIB, found.host_memory_bytes / MIB

    device, host = asked()
    assert device > 64 and host == 60
    answering(monkeypatch, search, most_memory=64 * MIB)
    device, host = asked()
    assert 16 < device < 64 and host > 60


@pytest.mark.parametrize("spilled", [(3, 0), (8, 2)])
def test_what_tiles_spare_the_host_is_what_a_forecast_says(spilled):
    """What a tile has on a disk spares the host nothing, and others may go there in its place."""
    forecasts, there = ForecastCache(tiny_spec()), machine(PLENTY, PLENTY)
    moments, remainder = spilled
    placement = Placement(compile=True, disk_moments=moments, disk_remainder=remainder)
    tiles = candidates.FirstTiles(forecasts.model(WORKLOAD).layouts, WORKLOAD, placement)

    def on_host(count):
        resident = replace(placement, resident=tiles.names(count))
        parts = forecasts.of(there, resident, WORKLOAD, 8, steps=1).host_parts
        return sum(parts[part] for part in ("weights", "remainder", "moments", "gradients"))

    for count in (1, 7):
        assert on_host(0) - on_host(count) == tiles.spared(count)


# What a plan costs: counted in layers that are recorded and steps that are followed.

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
    measured = Profile(model, Workload(sequence_length=16))
    recorded = Counted(monkeypatch, measure, "traced")
    for rows in (6, 4):
        measured.layer(0, rows)
    for rows in (2, 40):
        follows = measured.layer(0, rows)
        assert recorded.calls == 2
        assert follows == Profile(model, Workload(sequence_length=16)).layer(0, rows)
        recorded.calls = 2


def test_a_plan_follows_few_steps(monkeypatch):
    """Four layers of 7B, some of which rest on the device or keep graphs; passes are tried."""
    forecasts = ForecastCache(spec(open_source(qwen2_config("7b", layers=4)).model))
    machine = machine_for("H200", 60 * GIB, 16, 48 * GIB)
    recorded = Counted(monkeypatch, measure, "traced")
    followed = Counted(monkeypatch, simulate, "train_step")
    found = fastest(forecasts, machine, Workload(98304, 1024))
    assert found.placement.resident and found.placement.save_all and found.placement.passes > 1
    assert recorded.calls == 2  # for micro-batches of 48, 32, 16, and 8 rows
    assert followed.calls <= 26  # in 15 forecasts


def test_a_refusal_and_its_remedies_follow_few_steps(monkeypatch):
    """Of 25,000 micro-batches, beside a disk: what is certain tells whether a change is enough."""
    machine = replace(small_machine(64, host_gib=3), disk_space_bytes=GIB)
    followed = Counted(monkeypatch, simulate, "train_step")
    passed = Counted(monkeypatch, simulate.ClockDevice, "_pass_time")
    counted = Counted(monkeypatch, forecast_cache, "needs_of")
    plan = make_plan(tiny_spec(6), machine, Workload(25_000 * 64, 64, micro_batch=1))
    assert not plan.fits and len(plan.remedies) == 3
    assert followed.calls <= 23 and passed.calls <= 2500
    assert counted.calls <= 35


def test_ranks_own_experts_where_their_link_is_slow_and_tokens_are_few():
    """Nothing of experts is gathered then; tokens take the link instead."""
    cache, whole = ForecastCache(experts_spec()), Workload(128, 64, compile=False)
    slow = small_machine().shared(2, 1e-3)
    many = replace(whole, tokens_per_step=1 << 16)
    for workload, owned in (
        (whole.shared(2), True),
        (many.shared(2), False),
        (whole.shared(2, 2), False),
        (replace(whole, sequence_ranks=2).shared(2), False),
        (replace(whole, rule=Muon()).shared(2), False),
    ):
        best = fastest(cache, slow, workload, thorough=False)
        assert best.placement.own_experts is owned
        assert workload.may_own or not owned
    assert not replace(whole, sequence_ranks=2).shared(2).may_own
    dense = fastest(ForecastCache(tiny_spec()), slow, whole.shared(2), thorough=False)
    assert not dense.placement.own_experts
