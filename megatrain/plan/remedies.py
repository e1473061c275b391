"""What would make a run fit: changes, alone and together, each planned anew, the cheapest first.

A remedy is another workload than the one asked for, or another machine, with a forecast that fits.
It costs what they differ in, from cheap to dear: smaller micro-batches, another placement, a lower
precision, fewer tokens a step, 8-bit moments, no clipping, shorter rows, host memory, device
memory, another GPU. Of two remedies the one that costs less of the dearest thing in which they
differ is the cheaper one.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

from megatrain.base.units import GIB, align, size
from megatrain.device.base import COMPUTE
from megatrain.errors import DoesNotFit
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.machine import Machine, machine_for
from megatrain.optim import AdamW
from megatrain.telemetry.known_gpus import by_driver_name, known_gpus

SHOWN = 3
_TRIED = 2  # what likely fits is planned in full so often, which takes long where it does not
_SHORTEST = 256  # tokens of a row


class Plans(Protocol):
    """Forecasts of one model. A machine's memory and disk space are the budgets."""

    def once(self, machine: Machine, workload: Workload, *, thorough: bool = True) -> Forecast:
        """The fastest; raises DoesNotFit. Not `thorough`, a search stops early."""

    def least(self, machine: Machine, workload: Workload) -> Forecast:
        """What lacks least, on the machine with the memory that it lacks besides."""

    def could_fit(self, machine: Machine, workload: Workload) -> bool:
        """Whether there likely is any way; far quicker to tell than the fastest one."""


