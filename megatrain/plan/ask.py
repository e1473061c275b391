"""A question to the planner, and the forecast that answers it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from megatrain.autoplace.fit import usual_micro_batch
from megatrain.autoplace.search import Search
from megatrain.device.base import COMPUTE
from megatrain.errors import DoesNotFit, InputError
from megatrain.forecast.forecast import Forecast
from megatrain.forecast.forecasts import Forecasts, Task
from megatrain.machine import Machine
from megatrain.model.outline import Outline
from megatrain.placement import Placement
from megatrain.units import gib, size

# The step's schedule is followed piece by piece; beyond, a step is planned as well by a part of it.
_MOST_TOKENS = 1 << 24

Precision = Literal["bf16", "fp32"]


@dataclass(frozen=True)
class Ask:
    """What somebody wants to know. `machine.*_memory_bytes` are the budgets.

    Attributes:
        micro_batch: rows; None: to be chosen.
        placement: None: to be chosen.
    """

    machine: Machine
    tokens_per_step: int
    sequence_length: int
    micro_batch: int | None = None
    clip: bool = True
    precision: Precision = "bf16"
    placement: Placement | None = None

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise InputError(f"sequences of {self.sequence_length} tokens teach nothing; take 2")
        if self.tokens_per_step < self.sequence_length:
            raise InputError(
                f"a step of {self.tokens_per_step:,} tokens holds no sequence of "
                f"{self.sequence_length:,}; take more tokens or shorter sequences"
            )
        if self.tokens_per_step > _MOST_TOKENS:
            raise InputError(
                f"{self.tokens_per_step:,} tokens a step are more than can be planned "
                f"({_MOST_TOKENS:,}); from there on time grows with the tokens"
            )
        if self.micro_batch is not None and self.micro_batch < 1:
            raise InputError(f"a micro-batch of {self.micro_batch} rows is empty")
        rows = self.tokens_per_step // self.sequence_length
        if self.micro_batch is not None and self.micro_batch > rows:
            raise InputError(
                f"a micro-batch of {self.micro_batch:,} rows is more than a step has ({rows:,}); "
                "take fewer, or more tokens a step"
            )

    def on(self, **machine: Any) -> "Ask":
        """The same question about a machine that is changed so."""
        return replace(self, machine=replace(self.machine, **machine))


class Plans(Protocol):
    """What answers questions about one model."""

    def once(self, ask: Ask, *, thorough: bool = True) -> Forecast:
        """The forecast; raises DoesNotFit. Not `thorough`, a search stops early."""

    def least(self, ask: Ask) -> Forecast:
        """What lacks least, on the machine with the memory that it lacks besides."""

    def could_fit(self, ask: Ask) -> bool:
        """Whether there likely is any way; far quicker to tell than the fastest one."""


class Planner:
    """Answers by forecasts; no step is followed twice."""

    def __init__(self, outline: Outline) -> None:
        self._forecasts = Forecasts(outline)

    def once(self, ask: Ask, *, thorough: bool = True) -> Forecast:
        if ask.placement is None:
            return self._search(ask, thorough=thorough).best()
        found = self._placed(ask, ask.placement)
        check_budgets(found, ask.machine)
        return found

    def least(self, ask: Ask) -> Forecast:
        if ask.placement is None:
            return self._search(ask).least()
        found = self._placed(ask, ask.placement)
        there = ask.machine
        machine = replace(
            there,
            device_memory_bytes=max(found.device_peak_bytes, there.device_memory_bytes),
            host_memory_bytes=max(found.host_peak_bytes, there.host_memory_bytes),
        )
        return replace(found, machine=machine)

    def could_fit(self, ask: Ask) -> bool:
        if ask.placement is None:
            return self._search(ask).could_fit()
        try:
            self.once(ask)
        except DoesNotFit:
            return False
        return True

    def _search(self, ask: Ask, *, thorough: bool = True) -> Search:
        task = _task(ask, compile=True)
        return Search(self._forecasts, ask.machine, task, thorough=thorough)

    def _placed(self, ask: Ask, placement: Placement) -> Forecast:
        rows = ask.micro_batch or default_micro_batch(ask)
        task = _task(ask, compile=placement.compile)
        return self._forecasts.of(ask.machine, placement, task, rows)


def _task(ask: Ask, *, compile: bool) -> Task:
    return Task(
        ask.tokens_per_step,
        ask.sequence_length,
        ask.micro_batch,
        ask.clip,
        ask.precision,
        compile,
    )


def default_micro_batch(ask: Ask) -> int:
    """Rows that are taken together where neither the user nor the planner chooses."""
    rows = ask.tokens_per_step // ask.sequence_length
    return min(rows, usual_micro_batch(ask.sequence_length))


def compute_bound_tokens(bounds: Mapping[str, float], tokens: int, sequence_length: int) -> int:
    """Tokens a step, in whole rows, from which on arithmetic takes longer than anything else.

    Computing grows with the tokens; copies of weights and updates do not.
    """
    others = max((seconds for name, seconds in bounds.items() if name != COMPUTE), default=0.0)
    needed = tokens * others / bounds[COMPUTE]
    return max(1, math.ceil(needed / sequence_length)) * sequence_length


def check_budgets(found: Forecast, machine: Machine) -> None:
    """Raises DoesNotFit with what is needed and what there is."""
    lacking = [
        f"{size(needed)} of {place} memory, {gib(there)} {'is' if there < 2**31 else 'are'} allowed"
        for place, needed, there in (
            ("device", found.device_peak_bytes, machine.device_memory_bytes),
            ("host", found.host_peak_bytes, machine.host_memory_bytes),
        )
        if needed > there
    ]
    if lacking:
        raise DoesNotFit(f"it needs {' and '.join(lacking)}")
