"""Changes with which a run fits, alone and together, each planned anew, the cheapest first.

A remedy is another workload than the one asked for, or another machine, with a forecast that fits.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from megatrain.autoplace.search import could_fit, fastest, least
from megatrain.base.units import GIB, align, size
from megatrain.device.base import COMPUTE
from megatrain.errors import DoesNotFit
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.machine import Machine, machine_for
from megatrain.model.spec import ModelSpec
from megatrain.optim import AdamW
from megatrain.telemetry.gpu import by_driver_name, known_gpus

SHOWN = 3
_TRIED = 2  # full plans of likely remedies; one that does not fit takes long
_SHORTEST = 256  # tokens of a row

# Workloads that need less, from the mildest change on.
Change = Callable[[Workload], list[Workload]]
# Workloads that fit, on the machine of the forecast.
Fitting = Iterator[tuple[Workload, Forecast]]


class Planner:
    """Forecasts of one model, for chosen or given placements; none is computed twice.

    A machine's memory and disk space are the budgets.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._forecasts = ForecastCache(spec)

    def fitting(
        self, machine: Machine, workload: Workload, *, thorough: bool = True
    ) -> Forecast | None:
        """The fastest forecast that fits; None: none does. If not `thorough`, it stops early."""
        if not self.could_fit(machine, workload):
            return None
        if workload.placement is not None:
            return self._placed(machine, workload)
        with suppress(DoesNotFit):
            return fastest(self._forecasts, machine, workload.computed, thorough=thorough)
        return None

    def least(self, machine: Machine, workload: Workload) -> Forecast:
        """The forecast that lacks least memory, on a machine with that memory added."""
        if workload.placement is None:
            return least(self._forecasts, machine, workload.computed)
        forecast = self._placed(machine, workload)
        enough = replace(
            machine,
            device_memory_bytes=max(forecast.device_peak_bytes, machine.device_memory_bytes),
            host_memory_bytes=max(forecast.host_peak_bytes, machine.host_memory_bytes),
        )
        return replace(forecast, machine=enough)

    def could_fit(self, machine: Machine, workload: Workload) -> bool:
        """True if a placement likely fits; far quicker than to find the fastest one."""
        if workload.placement is None:
            return could_fit(self._forecasts, machine, workload.computed)
        return fits(self._placed(machine, workload), machine)

    def _placed(self, machine: Machine, workload: Workload) -> Forecast:
        assert workload.placement is not None
        rows = workload.usual_micro_batch
        return self._forecasts.of(machine, workload.placement, workload.computed, rows)


def fits(forecast: Forecast, machine: Machine) -> bool:
    """True if a step takes no more memory than the machine has."""
    return (
        forecast.device_peak_bytes <= machine.device_memory_bytes
        and forecast.host_peak_bytes <= machine.host_memory_bytes
    )


