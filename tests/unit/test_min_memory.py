"""The least memory that is told: it is enough, and with 3 % less nothing fits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest

from megatrain.autoplace import candidates, min_memory
from megatrain.autoplace.first_tiles import FirstTiles
from megatrain.autoplace.search import Search
from megatrain.errors import DoesNotFit
from megatrain.forecast import simulate
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.machine import Machine
from megatrain.model.spec import ModelSpec
from megatrain.placement import Placement
from tests.sweeps import quick, swept
from tests.unit.forecast_cases import experts_spec, small_machine, tiny_spec, wide_spec

MIB = 2**20
WORKLOAD = Workload(512, 64, None, True, "bf16", True)
PLENTY = 1e6


@pytest.fixture(autouse=True)
def a_small_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its gigabytes a tiny model's bytes would not count."""
    monkeypatch.setattr(simulate, "PROCESS_BYTES", 20 * MIB)
    monkeypatch.setattr(simulate, "_EARLY_PROCESS_BYTES", 10 * MIB)


def machine(device_mib: float, host_mib: float) -> Machine:
    return small_machine(device_mib, host_mib / 1024)


@cache
def forecasts_of(model: Callable[[], ModelSpec]) -> ForecastCache:
    return ForecastCache(model())


def few_layers() -> ModelSpec:
    return tiny_spec(3)


def checked(forecasts: ForecastCache, there: Machine, workload: Workload) -> Machine:
    """The machine with the least memory, tried out."""

    def search(on: Machine) -> Search:
        return Search(forecasts, on, workload)

    assert not search(there).could_fit()
    told = search(there).least()
    enough = told.machine
    assert search(enough).could_fit()
    for found in (told, search(enough).best()):
        assert found.device_peak_bytes <= 0.95 * enough.device_memory_bytes
        assert found.host_peak_bytes <= 0.95 * enough.host_memory_bytes
    for kind in ("device_memory_bytes", "host_memory_bytes"):
        least = getattr(enough, kind)
        if least > getattr(there, kind):
            with pytest.raises(DoesNotFit):
                search(replace(enough, **{kind: int(0.97 * least)})).best()
    return enough


@dataclass(frozen=True)
class Case:
    """Memory in MiB, which of it is too little, and what differs from the usual workload."""

    device: float
    host: float
    short: str
    model: Callable[[], ModelSpec] = few_layers
    workload: Workload = WORKLOAD


CASES = {
    "host": Case(24, 30, "host"),
    "host, a device for half of it": Case(50, 20, "host"),
    "host, a device for all": Case(PLENTY, 10, "host"),
    "device": Case(4, PLENTY, "device"),
    "device, host for boundaries that wait on the device": Case(4, 72, "device"),
    "both": Case(4, 30, "device and host"),
    "no clipping": Case(24, 30, "host", workload=replace(WORKLOAD, clip=False)),
    "no clipping, device": Case(4, PLENTY, "device", workload=replace(WORKLOAD, clip=False)),
    "fp32": Case(50, 30, "host", workload=replace(WORKLOAD, precision="fp32")),
    "micro-batch": Case(24, 30, "host", workload=replace(WORKLOAD, micro_batch=8)),
    "micro-batch, device": Case(8, PLENTY, "device", workload=replace(WORKLOAD, micro_batch=8)),
    "many micro-batches": Case(24, 30, "host", workload=replace(WORKLOAD, micro_batch=1)),
    "a large head": Case(30, 40, "host", wide_spec),
    "a large head, device": Case(10, PLENTY, "device", wide_spec),
}


MORE = (
    *("host, a device for all", "no clipping, device", "micro-batch", "many micro-batches"),
    *("a large head", "fp32", "host, a device for half of it"),
)


@pytest.mark.parametrize("name", quick(CASES, CASES.keys() - MORE))
def test_the_least_is_enough_and_no_less_is(name: str) -> None:
    case = CASES[name]
    there = machine(case.device, case.host)
    enough = checked(forecasts_of(case.model), there, case.workload)
    assert (enough.device_memory_bytes > there.device_memory_bytes) == ("device" in case.short)
    assert (enough.host_memory_bytes > there.host_memory_bytes) == ("host" in case.short)


