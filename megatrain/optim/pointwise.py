"""Rules that update each element by itself (the arithmetic is in megatrain/kernels)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from megatrain import kernels
from megatrain.errors import InputError
from megatrain.kernels import states
from megatrain.kernels.states import Scalars, TileRange, UpdateOptions
from megatrain.optim.rule import NO_DECAY, Plane, Rule

_MOMENTS = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.uint8),
}


@dataclass(frozen=True)
class AdamW(Rule):
    """AdamW (Loshchilov and Hutter 2019) as torch.optim.AdamW computes it.

    The defaults are those usual for language models, not torch's.

    Attributes:
        lr, betas, eps, weight_decay: those of torch.optim.AdamW.
        no_decay: patterns of names that do not decay, besides the parameters of nn.LayerNorm.
        states: the moments' format: fp32; bf16, rounded stochastically; or int8, codes with a
            scale for each group (megatrain/kernels/states.py). The master is fp32 with all of them.
        master: bits of the master: 32: exact fp32; 24: bf16 weights and 8 more bits, to which
            updates are rounded stochastically (for layers in bf16 alone).
    """

    name = "adamw"
    sums_in_pass = True
    settings = ("lr", "betas", "eps", "weight_decay")
    choices: ClassVar = {"states": tuple(_MOMENTS), "master": (32, 24)}

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    no_decay: Sequence[str] = NO_DECAY
    states: Literal["fp32", "bf16", "int8"] = "fp32"
    master: Literal[32, 24] = 32

    @property
    def remainder(self) -> torch.dtype:
        return torch.int8 if self.master == 24 else torch.int16

    def check_dtype(self, dtype: torch.dtype) -> None:
        if self.master == 24 and dtype != torch.bfloat16:
            raise InputError("master is 24, but layers in fp32 keep all 32 bits; leave it out")

    @property
    def state_planes(self) -> tuple[Plane, ...]:
        names = ("first moment", "second moment")
        moments = [Plane(*pair) for pair in zip(names, _MOMENTS[self.states], strict=True)]
        if self.states != "int8":
            return tuple(moments)
        scales = [Plane(f"{name} scale", torch.float32, group_size=states.GROUP) for name in names]
        return (*moments, *scales)

    def update(self, tile: TileRange, group: Mapping[str, Any], options: UpdateOptions) -> None:
        update_adamw(tile, group, options)


def update_adamw(tile: TileRange, group: Mapping[str, Any], options: UpdateOptions) -> None:
    """Update a range by AdamW; see `Rule.update`."""
    scalars = states.adamw_scalars(tile.states[0].dtype, options.step, group)
    kernels.update("adamw", tile, scalars, options)


@dataclass(frozen=True)
class Lion(Rule):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2).

    The paper divides AdamW's learning rate by 3 to 10, and multiplies its weight decay by as much.

    Attributes:
        lr, betas, weight_decay: the paper's eta, beta1 and beta2, lambda.
        no_decay: patterns of names that do not decay, besides the parameters of nn.LayerNorm.
    """

    name = "lion"
    sums_in_pass = True
    settings = ("lr", "betas", "weight_decay")
    launches = 28

    lr: float = 2e-6
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.5
    no_decay: Sequence[str] = NO_DECAY
    state_planes = (Plane("momentum", torch.float32),)

    def update(self, tile: TileRange, group: Mapping[str, Any], options: UpdateOptions) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        scalars = Scalars(-lr, 1 - lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2)
        kernels.update("lion", tile, scalars, options)


@dataclass(frozen=True)
class SGD(Rule):
    """SGD as torch.optim.SGD defines it: weight decay is added to the gradient.

    Attributes:
        lr, dampening, weight_decay: those of torch.optim.SGD.
        momentum: 0 keeps no state.
        no_decay: patterns of names that do not decay, besides the parameters of nn.LayerNorm.
        nesterov: needs momentum, and a dampening of 0.
    """

    name = "sgd"
    sums_in_pass = True
    settings = ("lr", "momentum", "dampening", "weight_decay")
    choices: ClassVar = {"nesterov": (False, True)}
    launches = 23

    lr: float = 1e-3
    momentum: float = 0.9
    dampening: float = 0.0
    weight_decay: float = 0.0
    no_decay: Sequence[str] = NO_DECAY
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise InputError(
                f"SGD nesterov needs momentum above 0 and dampening 0; they are {self.momentum} "
                f"and {self.dampening}"
            )

    @property
    def state_planes(self) -> tuple[Plane, ...]:
        return (Plane("momentum", torch.float32),) if self.momentum else ()

    def update(self, tile: TileRange, group: Mapping[str, Any], options: UpdateOptions) -> None:
        # As in torch, dampening does not apply to the first gradient.
        gradient_weight = 1.0 if options.step == 1 else 1 - group["dampening"]
        decay, momentum = group["weight_decay"], group["momentum"]
        scalars = Scalars(-float(group["lr"]), decay, momentum, gradient_weight)
        rule = "sgd nesterov" if self.nesterov else "sgd momentum" if tile.states else "sgd"
        kernels.update(rule, tile, scalars, options)
