"""Whether a model fits, asked before anything is allocated.

The engine's own parts are made on a device that only counts what they ask for. To that comes what
is certain besides: the largest gradient before it is summed, the driver's context, the process. So
what is refused is what not even a step of a few tokens would fit; what many tokens take is for
engine/forecast.py, and a step that runs out of memory ends in one line, too.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from megatrain.device import Buffer, Device, TraceDevice
from megatrain.engine.assemble import Assembly
from megatrain.engine.forecast import Forecast
from megatrain.engine.portion import Portion, least_split
from megatrain.engine.step import Parts, TrainingParts
from megatrain.errors import DoesNotFit, InputError
from megatrain.machine import mapping_bytes
from megatrain.model.outline import PROBE_SHAPE, Outline
from megatrain.model.program import Program
from megatrain.optim import StreamedOptimizer
from megatrain.placement import Placement
from megatrain.store import Store, Tile
from megatrain.telemetry.memory import host_available_bytes, host_limit_bytes, process_bytes
from megatrain.tile import TileLayout
from megatrain.units import GIB, MIB, align, gib, parse_bytes, size

# Resident memory of a process with a GPU beside planes and buffers, compiling included: 3.6 to
# 4.2 GB (benchmarks/results/step-*.json).
_GPU_PROCESS_BYTES = 3_600_000_000

# Under this name counts the working set of the smallest step.
UNSUMMED = "gradients before they are summed"


@dataclass
class Needs:
    """Bytes by what they are for, on the device and in host memory."""

    device: Counter[str] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)


class _Counting(TraceDevice):
    """Notes what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.needs = Needs()

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        self.needs.device[_what(name)] += numel * dtype.itemsize
        return super().empty(name, numel, dtype)

    def host(self, name: str, numel: int, dtype: torch.dtype, *, pinned: bool) -> Buffer:
        self.needs.host[_what(name)] += numel * dtype.itemsize
        return super().host(name, numel, dtype, pinned=pinned)


def _what(name: str) -> str:
    return " ".join(word for word in name.split() if not word.isdigit())


@dataclass(frozen=True)
class Question:
    """What is to be trained, or only run, and how.

    Attributes:
        tokens: of a step; None where they are not known, then what grows with them is left out.
        distinct: of these, that differ; None: they may all.
    """

    outline: Outline
    layouts: Sequence[TileLayout]
    dtype: torch.dtype
    optimizer: StreamedOptimizer | None
    max_grad_norm: float | None
    tokens: int | None
    distinct: int | None = None

    def needs(self, placement: Placement) -> Needs:
        """All long-lived memory, and the largest gradient on its way to its sum."""
        device = _Counting()
        train = self.optimizer is not None
        resident = placement.resident
        store = Store(device, self.layouts, self.dtype, train=train, resident=resident)
        program = cast(Program, SimpleNamespace(outline=self.outline))
        eager = replace(placement, compile=False, tile_tokens=None)
        assembly = Assembly(device, program, store, self.dtype, eager)
        parts: Parts = (
            assembly.inference()
            if self.optimizer is None
            else assembly.training(self.optimizer, self.max_grad_norm)
        )
        if self.tokens is not None:
            # The rooms are replaced by larger ones: the first are given back.
            device.needs.device["work room"] = 0
            parts.embedding.reserve(self.tokens if self.distinct is None else self.distinct)
        if isinstance(parts, TrainingParts):
            device.needs.device[UNSUMMED] += self._unsummed_bytes(assembly.visited)
            boundaries = self._boundary_bytes()
            where = device.needs.host if placement.boundaries == "host" else device.needs.device
            where["boundaries"] += boundaries
        return device.needs

    def _unsummed_bytes(self, visited: Sequence[Tile | Portion]) -> int:
        """The largest gradient of one backward, in the compute type; of the head, one parameter's.

        Beside it, what the backward of a few tokens works with is next to nothing.
        """
        whole = [t.layout.trainable_numel for t in visited if t.name != "head"]
        heads = [t.layout.trainable for t in visited if t.name == "head"]
        single = [prod(entry.shape) for entries in heads for entry in entries]
        return max([*whole, *single], default=0) * self.dtype.itemsize

    def least_split(self) -> int | None:
        """The least `split_bytes`; None: nothing is larger."""
        least = least_split(self.outline, self.layouts, self.dtype.itemsize)
        split = ("layer", "head")
        largest = max(layout.numel for layout in self.layouts if layout.name.startswith(split))
        return least if least < largest * self.dtype.itemsize else None

    def _boundary_bytes(self) -> int:
        """What enters the layers, of a whole step."""
        positions = prod(PROBE_SHAPE)
        layers = self.outline.layers
        made = [
            layer.kind.example[ref.leaf].numel() // positions
            for layer, refs in zip(layers, self.outline.outputs, strict=True)
            for ref in refs
            if isinstance(layer.kind.example[ref.leaf], Tensor)
        ]
        return sum(made) * self.dtype.itemsize * (self.tokens or 0)


