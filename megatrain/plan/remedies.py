"""What would make a run fit: changes, each of them planned anew, the cheapest first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from megatrain.engine.forecast import Forecast
from megatrain.errors import DoesNotFit, InputError
from megatrain.machine import Machine, machine_for
from megatrain.plan.ask import Ask, Plans
from megatrain.telemetry.known_gpus import by_driver_name, known_gpus
from megatrain.units import GIB, align, size

SHOWN = 3
_SHORTEST = 256  # tokens of a row

# What a remedy costs, in this order: nothing, tokens a step, what is trained, money.
FREE, SLOWER, OTHER_TRAINING, HARDWARE = range(4)


@dataclass(frozen=True)
class Remedy:
    """A change with which it fits, and what it would then be like."""

    text: str
    cost: int
    forecast: Forecast

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        told = self.forecast
        return {
            "text": self.text,
            "seconds": told.seconds,
            "tokens_per_second": told.tokens_per_second,
            "device_peak_bytes": told.device_peak_bytes,
            "host_peak_bytes": told.host_peak_bytes,
        }


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


def shortage(plans: Plans, ask: Ask) -> Shortage:
    """What is missing. Called when `ask` does not fit."""
    least, there = plans.least(ask), ask.machine
    return Shortage(
        least,
        least.machine.device_memory_bytes - there.device_memory_bytes,
        least.machine.host_memory_bytes - there.host_memory_bytes,
    )


def remedies(plans: Plans, ask: Ask, short: Shortage) -> list[Remedy]:
    """The three cheapest that were found to fit."""
    found: list[Remedy] = []
    for cost, look in _LOOKS:
        if len(found) >= SHOWN:
            break
        new = [
            Remedy(text, cost, told)
            for text, changed in look(plans, ask, short)
            if (told := _planned(plans, changed)) is not None
        ]
        found += sorted(new, key=lambda remedy: -remedy.forecast.tokens_per_second)
    return found[:SHOWN]


def fitting(plans: Plans, ask: Ask, *, thorough: bool = True) -> Forecast | None:
    """The forecast; None if it does not fit."""
    if not plans.could_fit(ask):
        return None
    try:
        return plans.once(ask, thorough=thorough)
    except DoesNotFit:
        return None


def _planned(plans: Plans, changed: Ask | Forecast) -> Forecast | None:
    return changed if isinstance(changed, Forecast) else fitting(plans, changed, thorough=False)


Changes = Iterator[tuple[str, Ask | Forecast]]


def _free(plans: Plans, ask: Ask, short: Shortage) -> Changes:
    chosen = ask.placement is not None and not ask.machine.unified
    if chosen:
        yield "leave the placement to MegaTrain (placement: auto)", replace(ask, placement=None)
    if ask.micro_batch is not None and ask.micro_batch > 1:
        yield "take micro-batches of one row", replace(ask, micro_batch=1)
        if chosen:
            auto = replace(ask, placement=None, micro_batch=None)
            yield "leave placement and micro-batch to MegaTrain (placement: auto)", auto
    if ask.precision == "fp32":
        text = "compute in bf16; masters and moments stay fp32 (precision: bf16)"
        yield text, replace(ask, precision="bf16")


def _fewer_tokens(plans: Plans, ask: Ask, short: Shortage) -> Changes:
    def with_rows(rows: int) -> Ask:
        micro_batch = None if ask.micro_batch is None else min(ask.micro_batch, rows)
        tokens = rows * ask.sequence_length
        return replace(ask, tokens_per_step=tokens, micro_batch=micro_batch)

    most = ask.tokens_per_step // ask.sequence_length
    rows = _halved(most, 1, lambda rows: plans.could_fit(with_rows(rows)))
    if rows is not None:
        yield f"take {rows * ask.sequence_length:,} tokens a step", with_rows(rows)


def _other_training(plans: Plans, ask: Ask, short: Shortage) -> Changes:
    if ask.clip:
        text = "do not clip gradients (max_grad_norm: null): updates then need no norm to wait for"
        yield text, replace(ask, clip=False)

    def with_length(length: int) -> Ask:
        return replace(ask, sequence_length=length)

    length = _halved(
        ask.sequence_length,
        _SHORTEST,
        lambda length: plans.could_fit(with_length(length)),
    )
    if length is not None:
        yield f"take sequences of {length:,} tokens", with_length(length)


def _hardware(plans: Plans, ask: Ask, short: Shortage) -> Changes:
    machine, told = ask.machine, short.forecast.machine
    host = align(told.host_memory_bytes, GIB) if short.host_bytes else machine.host_memory_bytes
    if not short.device_bytes:
        yield f"let it use {size(host)} of host memory", short.forecast
        return
    device = told.device_memory_bytes
    more = f" and {size(host)} of host memory" if short.host_bytes else ""
    if device <= _card_bytes(machine):
        yield (
            f"let it use {size(device)} of device memory{more}",
            ask.on(device_memory_bytes=device, host_memory_bytes=host),
        )
    for gpu in sorted(known_gpus(), key=lambda gpu: (gpu.memory_gib, -gpu.bf16_tflops)):
        try:
            other = machine_for(gpu.name, host, machine.cores, precision=ask.precision)
        except InputError:
            continue
        if other.device_memory_bytes >= device:
            yield (
                f"take a larger GPU, {gpu.name} ({gpu.memory_gib:.0f} GiB){more}",
                replace(ask, machine=other),
            )
            return


def _card_bytes(machine: Machine) -> float:
    """Of the GPU as it is sold; of one that is not known, any number."""
    gpu = by_driver_name(machine.name.partition(",")[0])
    return inf if gpu is None else gpu.memory_gib * GIB


def _halved(most: int, least: int, fits: Callable[[int], bool]) -> int | None:
    """The largest of `most` halved again and again that fits; None if none down to `least` does."""
    sizes = []
    size = most // 2
    while size >= least:
        sizes.append(size)
        size //= 2
    if not sizes or not fits(sizes[-1]):
        return None
    low, high = 0, len(sizes) - 1  # the last fits, and what fits is followed by what fits
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(sizes[middle]) else (middle + 1, high)
    return sizes[high]


_LOOKS: tuple[tuple[int, Callable[[Plans, Ask, Shortage], Changes]], ...] = (
    (FREE, _free), (SLOWER, _fewer_tokens), (OTHER_TRAINING, _other_training),
    (HARDWARE, _hardware),
)  # fmt: skip
