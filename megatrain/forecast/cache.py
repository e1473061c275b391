"""Forecasts of one model for several workloads and placements, each computed once.

The memory of a second, frozen model (a reference, a teacher) is added: it has an engine of its own.
"""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import torch

from megatrain.device import Buffer
from megatrain.device.base import Memory, MetaDevice, kind_of
from megatrain.engine.step import Parts, TrainingParts
from megatrain.errors import InputError
from megatrain.forecast.notes import Notes, Once
from megatrain.forecast.op_counter import Place
from megatrain.forecast.profile import Profile
from megatrain.forecast.simulate import STEADY, Forecast, assembled, forecast, process_bytes
from megatrain.forecast.workload import Workload
from megatrain.machine import Machine
from megatrain.model.owned_experts import owned_names
from megatrain.model.spec import PROBE_SHAPE, ModelSpec
from megatrain.optim import PlaneKind
from megatrain.placement import Placement, Precision
from megatrain.source.tiles import DTYPES, Model
from megatrain.store.store import Tile
from megatrain.tile import TileKind

# Parts of a step's memory that are free while replies are generated.
_FREE_BETWEEN_STEPS = tuple(value for name, value in vars(Place).items() if name.isupper())

# The part of `Needs.device` that stands for the least working set of any step.
UNSUMMED = "gradients before they are summed"
_LAYER_INPUTS = "boundaries"


@dataclass
class Needs:
    """Bytes by what they are for, on the device and in host memory."""

    device: Counter[str] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)


class _CountingDevice(MetaDevice):
    """Counts the bytes of all buffers that are made on it."""

    def __init__(self) -> None:
        self.needs = Needs()

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        self.needs.device[kind_of(name, Memory.OTHER).value] += numel * dtype.itemsize
        return super().empty(name, numel, dtype)

    def host(self, name: str, numel: int, dtype: torch.dtype, *, pinned: bool) -> Buffer:
        self.needs.host[kind_of(name, Memory.OTHER).value] += numel * dtype.itemsize
        return super().host(name, numel, dtype, pinned=pinned)


