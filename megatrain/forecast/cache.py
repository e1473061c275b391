"""Forecasts of one model for one workload after the other, each made once."""

from dataclasses import replace

from megatrain.forecast.needs import Needs, needs_of
from megatrain.forecast.profile import Profile
from megatrain.forecast.simulate import STEADY, Forecast, forecast
from megatrain.forecast.workload import Workload
from megatrain.machine import Machine
from megatrain.model.spec import ModelSpec
from megatrain.optim import Rule
from megatrain.placement import Placement
from megatrain.source.opened import Model


class ForecastCache:
    """Forecasts of one model, each made once."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._models: dict[Rule, Model] = {}
        self._measured: dict[tuple, Profile] = {}
        self._made: dict[tuple, Forecast] = {}
        self._needs: dict[tuple, Needs] = {}

    def model(self, workload: Workload) -> Model:
        """The model with the workload's optimizer, and its tiles."""
        rule = workload.rule
        if rule not in self._models:
            self._models[rule] = Model.trained(self.spec, rule)
        return self._models[rule]

    def needs(self, workload: Workload, placement: Placement) -> Needs:
        """What lives as long as an engine for the workload."""
        key = (workload, replace(placement, head_tokens=1))  # no buffer depends on them
        if key not in self._needs:
            measured = self.measured(workload)
            distinct = measured.tokens_of(workload.rows)[1]
            self._needs[key] = needs_of(
                self.model(workload),
                measured.program,
                placement,
                clip=workload.clip,
                tokens=workload.rows * workload.sequence_length,
                distinct=len(distinct),
            )
        return self._needs[key]

    def measured(self, workload: Workload, chunk_tokens: int | None = None) -> Profile:
        """What the model's parts take."""
        key = (workload.precision, workload.sequence_length, workload.compile, chunk_tokens)
        if key not in self._measured:
            self._measured[key] = Profile(
                self.spec,
                workload.dtype,
                workload.sequence_length,
                compiled=workload.compile,
                chunk_tokens=chunk_tokens,
                float8=workload.precision == "fp8",
            )
        return self._measured[key]

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
        if key not in self._made:
            self._made[key] = forecast(
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
        return replace(self._made[key], machine=machine)
