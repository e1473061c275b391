"""The base class of optimizers' rules: their settings, planes and parameter groups.

All bytes per parameter are computed here, from the planes of a rule.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from megatrain import kernels
from megatrain.base.units import align
from megatrain.errors import InputError, explained, in_one_line
from megatrain.kernels.reference import join_block, split_block
from megatrain.kernels.states import TileRange, UpdateOptions
from megatrain.tile import Entry, TileLayout
from megatrain.tile.layout import ALIGNMENT

# Patterns of parameter names without weight decay: those of transformers.Trainer (5.23).
NO_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")

_LAYER_MATRIX = Entry("layers.0.weight", (4096, 4096), 0, 0)


class PlaneKind(Enum):
    """A kind of plane."""

    WEIGHTS = "weights"
    REMAINDER = "remainder"
    STATE = "moments"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class Plane:
    """One quantity of a tile (weights, gradient, a state), at the offsets of the tile's layout."""

    name: str  # unique in the tile; a key of checkpoints
    dtype: torch.dtype
    group_size: int = 1  # elements that share one value, such as a scale; divides tile.ALIGNMENT
    frozen: bool = False  # True if frozen parameters have this plane, too
    only: Callable[[Entry], bool] | None = None  # True for a parameter with this plane; None: all
    on_device: bool = False  # True if only `average` (Muon) uses the plane, on the device
    kind: PlaneKind = PlaneKind.STATE

    def __hash__(self) -> int:
        return hash(self.name)  # fast: a forecast hashes planes a hundred thousand times

    @property
    def bytes_per_parameter(self) -> float:
        return self.dtype.itemsize / self.group_size

    def num_bytes(self, layout: TileLayout) -> int:
        """Bytes of this plane for a tile on rank 0, which has most of several ranks."""
        return self.own_numel(layout, 0) * self.dtype.itemsize

    def has(self, entry: Entry) -> bool:
        """True if a parameter has a part in this plane."""
        may_have = self.frozen or entry.group is not None
        return may_have and (self.only is None or self.only(entry))

    def numel(self, layout: TileLayout) -> int:
        """Length of this plane for a tile: up to the last part or parameter that has values."""
        if self.kind is PlaneKind.WEIGHTS:
            return layout.numel
        last = next(filter(self.has, reversed(layout.entries)), None)
        if last is None:
            return 0
        stop = align(last.offset + last.stored, ALIGNMENT)
        if layout.ranks > 1 and self.only is None:  # up to a part's end: each rank has a block
            stop = min((end for _, end in layout.parts if end >= stop), default=0)
        return stop // self.group_size

    @lru_cache(1 << 14)  # noqa: B019  forecasts repeat calls thousands of times
    def own_numel(self, layout: TileLayout, rank: int) -> int:
        """Length of this plane for a rank's blocks of a tile."""
        stop = self.numel(layout) * self.group_size
        parts = (min(numel, stop - start) for start, numel in layout.blocks(rank))
        return sum(numel for numel in parts if numel > 0) // self.group_size

    def place(self, start: int, stop: int) -> slice:
        """The slice of values for elements `start` to `stop`; `start` begins a group."""
        return slice(start // self.group_size, -(-stop // self.group_size))


@dataclass(frozen=True)
class Rule(ABC):
    """An optimizer: a frozen dataclass of settings, `lr`, `weight_decay` and `no_decay` among them.

    Attributes:
        choices: settings that all groups share, with the allowed values of each.
        needs_matrices: True if `update` takes ranges of one parameter, with its `shape` in `group`
            and only its states; False: ranges of several parameters, with all states.
        launches: for forecasts, the torch operations of an update on a GPU for each UPDATE_BLOCK of
            elements; 0 if the rule has a GPU kernel of its own.
    """

    name: ClassVar[str]
    settings: ClassVar[tuple[str, ...]]  # names of the settings that torch's parameter groups hold
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    further: ClassVar[tuple[str, ...]] = ()  # further shared settings, with any values
    needs_matrices: ClassVar[bool] = False
    sums_in_pass: ClassVar[bool] = False  # True if `update` on the host also adds to `options.sums`
    launches: ClassVar[int] = 0

    @property
    @abstractmethod
    def lr(self) -> float:
        """The learning rate."""

    @property
    @abstractmethod
    def no_decay(self) -> Sequence[str]:
        """Patterns of names that do not decay, besides the parameters of nn.LayerNorm."""

    @property
    @abstractmethod
    def state_planes(self) -> tuple[Plane, ...]:
        """The planes of a trained parameter's state, which begins as zeros."""

    @property
    def remainder(self) -> torch.dtype:
        """The dtype of the remainder: the bits of a master beyond its bf16 weights."""
        return torch.int16

    def check_dtype(self, dtype: torch.dtype) -> None:  # noqa: B027  most rules take any
        """Raise InputError if the rule cannot train layers that are computed in `dtype`."""

    @abstractmethod
    def update(self, tile: TileRange, group: Mapping[str, Any], options: UpdateOptions) -> None:
        """Update a range of a tile in place, on the device of its planes.

        Args:
            tile: the range, with its states in the order of `state_planes`. On a GPU the update is
                put on the current stream.
            group: the settings of the range's parameter group.
            options: the update's number and place, and how to run it.
        """

    def rate(self, name: str, shape: Sequence[int]) -> float:
        """A parameter's base learning rate, which schedules scale in each step."""
        return self.lr

    def directed(self, entry: Entry) -> bool:
        """True if the rule's `average` and `direct` replace a parameter's gradient (Muon)."""
        return False

    @property
    def directing(self) -> bool:
        """True if the rule replaces some gradients by directions, on the device."""
        return any(plane.on_device for plane in self.state_planes)

    def directs(self, layout: TileLayout) -> bool:
        """True if clipping leaves a tile out because it has directions (Muon with `clip: rest`)."""
        return any(self.directed(entry) for entry in layout.trainable)

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for name, values in self.choices.items():
            if (value := getattr(self, name)) not in values:
                choices = " or ".join(map(str, values))
                raise InputError(f"{kind} {name} is {value!r}; it must be {choices}")
        for name in self.settings:
            value = getattr(self, name)
            if name == "betas":
                is_pair = isinstance(value, tuple | list) and len(value) == 2
                if not is_pair or not all(is_number(beta) and 0 <= beta < 1 for beta in value):
                    raise InputError(
                        f"{kind} betas are {value!r}; they must be two numbers in [0, 1)"
                    )
                object.__setattr__(self, "betas", tuple(value))
            elif not is_number(value) or not 0 <= value < math.inf:
                raise InputError(f"{kind} {name} is {value!r}; it must be a number, not negative")
        problem = f"{kind} no_decay is {self.no_decay!r}; it must be a list of patterns"
        with explained(problem, of=(re.error, TypeError)):
            if isinstance(self.no_decay, str):
                raise TypeError("this is one text")
            for pattern in self.no_decay:
                re.compile(pattern)
        object.__setattr__(self, "no_decay", tuple(self.no_decay))

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """torch parameter groups of the trainable parameters: those that decay, those that do not.

        The choice is that of transformers.Trainer (`get_decay_parameter_names`), which searches
        names in lower case. Here a pattern may also match a name as it is written.

        Raises InputError: a pattern of `no_decay` matches no parameter's name.
        """
        norms = [name for name, m in model.named_modules() if isinstance(m, nn.LayerNorm)]

        def decays(name: str) -> bool:
            skipped = any(_matches(pattern, name) for pattern in self.no_decay)
            return not skipped and not any(name.startswith(f"{norm}.") for norm in norms)

        names = [name for name, _ in model.named_parameters()]
        for pattern in self.no_decay:
            if pattern not in NO_DECAY and not any(_matches(pattern, name) for name in names):
                raise InputError(
                    f"optimizer.no_decay: no parameter has {pattern!r} in its name; this model has "
                    f"{in_one_line(', '.join(names), 300)}"
                )
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        decaying = {name for name, _ in named if decays(name)}
        groups: list[dict[str, Any]] = [
            {"params": [(n, p) for n, p in named if n in decaying]},
            {"params": [(n, p) for n, p in named if n not in decaying], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]


@cache  # plans try several rules with one model
def _matches(pattern: str, name: str) -> bool:
    """True if a pattern matches a parameter's name in the model or in a module of it."""
    parts = name.split(".")
    suffixes = [".".join(parts[start:]) for start in range(len(parts))]
    return any(re.search(pattern, text) for s in suffixes for text in (s, s.lower()))


@cache
def tile_planes(rule: Rule | None, dtype: torch.dtype) -> tuple[Plane, ...]:
    """The planes of a tile if layers compute in `dtype`; rule None: for inference.

    Raises InputError: the rule cannot train layers in `dtype`.
    """
    weights = Plane("weights", dtype, frozen=True, kind=PlaneKind.WEIGHTS)
    if rule is None:
        return (weights,)
    rule.check_dtype(dtype)
    if dtype != torch.bfloat16:
        return (weights, *rule.state_planes)
    remainder = Plane(
        "remainder",
        rule.remainder,
        frozen=True,
        only=lambda entry: entry.group is not None or entry.wide,  # masters with more bits
        kind=PlaneKind.REMAINDER,
    )
    return (weights, remainder, *rule.state_planes)


@cache
def gradient_plane(dtype: torch.dtype) -> Plane:
    """The plane that holds a gradient until its update."""
    return Plane("gradient", dtype, kind=PlaneKind.GRADIENT)


def parameter_bytes(rule: Rule | None, dtype: torch.dtype) -> float:
    """Bytes of a trained parameter, the gradient included: AdamW 14, in fp32 16.

    If a rule's planes differ between parameters, the bytes are those of a layer's matrix.
    """
    gradient = () if rule is None else (gradient_plane(dtype),)
    planes = (*tile_planes(rule, dtype), *gradient)
    return sum(plane.bytes_per_parameter for plane in planes if plane.has(_LAYER_MATRIX))


def moved_bytes(rule: Rule, dtype: torch.dtype) -> float:
    """Bytes of host-memory traffic of a parameter's update: AdamW 26, in fp32 28.

    The gradient is read; the other planes are read and written.
    """
    on_device = sum(plane.bytes_per_parameter for plane in rule.state_planes if plane.on_device)
    gradient = gradient_plane(dtype).bytes_per_parameter
    return 2 * (parameter_bytes(rule, dtype) - on_device) - gradient


@contextmanager
def master_of(tile: TileRange) -> Iterator[Tensor]:
    """Yield the fp32 master of a range, which the block may change in place; on any device."""
    master, on_host = tile.weights, tile.weights.is_cpu
    if tile.remainder is not None:
        master = torch.empty_like(tile.weights, dtype=torch.float32)
        (kernels.join if on_host else join_block)(tile.weights, tile.remainder, master)
    yield master
    if tile.remainder is not None:
        (kernels.split if on_host else split_block)(master, tile.weights, tile.remainder)


def is_number(value: object) -> TypeGuard[float]:
    """True for an int or a float, but not for True and False."""
    return isinstance(value, int | float) and not isinstance(value, bool)
