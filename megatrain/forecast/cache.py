"""Forecasts of one model for one workload after the other, each made once."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, TypeVar

from megatrain.forecast.generation import generation_bytes, with_generation
from megatrain.forecast.needs import Needs, needs_of
from megatrain.forecast.profile import Profile
from megatrain.forecast.second_model import second_needs, second_seconds, with_second
from megatrain.forecast.simulate import STEADY, Forecast, forecast, process_bytes
from megatrain.forecast.workload import Workload
from megatrain.machine import Machine
from megatrain.model.spec import ModelSpec
from megatrain.optim import PlaneKind
from megatrain.placement import Placement
from megatrain.source.source import Model

Found = TypeVar("Found")


class ForecastCache:
    """Forecasts of one model, each made once."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """What `make` has made when it was first asked for `key`."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def model(self, workload: Workload) -> Model:
        """The model with the workload's optimizer, and its tiles."""
        key = workload.rule, workload.ranks, workload.hosts
        return self.once(key, lambda: Model.trained(self.spec, *key))

    def needs(self, workload: Workload, placement: Placement) -> Needs:
        """What lives as long as an engine for the workload."""
        alike = replace(placement, head_tokens=1, layer_inputs="device", layer_input_lanes=1)

        def made() -> Needs:
            measured = self.measured(workload)
            return needs_of(
                self.model(workload),
                measured.program,
                alike,
                clip=workload.clip,
                tokens=workload.rows * workload.sequence_length,
                distinct=len(measured.distinct(workload.rows * workload.all_ranks)),
            )

        found = self.once((workload, alike), made)
        return found if placement.layer_inputs == "device" else found.waiting_on_host

    def least_host_bytes(self, machine: Machine, workload: Workload, placement: Placement) -> int:
        """All resident memory of the process, but for graphs and attention results that wait."""
        host = self.needs(workload, placement).host
        planes = sum(host[kind.value] for kind in PlaneKind if kind is not PlaneKind.GRADIENT)
        later, measured = sum(host.values()) - planes, self.measured(workload)
        process = process_bytes(self.model(workload), machine, placement, measured, later)
        return planes + later + process

    def measured(self, workload: Workload, chunk_tokens: int | None = None) -> Profile:
        """What the model's parts take."""
        given = self.spec, workload.dtype, workload.sequence_length
        return self.once(
            (workload.precision, workload.sequence_length, workload.compile, chunk_tokens),
            lambda: Profile(
                *given,
                compiled=workload.compile,
                chunk_tokens=chunk_tokens,
                float8=workload.precision == "fp8",
            ),
        )

    def of(
        self,
        machine: Machine,
        placement: Placement,
        workload: Workload,
        micro_batch: int,
        steps: int = STEADY,
    ) -> Forecast:
        """A forecast; budgets of memory do not enter it."""
        rates = replace(machine, device_memory_bytes=0, host_memory_bytes=0)
        key = (rates, placement, replace(workload, micro_batch=micro_batch), steps)

        def made() -> Forecast:
            found = forecast(
                self.model(workload),
                machine,
                placement,
                self.measured(workload, placement.chunk_tokens),
                rows=workload.rows,
                micro_batch=micro_batch,
                clip=workload.clip,
                loss=workload.loss,
                steps=steps,
            )
            if workload.generation is not None:
                found = self._generating(found, workload)
            return found if workload.second is None else self._with_second(found, workload)

        return replace(self.once(key, made), machine=machine)

    def _generating(self, found: Forecast, workload: Workload) -> Forecast:
        """The forecast with what the workload generates between steps."""
        asked, dtype = workload.generation, workload.dtype
        assert asked is not None
        generated = 0
        if asked.new_tokens is not None:
            rows = min(workload.rows, asked.rows or workload.rows)
            size = rows, workload.sequence_length, asked.new_tokens
            if asked.tokens is not None:
                size = asked.rows or 1, asked.tokens, asked.new_tokens
            generated = self.once((dtype, size), lambda: generation_bytes(self.spec, dtype, *size))
        found = with_generation(found, generated)
        if not asked.reference:
            return found
        return with_second(found, "reference model", self._needs_beside(self.spec, workload))

    def _needs_beside(self, spec: ModelSpec, workload: Workload) -> Needs:
        size = workload.dtype, workload.rows * workload.sequence_length, workload.all_ranks
        return self.once((id(spec), size), lambda: second_needs(spec, *size))

    def _with_second(self, found: Forecast, workload: Workload) -> Forecast:
        """The forecast with the model that is streamed before each step."""
        second = workload.second
        assert second is not None
        given = second.spec, workload.dtype, workload.sequence_length
        measured = self.once(
            (second, *given[1:]), lambda: Profile(*given, compiled=False, chunk_tokens=None)
        )
        needs = self._needs_beside(second.spec, workload)
        return with_second(
            found,
            second.name,
            needs,
            lambda: second_seconds(second.spec, measured, found, workload),
        )
