"""Forecasts of one model for one task after the other, each made once."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from megatrain.forecast.forecast import Forecast, Trainee, forecast
from megatrain.forecast.measure import Measured
from megatrain.forecast.needs import Needs, Question
from megatrain.machine import Machine
from megatrain.model.outline import Outline
from megatrain.placement import Placement
from megatrain.tile import TileLayout


@dataclass(frozen=True)
class Task:
    """What is to be trained how; `micro_batch` None: to be chosen."""

    tokens_per_step: int
    sequence_length: int
    micro_batch: int | None
    clip: bool
    precision: Literal["bf16", "fp32"]
    compile: bool

    @property
    def rows(self) -> int:
        return max(1, self.tokens_per_step // self.sequence_length)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


class Forecasts:
    """Forecasts of one model, each made once."""

    def __init__(self, outline: Outline) -> None:
        self.outline, self._trainee = outline, Trainee(outline)
        self._measured: dict[tuple, Measured] = {}
        self._made: dict[tuple, Forecast] = {}
        self._needs: dict[tuple, Needs] = {}

    @property
    def layouts(self) -> list[TileLayout]:
        """The model's tiles."""
        return self._trainee.layouts

    def needs(self, task: Task, placement: Placement) -> Needs:
        """What lives as long as an engine for the task."""
        key = (task, replace(placement, head_tokens=1))  # no buffer depends on them
        if key not in self._needs:
            self._needs[key] = self._question(task).needs(placement)
        return self._needs[key]

    def _question(self, task: Task) -> Question:
        tokens = self.measured(task).batch(task.rows, task.rows).unique_U
        clip, count = 1.0 if task.clip else None, task.rows * task.sequence_length
        optimizer = self._trainee.optimizer
        return Question(self.outline, self.layouts, task.dtype, optimizer, clip, count, len(tokens))

    def measured(self, task: Task, tile_tokens: int | None = None) -> Measured:
        """What the model's parts take."""
        key = (task.dtype, task.sequence_length, task.compile, tile_tokens)
        if key not in self._measured:
            self._measured[key] = Measured(
                self.outline,
                task.dtype,
                task.sequence_length,
                compiled=task.compile,
                tile_tokens=tile_tokens,
            )
        return self._measured[key]

    def of(self, machine: Machine, placement: Placement, task: Task, micro_batch: int) -> Forecast:
        """A forecast; budgets of memory do not enter it."""
        rates = replace(machine, device_memory_bytes=0, host_memory_bytes=0)
        key = (rates, placement, replace(task, micro_batch=micro_batch))
        if key not in self._made:
            self._made[key] = forecast(
                self._trainee,
                machine,
                placement,
                self.measured(task, placement.tile_tokens),
                rows=task.rows,
                micro_batch=micro_batch,
                clip=task.clip,
            )
        return replace(self._made[key], machine=machine)