def test_no_larger_device_is_asked_for_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for more of both, where boundaries on the device would do if there were such a one."""
    there, many = machine(16, 60), replace(WORKLOAD, tokens_per_step=32_768)

    def told() -> tuple[float, float]:
        found = Search(forecasts_of(few_layers), there, many).least().machine
        return found.device_memory_bytes / MIB, found.host_memory_bytes / MIB

    device, host = told()
    assert device > 64 and host == 60
    monkeypatch.setattr(min_memory, "most_memory", lambda: 64 * MIB)
    device, host = told()
    assert 16 < device < 64 and host > 60


def test_tiles_on_the_device_need_not_be_on_the_host() -> None:
    forecasts = forecasts_of(few_layers)

    def told(device_mib: float) -> Forecast:
        return Search(forecasts, machine(device_mib, 30), WORKLOAD).least()

    without, some, many = (told(device) for device in (12, 24, 50))
    assert not without.placement.resident
    assert some.placement.resident[:2] == ("embedding", "prologue")
    assert len(many.placement.resident) > len(some.placement.resident)
    hosts = [found.machine.host_memory_bytes for found in (without, some, many)]
    assert hosts[0] > 1.1 * hosts[1] > 1.1**2 * hosts[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("device", "host"), [(3, PLENTY), (50, 40)])
def test_layers_in_portions_are_counted_too(
    device: float, host: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "_SLICE_BYTES", 1)
    few = replace(WORKLOAD, tokens_per_step=128)
    checked(ForecastCache(experts_spec()), machine(device, host), few)


@pytest.mark.exhaustive
def test_long_rows_in_tiles_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_LONG", 1024)
    monkeypatch.setattr(candidates, "_TILE", 128)
    long = replace(WORKLOAD, tokens_per_step=2048, sequence_length=2048)
    forecasts = ForecastCache(tiny_spec(2))
    for device, host in ((8, PLENTY), (40, 30)):
        checked(forecasts, machine(device, host), long)


@pytest.mark.parametrize("spilled", [(0, 0), (3, 0), (8, 2), (8, 8)])
def test_what_tiles_spare_the_host_is_what_a_forecast_says(spilled: tuple[int, int]) -> None:
    """What a tile has on a disk spares the host nothing, and others may go there in its place."""
    forecasts, there = forecasts_of(tiny_spec), machine(PLENTY, PLENTY)
    moments, remainder = spilled
    placement = Placement(compile=True, disk_moments=moments, disk_remainder=remainder)
    tiles = FirstTiles(forecasts.model(WORKLOAD).layouts, WORKLOAD, placement)

    def on_host(count: int) -> int:
        resident = replace(placement, resident=tiles.names(count))
        found = forecasts.of(there, resident, WORKLOAD, 8, steps=1).host_parts
        return sum(found[part] for part in ("weights", "remainder", "moments", "gradients"))

    for count in (1, 4, 7):
        assert on_host(0) - on_host(count) == tiles.host_bytes(count)


@swept(together=0, model=[tiny_spec, wide_spec], split=[False, True], rows=[1, 3, 8])
def test_what_is_certain_is_most_of_what_a_forecast_has(
    model: Callable[[], ModelSpec], split: bool, rows: int
) -> None:
    """Told without a step: all of the host, and of the device what layers or the head take."""
    workload = replace(WORKLOAD, tokens_per_step=40 * 64)
    given = candidates.Candidates(forecasts_of(model), machine(PLENTY, PLENTY), workload)
    for candidate in [each for family in given.families(rows, split=split) for each in family]:
        (device, host), found = given.min_bytes(candidate, rows), given.of(candidate, rows)
        assert host == pytest.approx(found.host_peak_bytes, rel=2e-3)
        assert (0.7 if split else 0.9) < device / found.device_peak_bytes < 1.005