class _Difference(NamedTuple):
    """The difference of two workloads: how much, in words, and in keys of a run file."""

    amount: int
    words: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Remedy:
    """The workload `new` instead of the one `asked`, and what a step is then like.

    Attributes:
        there: the machine asked about; the forecast's is the one that the remedy takes.
    """

    asked: Workload
    there: Machine
    new: Workload
    forecast: Forecast

    @property
    def text(self) -> str:
        """What to do, in words."""
        *words, last = [each.words for each in self._differences if each.amount]
        return f"{', '.join(words)} and {last}" if words else last

    @property
    def settings(self) -> dict[str, Any]:
        """The remedy as keys and values of a run file; another GPU has none."""
        changed = [each.settings for each in self._differences if each.amount]
        return {key: value for settings in changed for key, value in settings.items()}

    @property
    def cost(self) -> tuple[int, ...]:
        """How much of everything, the dearest first."""
        *choices, gpu, device, host = (each.amount for each in self._differences)
        return gpu, device, host, *reversed(choices)

    def spares(self, other: "Remedy") -> bool:
        """Whether it costs no more than another one of anything."""
        return all(mine <= its for mine, its in zip(self.cost, other.cost, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        told = self.forecast
        return {
            "text": self.text,
            "settings": self.settings,
            "seconds": told.seconds,
            "tokens_per_second": told.tokens_per_second,
            "device_peak_bytes": told.device_peak_bytes,
            "host_peak_bytes": told.host_peak_bytes,
        }

    @property
    def _differences(self) -> list[_Difference]:
        old, new = self.asked, self.new
        rows, batch = new.micro_batch, new.tokens_per_step // new.sequence_length
        return [
            _Difference(
                (old.micro_batch or 0) - (rows or 0),
                f"take micro-batches of {'one row' if rows == 1 else f'{rows} rows'}"
                if rows
                else "leave micro-batches to MegaTrain",
                {"training.micro_batch_size": rows},
            ),
            _Difference(
                old.placement != new.placement,
                "leave the placement to MegaTrain",
                {"engine.placement": "auto"},
            ),
            _Difference(
                old.precision != new.precision,
                "compute in bf16 (masters and moments stay fp32)",
                {"engine.precision": new.precision},
            ),
            _Difference(
                old.tokens_per_step - new.tokens_per_step,
                f"take {new.tokens_per_step:,} tokens a step",
                {"training.batch_size": batch},
            ),
            _Difference(
                old.rule != new.rule,
                "keep AdamW's moments as 8-bit codes",
                {"optimizer.states": "int8"},
            ),
            _Difference(
                old.clip - new.clip, "do not clip gradients", {"training.max_grad_norm": None}
            ),
            _Difference(
                old.sequence_length - new.sequence_length,
                f"take sequences of {new.sequence_length:,} tokens",
                {"data.sequence_length": new.sequence_length, "training.batch_size": batch},
            ),
            *_more_memory(self.there, self.forecast.machine),
        ]


def _more_memory(old: Machine, new: Machine) -> list[_Difference]:
    """Differences in memory: of another GPU, of the same GPU, of the host."""
    device, host = size(new.device_memory_bytes), size(new.host_memory_bytes)
    more = new.device_memory_bytes - old.device_memory_bytes
    gpu, other = new.name.partition(",")[0], new.name != old.name
    use = "let it use " if other or not more else ""
    return [
        _Difference(more * other, f"take a larger GPU, {gpu} ({_sold(new) / GIB:.0f} GiB)", {}),
        _Difference(
            more * (not other),
            f"let it use {device} of device memory",
            {"engine.device_memory": device},
        ),
        _Difference(
            new.host_memory_bytes - old.host_memory_bytes,
            f"{use}{host} of host memory",
            {"engine.host_memory": host},
        ),
    ]


@dataclass(frozen=True)
class Shortage:
    """The least memory with which it would fit, all else as asked.

    Attributes:
        forecast: with just that memory.
        device_bytes, host_bytes: what is missing; 0: enough.
    """

    forecast: Forecast
    device_bytes: int
    host_bytes: int


def shortage(plans: Plans, there: Machine, asked: Workload) -> Shortage:
    """What is missing. Called when `asked` does not fit."""
    least = plans.least(there, asked)
    return Shortage(
        least,
        least.machine.device_memory_bytes - there.device_memory_bytes,
        least.machine.host_memory_bytes - there.host_memory_bytes,
    )


def remedies(plans: Plans, there: Machine, asked: Workload, short: Shortage) -> list[Remedy]:
    """Three that fit, or as many as were found; none costs more than another one of everything."""
    found: list[Remedy] = []
    for new, told in _fitting(plans, there, asked, short):
        remedy = Remedy(asked, there, new, told)
        found += [] if any(other.spares(remedy) for other in found) else [remedy]
        if len(found) == SHOWN:
            break
    return sorted(found, key=lambda remedy: remedy.cost)


def fitting(
    plans: Plans, there: Machine, asked: Workload, *, thorough: bool = True
) -> Forecast | None:
    """The fastest forecast of a workload; None: it does not fit."""
    with suppress(DoesNotFit):
        if plans.could_fit(there, asked):
            return plans.once(there, asked, thorough=thorough)
    return None


def compute_bound_tokens(bounds: Mapping[str, float], tokens: int, sequence_length: int) -> int:
    """Tokens a step, in whole rows, from which on arithmetic takes longer than anything else.

    Computing grows with the tokens; copies of weights and updates do not.
    """
    others = max((seconds for name, seconds in bounds.items() if name != COMPUTE), default=0.0)
    needed = tokens * others / bounds[COMPUTE]
    return max(1, math.ceil(needed / sequence_length)) * sequence_length


Found = Iterator[tuple[Workload, Forecast]]  # whose machine is the one where it fits
Choice = Callable[[Workload], list[Workload]]  # what else could be, from the mildest change on


def _fitting(plans: Plans, there: Machine, asked: Workload, short: Shortage) -> Found:
    """What fits: by one choice, by several that do not do alone, by memory, by both."""
    helpless = []
    for choice in filter(lambda choice: choice(asked), _CHOICES):
        if choice is _auto_placement and there.unified:
            continue  # there is nothing to choose
        alone = [*_first(plans, _likely(plans, there, asked, [choice]))]
        helpless += [] if alone else [choice]
        yield from alone
    yield from _first(plans, _likely(plans, there, asked, helpless))
    yield from _with_memory(there, asked, short.forecast)
    larger = _first(plans, ((gpu, asked) for gpu in _larger_gpus(there, asked, short)))
    if short.device_bytes:
        yield from larger
    yield from _less_memory(plans, there, asked, short, helpless)
    yield from larger


def _first(plans: Plans, tried: Iterable[tuple[Machine, Workload]]) -> Found:
    """The first that fits."""
    for machine, new in tried:
        if (told := fitting(plans, machine, new, thorough=False)) is not None:
            yield new, told
            return


def _likely(
    plans: Plans, there: Machine, asked: Workload, choices: Sequence[Choice]
) -> Iterator[tuple[Machine, Workload]]:
    """As little as likely does of some choices; and in case that it does not, a little more."""
    failed = [asked]

    def could_fit(each: Workload) -> bool:
        return each not in failed and plans.could_fit(there, each)

    while len(failed) <= _TRIED and (new := _mildest(could_fit, asked, choices)) is not None:
        yield there, new
        failed.append(new)


def _mildest(
    fits: Callable[[Workload], bool], asked: Workload, choices: Sequence[Choice]
) -> Workload | None:
    """As little as fits of some choices, of which the cheapest comes first.

    The dearest is made only as far as all others do not do; then the next one.
    """

    def could(each: Workload, others: Sequence[Choice]) -> bool:
        return fits(reduce(lambda so_far, choice: _levels(so_far, choice)[-1], others, each))

    known = False  # whether all choices together do
    for number in reversed(range(len(choices))):
        levels, others = _levels(asked, choices[number]), partial(could, others=choices[:number])
        if not others(asked):
            if not known and not others(levels[-1]):
                return None
            # The last fits, and what fits is followed by what fits.
            asked = levels[bisect_left(levels, True, lo=1, hi=len(levels) - 1, key=others)]
        known = True
    return asked if known else None


def _levels(asked: Workload, choice: Choice) -> list[Workload]:
    return [asked, *choice(asked)]


def _less_memory(
    plans: Plans, there: Machine, asked: Workload, short: Shortage, choices: Sequence[Choice]
) -> Found:
    """Choices with which less memory is missing, each made besides those before it.

    Tokens are at least so many that arithmetic binds. Shorter rows are left out: they spare what
    smaller micro-batches do. As many rows are taken at once as by what lacks least without, which
    is soon searched.
    """
    first = short.forecast
    least = _room(there, first.machine)
    bound = compute_bound_tokens(first.bounds, first.tokens_per_step, first.sequence_length)
    enough = min(bound, asked.tokens_per_step)
    searched = asked.placement is None
    for choice in choices:
        new = [each for each in _levels(asked, choice) if each.tokens_per_step >= enough][-1]
        if new == asked or choice is _shorter_rows:
            continue
        told = plans.least(
            there, replace(new, micro_batch=min(first.micro_batch, new.rows)) if searched else new
        )
        if _room(there, told.machine) < least:
            asked, least = new, _room(there, told.machine)
            yield from _with_memory(there, asked, told)


def _room(there: Machine, needed: Machine) -> tuple[int, int]:
    """Bytes of the device and of the host, as they are or a little more than is needed."""
    device, host = needed.device_memory_bytes, needed.host_memory_bytes
    return (
        device if device == there.device_memory_bytes else align(10 * device, GIB) // 10,
        host if host == there.host_memory_bytes else align(host, GIB),
    )


def _with_memory(there: Machine, asked: Workload, least: Forecast) -> Found:
    """The workload with the memory of `least`; nothing if no such card has so much."""
    device, host = _room(there, least.machine)
    if device <= max(there.device_memory_bytes, _sold(there)):
        there = replace(there, device_memory_bytes=device, host_memory_bytes=host)
        yield asked, replace(least, machine=there)


def _sold(machine: Machine) -> float:
    """Bytes of the GPU as it is sold; of one that is not known, any number."""
    gpu = by_driver_name(machine.name.partition(",")[0])
    return math.inf if gpu is None else gpu.memory_gib * GIB


def _larger_gpus(there: Machine, asked: Workload, short: Shortage) -> Iterator[Machine]:
    """From the smallest that may do; what the host has no room for may rest on it."""
    device, host = _room(there, short.forecast.machine)
    if not short.device_bytes:
        device, host = device + short.host_bytes, there.host_memory_bytes
    fastest = {gpu.memory_gib: gpu for gpu in sorted(known_gpus(), key=lambda gpu: gpu.bf16_tflops)}
    for _, gpu in () if there.unified else sorted(fastest.items()):
        other = machine_for(gpu.name, host, there.cores, precision=asked.precision)
        if other.device_memory_bytes >= device:
            yield other


def _auto_placement(asked: Workload) -> list[Workload]:
    free = [replace(asked, placement=None), replace(asked, placement=None, micro_batch=None)]
    return [each for each in free if each != asked]


def _one_row(asked: Workload) -> list[Workload]:
    given = asked.placement is not None and asked.micro_batch not in (None, 1)
    return [replace(asked, micro_batch=1)] if given else []


def _bf16(asked: Workload) -> list[Workload]:
    return [replace(asked, precision="bf16")] if asked.precision == "fp32" else []


def _fewer_tokens(asked: Workload) -> list[Workload]:
    return [
        replace(
            asked,
            tokens_per_step=rows * asked.sequence_length,
            micro_batch=None if asked.micro_batch is None else min(asked.micro_batch, rows),
        )
        for rows in _halves(asked.tokens_per_step // asked.sequence_length, 1)
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
_CHOICES: tuple[Choice, ...] = (
    _one_row, _auto_placement, _bf16, _fewer_tokens, _int8_moments, _no_clipping, _shorter_rows,
)  # fmt: skip
