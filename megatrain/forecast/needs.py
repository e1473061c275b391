"""What lives as long as an engine.

The engine's own parts are made on a device that only counts what they ask for. To that comes what
is certain besides: the largest gradient before it is summed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatrain.device import Buffer, TraceDevice
from megatrain.device.base import Memory, kind_of
from megatrain.engine.assemble import Assembly
from megatrain.engine.step import Parts, TrainingParts
from megatrain.model.capture import Ref
from megatrain.model.program import ModelProgram
from megatrain.model.spec import PROBE_SHAPE, Layer, ModelSpec
from megatrain.placement import Placement
from megatrain.source.source import Model
from megatrain.store.store import Store, Tile
from megatrain.tile import TileKind

# Under this name counts the working set of the smallest step.
UNSUMMED = "gradients before they are summed"
_BOUNDARIES = "boundaries"


@dataclass
class Needs:
    """Bytes by what they are for, on the device and in host memory."""

    device: Counter[str] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)

    @property
    def waiting_on_host(self) -> "Needs":
        """These needs where boundaries wait on the host."""
        device, host = self.device.copy(), self.host.copy()
        host[_BOUNDARIES] = device.pop(_BOUNDARIES)
        return Needs(device, host)


class _Counting(TraceDevice):
    """Notes what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.needs = Needs()

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        self.needs.device[kind_of(name, Memory.OTHER).value] += numel * dtype.itemsize
        return super().empty(name, numel, dtype)

    def host(self, name: str, numel: int, dtype: torch.dtype, *, pinned: bool) -> Buffer:
        self.needs.host[kind_of(name, Memory.OTHER).value] += numel * dtype.itemsize
        return super().host(name, numel, dtype, pinned=pinned)

    def run(self, *work: Any, **buffers: Any) -> None:
        """Nothing is put on a stream."""


def needs_of(
    model: Model,
    program: ModelProgram,
    placement: Placement,
    *,
    clip: bool,
    tokens: int | None = None,
    distinct: int | None = None,
) -> Needs:
    """All long-lived memory of an engine, and the largest gradient on its way to its sum.

    Args:
        tokens: of a step; None where they are not known, then what grows with them is left out.
        distinct: of these, that differ; None: they may all.
    """
    device, dtype = _Counting(), program.dtype
    store = Store(device, model.layouts, dtype, rule=model.rule, placement=placement)
    eager = replace(placement, compile=False, chunk_tokens=None)
    assembly = Assembly(device, program, store, dtype, eager)
    parts: Parts = (
        assembly.inference()
        if model.optimizer is None
        else assembly.training(model.optimizer, 1.0 if clip else None)
    )
    if tokens is not None:
        # The range is replaced by a larger one, if it must grow: the first is given back.
        sums = device.needs.device.pop(Memory.SUMS.value)
        parts.embedding.reserve(tokens if distinct is None else distinct)
        device.needs.device[Memory.SUMS.value] = max(sums, device.needs.device[Memory.SUMS.value])
    if isinstance(parts, TrainingParts):
        device.needs.device[UNSUMMED] += _unsummed_bytes(assembly.visited, dtype)
        at_once = (tokens or 0) // placement.passes  # at least: of one pass
        where = device.needs.host if placement.layer_inputs == "host" else device.needs.device
        numel = _boundary_numel(model.spec)
        where[_BOUNDARIES] += numel * dtype.itemsize * at_once
    return device.needs


def _unsummed_bytes(visited: Sequence[Tile], dtype: torch.dtype) -> int:
    """The largest gradient of one backward, in the compute type; of the head, one parameter's.

    Beside it, what the backward of a few tokens works with is next to nothing.
    """
    heads = [t.layout.trainable for t in visited if t.layout.kind is TileKind.HEAD]
    whole = [t.layout.trainable_numel for t in visited if t.layout.kind is not TileKind.HEAD]
    single = [prod(entry.shape) for entries in heads for entry in entries]
    return max([*whole, *single], default=0) * dtype.itemsize


def _boundary_numel(spec: ModelSpec) -> int:
    """What enters the layers, of one token."""
    layers = zip(spec.layers, spec.outputs, strict=True)
    return sum(_numel(layer, ref) for layer, refs in layers for ref in refs)


def _numel(layer: Layer, ref: Ref) -> int:
    """Elements of one of a layer's activations, of one token."""
    example = layer.kind.example[ref.leaf]
    return example.numel() // prod(PROBE_SHAPE) if isinstance(example, Tensor) else 0