def smallest(placement: Placement) -> Placement:
    """The choices that take the least device memory, the model computed as `placement` does."""
    return replace(
        placement,
        slots=1,
        prefetch=None,
        gradient_lanes=1,
        keep_rows=False,
        keep_layers=0,
        offload_layers=0,
        keep_attention="none",
        boundaries="host",
        boundary_lanes=1,
        resident=(),
    )


def check_fits(
    device: Device,
    question: Question,
    placement: Placement,
    host_memory: int | None,
    foretold: Forecast | None = None,
) -> None:
    """Refuse what cannot fit.

    Args:
        foretold: a whole step where the device is the CPU, all of which is in host memory.

    Raises:
        DoesNotFit: names what is missing and the least that would do.
    """
    needs = question.needs(placement)
    memory = device.memory()
    has_memory = device.kind == "cuda"
    if has_memory:
        mapping = mapping_bytes(sum(needs.host.values()))
        allowed = memory["device_free_bytes"] + memory["device_bytes"] - mapping
        context = memory["device_context_bytes"] + mapping
        if sum(needs.device.values()) > allowed:
            split = question.least_split()
            frugal = replace(smallest(placement), split_bytes=split)
            least = align(sum(question.needs(frugal).device.values()) + context, GIB // 10)
            raise DoesNotFit(
                _refusal("device", needs.device, context, allowed + context)
                + f"; the least for this model, with a few tokens a step, is {gib(least)} "
                "(slots: 1, gradient_lanes: 1, keep_rows: false, boundaries: host, resident: []"
                + ("" if split is None else f", split_bytes: {split}")
                + ")"
            )
    planes = needs.host if has_memory else needs.host + needs.device
    grows = max(0, _GPU_PROCESS_BYTES - process_bytes()) if has_memory else 0
    if foretold is not None:
        planes, grows = foretold.host_growth
    if sum(planes.values()) + grows > host_available_bytes(host_memory):
        planes["the process itself"] += process_bytes() + grows
        raise DoesNotFit(_host_refusal(planes, host_memory, has_memory, foretold is not None))


def _host_refusal(
    needs: Counter[str], host_memory: int | None, has_gpu: bool, whole_step: bool
) -> str:
    available, process, machine = (
        host_available_bytes(host_memory), process_bytes(), host_limit_bytes()
    )  # fmt: skip
    limit = machine if host_memory is None else min(machine, host_memory)
    binds = limit - process < available + MIB  # and not what other programs have left
    remedies = [
        *(["raise host_memory"] if binds and limit == host_memory else []),
        *(["take smaller micro-batches"] if whole_step else []),
        "train a smaller model",
        *(["let tiles rest on the GPU"] if has_gpu else []),
    ]
    allowed = limit if binds else available + process
    return _refusal("host", needs, 0, allowed) + "; " + ", or ".join(remedies)


def _refusal(place: str, needs: Counter[str], rest: int, allowed: int) -> str:
    total = sum(needs.values()) + rest
    parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in needs.most_common(4))
    return (
        f"{place} memory: at least {size(total)} are needed ({parts}), but {size(allowed)} are "
        f"allowed, {size(total - allowed)} too few"
    )


def limits(device_memory: Any, host_memory: Any) -> tuple[int | None, int | None]:
    """Both limits in bytes, given as the user writes them. Raises InputError."""
    return _bytes("device_memory", device_memory), _bytes("host_memory", host_memory)


def _bytes(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        parsed = parse_bytes(value) if isinstance(value, (str, int)) else -1
    except ValueError as error:
        raise InputError(f"{name} is {error}") from error
    if parsed <= 0 or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; write it like 10GiB, or a number of bytes")
    return parsed
