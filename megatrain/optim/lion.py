"""Lion: the sign of an interpolated momentum; one state of fp32 instead of AdamW's two."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatrain import kernels
from megatrain.kernels.states import Scalars, TileRange, UpdateOptions
from megatrain.optim.rule import NO_DECAY, Plane, Rule


@dataclass(frozen=True)
class Lion(Rule):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2).

    The paper takes a third to a tenth of AdamW's learning rate, and as much more weight decay.

    Attributes:
        lr, betas, weight_decay: as the paper has them (eta, beta1 and beta2, lambda).
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

    @property
    def state_planes(self) -> tuple[Plane, ...]:
        return (Plane("momentum", torch.float32),)

    def update(self, tile: TileRange, group: Mapping[str, Any], options: UpdateOptions) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        by = Scalars(-lr, 1 - lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2)
        kernels.update("lion", tile, by, options)
