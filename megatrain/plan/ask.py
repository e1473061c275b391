"""A question to the planner, and the forecast that answers it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from megatrain.autoplace.search import Search
from megatrain.autoplace.spill import could_fit, fastest
from megatrain.device.base import COMPUTE
from megatrain.errors import DoesNotFit, InputError
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.machine import Machine
from megatrain.model.spec import ModelSpec
from megatrain.placement import Placement
from megatrain.units import gib, size

# The step's schedule is followed piece by piece; beyond, a step is planned as well by a part of it.
_MOST_TOKENS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Ask(Workload):
    """What somebody wants to know. `machine.*_memory_bytes` are the budgets.

    Attributes:
        placement: None: to be chosen.
    """

    machine: Machine
    placement: Placement | None = None

    def __post_init__(self) -> None:
        self.check()
        if self.tokens_per_step > _MOST_TOKENS:
            raise InputError(
                f"{self.tokens_per_step:,} tokens a step are more than can be planned "
                f"({_MOST_TOKENS:,}); from there on time grows with the tokens"
            )

    @property
    def workload(self) -> Workload:
        """The same without machine and placement."""
        own = {field.name: getattr(self, field.name) for field in fields(Workload)}
        compiled = self.placement is None or self.placement.compile
        return Workload(**own | {"compile": compiled})

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

    def __init__(self, spec: ModelSpec) -> None:
        self._forecasts = ForecastCache(spec)

    def once(self, ask: Ask, *, thorough: bool = True) -> Forecast:
        if ask.placement is None:
            return fastest(self._forecasts, ask.machine, ask.workload, thorough=thorough)
        found = self._placed(ask, ask.placement)
        check_budgets(found, ask.machine)
        return found

    def least(self, ask: Ask) -> Forecast:
        if ask.placement is None:
            return Search(self._forecasts, ask.machine, ask.workload).least()
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
            return could_fit(self._forecasts, ask.machine, ask.workload)
        try:
            self.once(ask)
        except DoesNotFit:
            return False
        return True

    def _placed(self, ask: Ask, placement: Placement) -> Forecast:
        workload = ask.workload
        return self._forecasts.of(ask.machine, placement, workload, workload.usual_micro_batch)


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
