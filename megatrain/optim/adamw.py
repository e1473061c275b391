"""AdamW with decoupled weight decay; the arithmetic is in megatrain/kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain import kernels
from megatrain.optim.rule import NO_DECAY, Plane, Rule


@dataclass(frozen=True)
class AdamW(Rule):
    """AdamW (Loshchilov and Hutter 2019), with torch.optim.AdamW's defaults for LLMs.

    Attributes:
        no_decay: patterns of names that do not decay, besides the parameters of nn.LayerNorm.
    """

    name = "adamw"
    settings = ("lr", "betas", "eps", "weight_decay")

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    no_decay: Sequence[str] = NO_DECAY

    @property
    def state_planes(self) -> tuple[Plane, ...]:
        return (Plane("first moment", torch.float32), Plane("second moment", torch.float32))

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
        kernels.adamw(
            weights,
            remainder,
            *states,
            grad,
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            grad_scale=grad_scale,
            threads=threads,
        )