@dataclass(frozen=True)
class Remedy:
    """The workload `new` instead of the one `asked`, and the forecast of its step.

    Attributes:
        machine: the machine asked about; the forecast has the one that the remedy needs.
    """

    asked: Workload
    machine: Machine
    new: Workload
    forecast: Forecast

    @property
    def text(self) -> str:
        """The changes in words."""
        *words, last = [words for words, _ in self._changes()]
        return f"{', '.join(words)} and {last}" if words else last

    @property
    def settings(self) -> dict[str, Any]:
        """The changes as keys and values of a run file; empty for another GPU."""
        return {key: v for _, settings in self._changes() for key, v in settings.items()}

    @property
    def price(self) -> tuple[bool, int, int]:
        """The hardware to add, dearest first, for sorting: another GPU, its memory, the host's."""
        taken = self.forecast.machine
        other = taken.name != self.machine.name
        return other, taken.device_memory_bytes, taken.host_memory_bytes

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
        forecast = self.forecast
        return {
            "text": self.text,
            "settings": self.settings,
            "seconds": forecast.seconds,
            "tokens_per_second": forecast.tokens_per_second,
            "device_peak_bytes": forecast.device_peak_bytes,
            "host_peak_bytes": forecast.host_peak_bytes,
        }

    def _changes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each change in words and in keys of a run file, cheapest first."""
        old, new, lines = self.asked, self.new, _lines(self.new)
        batch = {"training.batch_size": new.rows // lines}
        if old.micro_batch != new.micro_batch:
            rows = "one row" if new.micro_batch == 1 else f"{new.micro_batch} rows"
            free = "leave micro-batches to MegaTrain"
            words = free if new.micro_batch is None else f"take micro-batches of {rows}"
            size_of_run = new.micro_batch and new.micro_batch // lines
            yield words, {"training.micro_batch_size": size_of_run}
        if old.placement != new.placement:
            yield "leave the placement to MegaTrain", {"engine.placement": "auto"}
        if old.precision != new.precision:
            words = "compute in bf16 (masters and moments stay fp32)"
            yield words, {"engine.precision": new.precision}
        if old.tokens_per_step != new.tokens_per_step:
            yield f"take {new.tokens_per_step:,} tokens a step", batch
        if old.rule != new.rule:
            yield "keep AdamW's moments as 8-bit codes", {"optimizer.states": "int8"}
        if old.clip != new.clip:
            yield "do not clip gradients", {"training.max_grad_norm": None}
        if (length := new.sequence_length) != old.sequence_length:
            yield f"take sequences of {length:,} tokens", {"data.sequence_length": length} | batch
        yield from self._more_memory()

    def _more_memory(self) -> Iterator[tuple[str, dict[str, Any]]]:
        old, new = self.machine, self.forecast.machine
        device, host = size(new.device_memory_bytes), size(new.host_memory_bytes)
        use = "let it use "
        if new.name != old.name:
            yield f"take a larger GPU, {_gpu(new)} ({_sold(new) / GIB:.0f} GiB)", {}
        elif new.device_memory_bytes != old.device_memory_bytes:
            yield f"{use}{device} of device memory", {"engine.device_memory": device}
            use = ""
        if new.host_memory_bytes != old.host_memory_bytes:
            yield f"{use}{host} of host memory", {"engine.host_memory": host}


def remedies(
    plans: Planner,
    machine: Machine,
    asked: Workload,
    least: Forecast,
    *,
    must_clip: bool = False,
) -> list[Remedy]:
    """At most three remedies that fit, those with the least hardware first.

    Args:
        least: the forecast that lacks least memory, with that memory added.
        must_clip: clipping stays on, as the run refuses steps by their gradient norm.
    """
    changes = [change for change in _CHANGES if not (must_clip and change is _no_clipping)]
    fitting = islice(_fitting(plans, machine, asked, least, changes), SHOWN)
    listed = [Remedy(asked, machine, new, forecast) for new, forecast in fitting]
    return sorted(listed, key=lambda remedy: remedy.price)


def compute_bound_tokens(bounds: Mapping[str, float], tokens: int, sequence_length: int) -> int:
    """Tokens a step, in whole rows, from which on arithmetic takes longest.

    Computing grows with the tokens; copies of weights and updates do not.
    """
    others = max((seconds for name, seconds in bounds.items() if name != COMPUTE), default=0.0)
    needed = tokens * others / bounds[COMPUTE]
    return max(1, math.ceil(needed / sequence_length)) * sequence_length


def _fitting(
    plans: Planner,
    machine: Machine,
    asked: Workload,
    least: Forecast,
    changes: Sequence[Change],
) -> Fitting:
    """Workloads that fit: by one change, several together, more memory, or another GPU."""
    helpless = []
    for change in changes:
        if change is _to_auto and machine.unified:
            continue  # there is nothing to choose
        alone = [*_changed(plans, machine, asked, [change])]
        helpless += [] if alone else [change]
        yield from alone
    yield from _changed(plans, machine, asked, helpless)
    yield from _with_memory(machine, asked, least)
    yield from _on_a_larger_gpu(plans, machine, asked, least)


def _changed(
    plans: Planner, machine: Machine, asked: Workload, changes: Sequence[Change]
) -> Fitting:
    """The workload with the least of some changes that fits."""
    failed = [asked]

    def could(new: Workload) -> bool:
        return new not in failed and plans.could_fit(machine, new)

    while len(failed) <= _TRIED and (new := _mildest(could, asked, changes)) is not None:
        if (forecast := plans.fitting(machine, new, thorough=False)) is not None:
            yield new, forecast
            return
        failed.append(new)


def _mildest(
    could: Callable[[Workload], bool], asked: Workload, changes: Sequence[Change]
) -> Workload | None:
    """The workload with the least of some changes that fits; cheap changes go first.

    The dearest change is reduced first as far as it still fits, then the next one.
    """

    def could_with(level: Workload, cheaper: Sequence[Change]) -> bool:
        for change in cheaper:
            level = [level, *change(level)][-1]
        return could(level)

    if not changes or not could_with(asked, changes):
        return None
    for number in reversed(range(len(changes))):
        levels = [asked, *changes[number](asked)]  # the last fits, as do all after one that fits
        key = partial(could_with, cheaper=changes[:number])
        asked = levels[bisect_left(levels, True, hi=len(levels) - 1, key=key)]
    return asked


def _room(machine: Machine, needed: Machine) -> tuple[int, int]:
    """Bytes of device and host: as they are, or a little more than the forecast needs."""
    device, host = needed.device_memory_bytes, needed.host_memory_bytes
    return (
        device if device == machine.device_memory_bytes else align(10 * device, GIB) // 10,
        host if host == machine.host_memory_bytes else align(host, GIB),
    )


def _with_memory(machine: Machine, asked: Workload, least: Forecast) -> Fitting:
    """The workload with the memory of `least`; empty if no such card has so much."""
    device, host = _room(machine, least.machine)
    if device <= max(machine.device_memory_bytes, _sold(machine)):
        larger = replace(machine, device_memory_bytes=device, host_memory_bytes=host)
        yield asked, replace(least, machine=larger)


def _gpu(machine: Machine) -> str:
    return machine.name.partition(",")[0]


def _sold(machine: Machine) -> float:
    """Most bytes with which this GPU is sold; an unknown GPU may have any number."""
    gpu = by_driver_name(_gpu(machine))
    return math.inf if gpu is None else gpu.memory_gib * GIB


def _on_a_larger_gpu(plans: Planner, machine: Machine, asked: Workload, least: Forecast) -> Fitting:
    """The smallest GPU with which the run fits; planes may rest there instead of on the host."""
    device, host = _room(machine, least.machine)
    if device == machine.device_memory_bytes:
        lacking = least.machine.host_memory_bytes - machine.host_memory_bytes
        device, host = device + lacking, machine.host_memory_bytes
    fastest = {gpu.memory_gib: gpu for gpu in sorted(known_gpus(), key=lambda gpu: gpu.bf16_tflops)}
    for _, gpu in () if machine.unified else sorted(fastest.items()):
        other = machine_for(gpu.name, host, machine.cores, precision=asked.precision)
        if other.device_memory_bytes < device:
            continue
        if (forecast := plans.fitting(other, asked, thorough=False)) is not None:
            yield asked, forecast
            return


def _to_auto(asked: Workload) -> list[Workload]:
    free = [replace(asked, placement=None), replace(asked, placement=None, micro_batch=None)]
    return [workload for workload in free if workload != asked]


def _lines(workload: Workload) -> int:
    """Rows of tokens for one row of the data: two for a pair of replies."""
    return getattr(workload.loss, "lines", 1)


def _one_row(asked: Workload) -> list[Workload]:
    large = asked.placement is not None and asked.micro_batch not in (None, _lines(asked))
    return [replace(asked, micro_batch=_lines(asked))] if large else []


def _bf16(asked: Workload) -> list[Workload]:
    return [replace(asked, precision="bf16")] if asked.precision == "fp32" else []


def _fewer_tokens(asked: Workload) -> list[Workload]:
    return [
        replace(
            asked,
            tokens_per_step=rows * asked.sequence_length,
            micro_batch=None if asked.micro_batch is None else min(asked.micro_batch, rows),
        )
        for rows in (n * _lines(asked) for n in _halves(asked.rows // _lines(asked), 1))
    ]


def _int8_moments(asked: Workload) -> list[Workload]:
    if not isinstance(asked.rule, AdamW) or asked.rule.states == "int8":
        return []
    return [replace(asked, rule=replace(asked.rule, states="int8"))]


def _no_clipping(asked: Workload) -> list[Workload]:
    return [replace(asked, clip=False)] if asked.clip else []


def _shorter_rows(asked: Workload) -> list[Workload]:
    return [replace(asked, sequence_length=n) for n in _halves(asked.sequence_length, _SHORTEST)]


def _halves(most: int, least: int) -> Iterator[int]:
    while (most := most // 2) >= least:
        yield most


# From the cheapest to the dearest.
_CHANGES: tuple[Change, ...] = (
    *(_one_row, _to_auto, _bf16, _fewer_tokens, _int8_moments, _no_clipping, _shorter_rows),
)