def needs_of(
    model: Model,
    placement: Placement,
    *,
    clip: bool,
    tokens: int | None = None,
    distinct: int | None = None,
) -> Needs:
    """An engine's long-lived memory and largest gradient; `distinct` of `tokens` a step differ."""
    counting, model = _CountingDevice(), model.placed(placement)
    assembly = assembled(counting, model, placement)
    device, host = counting.needs.device, counting.needs.host
    parts: Parts
    if model.optimizer is None:
        parts = assembly.inference()
    else:
        parts = assembly.training(model.optimizer, 1.0 if clip else None)
    if tokens is not None:
        # A larger buffer of sums takes the place of the first one, which is given back.
        sums = device.pop(Memory.SUMS.value)
        parts.embedding.reserve(tokens if distinct is None else distinct)
        device[Memory.SUMS.value] = max(sums, device[Memory.SUMS.value])
    if isinstance(parts, TrainingParts):
        dtype = DTYPES[model.precision]
        device[UNSUMMED] += max(_unsummed_bytes(tile, dtype) for tile in assembly.visited)
        layers = zip(model.spec.layers, model.spec.outputs, strict=True)
        examples = [layer.kind.example[ref.leaf] for layer, refs in layers for ref in refs]
        numels = [e.numel() // prod(PROBE_SHAPE) for e in examples if torch.is_tensor(e)]
        tokens_of_pass = (tokens or 0) // placement.passes  # of the smallest pass
        memory = host if placement.layer_inputs == "host" else device
        memory[_LAYER_INPUTS] += sum(numels) * dtype.itemsize * tokens_of_pass
    return counting.needs


def _unsummed_bytes(tile: Tile, dtype: torch.dtype) -> int:
    """The most bytes of a tile's gradients at once in a backward: a head's come one by one."""
    copies, trained = tile.layout.copies, tile.layout.local.trainable
    sizes = [e.numel * (4 if e.name in copies else dtype.itemsize) for e in trained]
    return max(sizes, default=0) if tile.layout.kind is TileKind.HEAD else sum(sizes)


class ForecastCache(Once):
    """Forecasts of one model, each computed once."""

    def __init__(self, spec: ModelSpec, notes: Notes | None = None) -> None:
        super().__init__()
        self.spec, self._notes = spec, notes or Notes(lambda: spec)

    def model(self, workload: Workload) -> Model:
        key = workload.rule, workload.ranks, workload.hosts, workload.precision
        return self.once(key, lambda: Model(self.spec, *key))

    def can_own(self, workload: Workload) -> bool:
        """True if the ranks of a workload can own the model's experts."""
        with suppress(InputError):
            return bool(owned_names(self.spec, workload.ranks))
        return False

    def needs(self, workload: Workload, placement: Placement) -> Needs:
        """The memory that lives as long as an engine for the workload."""
        # These choices change no needs, but for layer inputs on the host, which are moved below.
        choices = replace(placement, head_tokens=1, layer_inputs="device", layer_input_lanes=1)
        choices = replace(choices, chunk_tokens=None, save_attention="none")

        def count() -> Needs:
            measured = self.measured(workload)
            return needs_of(
                self.model(workload),
                choices,
                clip=workload.clip,
                tokens=workload.rows * workload.sequence_length,
                distinct=len(measured.distinct(workload.rows * workload.all_ranks)),
            )

        needs = self.once((workload, choices), count)
        if placement.layer_inputs == "host":
            needs = Needs(needs.device.copy(), needs.host.copy())
            needs.host[_LAYER_INPUTS] = needs.device.pop(_LAYER_INPUTS)
        return needs

    def least_host_bytes(self, workload: Workload, placement: Placement) -> int:
        """Resident memory of the process without graphs and attention results on the host."""
        host = self.needs(workload, placement).host
        planes = sum(host[kind.value] for kind in PlaneKind if kind is not PlaneKind.GRADIENT)
        later, model = sum(host.values()) - planes, self.model(workload)
        process = process_bytes(model, placement, self.measured(workload), allocated_later=later)
        return planes + later + process

    def measured(self, workload: Workload, placement: Placement | None = None) -> Profile:
        """The works of the model's parts; `placement`: with its chunks and owners of experts."""
        names = "precision", "sequence_length", "sequence_ranks", "compile", "media"
        shape = [getattr(workload, name) for name in names]
        chunk_tokens = None if placement is None else placement.chunk_tokens
        owners = workload.ranks if placement is not None and placement.own_experts else 1
        workload = replace(workload, compile=workload.compile and owners == 1)
        profile = partial(Profile, self.spec, workload, chunk_tokens, self._notes, owners)
        return self.once((*shape, chunk_tokens, owners), profile)

    def of(
        self,
        machine: Machine,
        placement: Placement,
        workload: Workload,
        micro_batch: int,
        steps: int = STEADY,
    ) -> Forecast:
        """The forecast of a step of `micro_batch` rows at a time, and of what runs beside it."""
        # Machines that differ in their memory alone share a forecast.
        rates = replace(machine, device_memory_bytes=0, host_memory_bytes=0)
        key = (rates, placement, replace(workload, micro_batch=micro_batch), steps)

        def with_all_models() -> Forecast:
            measured = self.measured(workload, placement)
            model = self.model(workload)
            step = forecast(model, machine, placement, measured, workload, micro_batch, steps)
            if workload.generation is not None:
                step = self._with_generation(step, workload)
            if (second := workload.second) is None:
                return step
            return self._with_second(step, second.name, second.spec, workload)

        return replace(self.once(key, with_all_models), machine=machine)

    def _with_generation(self, step: Forecast, workload: Workload) -> Forecast:
        """The forecast of a run that generates between steps: its peak is the larger of both."""
        replies, dtype = workload.generation, workload.dtype
        assert replies is not None
        rows = min(workload.rows, replies.rows or workload.rows)
        size = rows, workload.sequence_length, replies.new_tokens

        def generation() -> int:
            from megatrain.forecast.generation import generation_bytes

            return generation_bytes(self._notes.opened(), dtype, *size)

        generated = self._notes.noted(int, ("generation", dtype, *size), generation)
        missing = generated - sum(step.device_bytes.get(name, 0) for name in _FREE_BETWEEN_STEPS)
        step = replace(step, device_bytes=step.device_bytes | {"generation": max(0, missing)})
        if not replies.reference:
            return step
        return self._with_second(step, "reference model", self.spec, workload)

    def _with_second(
        self, step: Forecast, name: str, spec: ModelSpec, workload: Workload
    ) -> Forecast:
        """A forecast that counts the memory of a second engine, which only runs `spec`."""
        size = workload.precision, workload.rows * workload.sequence_length, workload.all_ranks
        needs = self.once((id(spec), size), lambda: second_needs(spec, *size))
        device, host = sum(needs.device.values()), sum(needs.host.values())
        return replace(
            step,
            device_bytes=step.device_bytes | {name: device},
            host_bytes=step.host_bytes | {f"host_{name.replace(' ', '_')}_bytes": host},
        )


def second_needs(spec: ModelSpec, precision: Precision, tokens: int, ranks: int = 1) -> Needs:
    """The memory, on each of `ranks` that share it, of an engine that only runs the model."""
    tokens *= ranks  # each rank has the embedding rows of the tokens of all ranks
    model = Model(spec, None, ranks, precision=precision)
    return needs_of(model, Placement(), clip=False, tokens=tokens)
