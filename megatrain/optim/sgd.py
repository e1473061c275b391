"""SGD with momentum; one state of fp32, or none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatrain.errors import InputError
from megatrain.optim.blocks import update_blocks
from megatrain.optim.rule import NO_DECAY, Plane, Rule


@dataclass(frozen=True)
class SGD(Rule):
    """SGD as torch.optim.SGD has it: weight decay is added to the gradient, in plain torch.

    Attributes:
        momentum: 0 keeps no state.
        no_decay: patterns of names that do not decay, besides the parameters of nn.LayerNorm.
        nesterov: needs momentum, and a dampening of 0.
    """

    name = "sgd"
    settings = ("lr", "momentum", "dampening", "weight_decay")
    choices: ClassVar = {"nesterov": (False, True)}
    pace = 0.2  # measured as Lion's

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

    def update(
        self,
        weights: Tensor,
        remainder: Tensor | None,
        states: Sequence[Tensor],
        grad: Tensor,
        group: Mapping[str, Any],
        *,
        at: int,
        step: int,
        grad_scale: float,
        threads: int,
    ) -> None:
        lr, decay = float(group["lr"]), group["weight_decay"]
        inertia, fresh = group["momentum"], 1 - group["dampening"]

        def move(master: Tensor, g: Tensor, buffer: Tensor | None = None) -> None:
            if decay:
                g.add_(master * decay)
            if buffer is not None:
                # The first gradient is taken whole, whatever the dampening.
                buffer.copy_(g) if step == 1 else buffer.mul_(inertia).add_(g * fresh)
                g = g.add_(buffer * inertia) if self.nesterov else buffer
            master.sub_(g * lr)

        update_blocks(weights, remainder, states, grad, grad_scale, move)
