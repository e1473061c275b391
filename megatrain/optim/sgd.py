"""SGD with momentum; one state of fp32, or none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from megatrain import kernels
from megatrain.errors import InputError
from megatrain.kernels.states import Scalars, TileRange, UpdateOptions
from megatrain.optim.rule import NO_DECAY, Plane, Rule


@dataclass(frozen=True)
class SGD(Rule):
    """SGD as torch.optim.SGD has it: weight decay is added to the gradient.

    Attributes:
        lr, dampening, weight_decay: as torch.optim.SGD takes them.
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
                f"SGD nesterov needs momentum and no dampening, and they are {self.momentum} and "
                f"{self.dampening}"
            )

    @property
    def state_planes(self) -> tuple[Plane, ...]:
        return (Plane("momentum", torch.float32),) if self.momentum else ()

    def update(self, tile: TileRange, group: Mapping[str, Any], options: UpdateOptions) -> None:
        # The first gradient is taken whole, whatever the dampening.
        fresh = 1.0 if options.step == 1 else 1 - group["dampening"]
        by = Scalars(-float(group["lr"]), group["weight_decay"], group["momentum"], fresh)
        rule = "sgd nesterov" if self.nesterov else "sgd momentum" if tile.states else "sgd"
        kernels.update(rule, tile, by, options)
