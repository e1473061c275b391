"""Muon for the matrices of layers, AdamW for everything else."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from megatrain import kernels
from megatrain.errors import InputError
from megatrain.kernels.states import Scalars, TileRange, UpdateOptions
from megatrain.optim.pointwise import update_adamw
from megatrain.optim.rule import NO_DECAY, Plane, Rule, is_number
from megatrain.tile import Entry, TileLayout


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """True for a matrix of a numbered layer, or a stack of its experts' matrices."""
    is_in_layer = re.search(r"\.\d+\.", name) is not None
    has_matrices = len(shape) == 2 or (len(shape) == 3 and "experts" in name)
    return is_in_layer and has_matrices and min(shape[-2:]) > 1


def _is_matrix_entry(entry: Entry) -> bool:
    return is_matrix(entry.name, entry.shape)


def _is_other_entry(entry: Entry) -> bool:
    return not _is_matrix_entry(entry)


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Muon(Rule):
    """Muon as torch.optim.Muon (2.9 and newer) defines it, and torch.optim.AdamW for the rest.

    The device sums a matrix's gradient in fp32, replaces it by an orthogonal direction, and sends
    this to the host. In a stack of experts each expert has a matrix of its own.

    Attributes:
        lr, momentum, nesterov, weight_decay: those of torch.optim.Muon.
        clip: `rest`: tiles with matrices of layers are not clipped, and their updates do not wait
            for the norm. `all`: as in plain training all gradients are clipped; they are kept, and
            return to the device once the norm is known.
        adamw_lr: learning rate of all parameters but the matrices of layers; None: `lr`.
        betas, eps: those of AdamW.
        no_decay: patterns of names that do not decay, besides the parameters of nn.LayerNorm.
        adjust_lr_fn: `original` makes steps sqrt(max(1, rows / columns)) times as large;
            `match_rms_adamw` 0.2 sqrt(max(rows, columns)) times, so that AdamW's rates suit.
        ns_coefficients, ns_steps, ns_eps: settings of the Newton-Schulz iteration.
        ns_precision: of the iteration's products; `bf16`: that of torch.optim.Muon; `fp16` rounds
            less, and is faster if one side of a matrix is at least twice the other; `fp32`, for
            devices without bf16, needs layers in fp32.
    """

    name = "muon"
    sums_in_pass = True
    settings = ("lr", "momentum", "betas", "eps", "weight_decay")
    choices: ClassVar = {
        "nesterov": (False, True),
        "adjust_lr_fn": ("original", "match_rms_adamw"),
        "clip": ("rest", "all"),
        "ns_precision": ("bf16", "fp16", "fp32"),
    }
    further = ("adamw_lr", "ns_steps")
    needs_matrices = True
    launches = 18
    state_planes = (
        Plane("first moment", torch.float32, only=_is_other_entry),
        Plane("second moment", torch.float32, only=_is_other_entry),
        Plane("momentum", torch.float32, only=_is_matrix_entry, on_device=True),
    )

    lr: float = 1e-3
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    adamw_lr: float | None = None
    no_decay: Sequence[str] = NO_DECAY
    nesterov: bool = True
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    clip: Literal["rest", "all"] = "rest"
    ns_steps: int = 5
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_eps: float = 1e-7
    ns_precision: Literal["bf16", "fp16", "fp32"] = "bf16"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adamw_lr is not None and not (is_number(self.adamw_lr) and self.adamw_lr >= 0):
            raise InputError(f"Muon adamw_lr is {self.adamw_lr!r}; it must be a number, or None")
        if not isinstance(self.ns_steps, int) or not 1 <= self.ns_steps < 100:
            raise InputError(f"Muon ns_steps is {self.ns_steps!r}; it must be 1 to 99")
        if not self.momentum <= 1:
            raise InputError(f"Muon momentum is {self.momentum}; it must be 1 at most")
        object.__setattr__(self, "ns_coefficients", tuple(self.ns_coefficients))

    def check_dtype(self, dtype: torch.dtype) -> None:
        if self.ns_precision == "fp32" and dtype != torch.float32:
            raise InputError(
                "Muon ns_precision is fp32, but layers are computed in bf16; take bf16"
            )

    def directed(self, entry: Entry) -> bool:
        return _is_matrix_entry(entry)

    def directs(self, layout: TileLayout) -> bool:
        return self.clip == "rest" and super().directs(layout)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Groups without matrices, then those of matrices: moments of AdamW cover a prefix."""
        groups = []
        for of_matrices, group in product((False, True), super().groups(model)):
            named = [(n, p) for n, p in group["params"] if is_matrix(n, p.shape) == of_matrices]
            if named:
                name, parameter = named[0]
                groups.append(group | {"params": named, "lr": self.rate(name, parameter.shape)})
        return groups

    def rate(self, name: str, shape: Sequence[int]) -> float:
        return self.lr if self.adamw_lr is None or is_matrix(name, shape) else self.adamw_lr

    def average(
        self, gradient: Tensor, momentum: Tensor, group: Mapping[str, Any], proceed: Tensor
    ) -> None:
        """Average a range of a gradient into its momentum, on the device.

        Args:
            gradient: [N] float32, elements of one parameter; replaced by averages for `direct`.
            momentum: [N], of the same elements.
            proceed: bool; if it is False the momentum stays as it is.
        """
        average = momentum.lerp(gradient, 1 - group["momentum"])
        if self.nesterov:
            gradient.lerp_(average, group["momentum"])
        else:
            gradient.copy_(average)
        momentum.copy_(torch.where(proceed, average, momentum))

    def direct(self, averages: Tensor) -> None:
        """Replace averages by directions: each matrix `U S V'` (its SVD) by about `U V'`.

        Args: `averages`: a parameter's matrix, or matrices of its stack, [..., rows, columns].
        """
        is_tall = averages.shape[-2] > averages.shape[-1]
        x = averages.bfloat16() if self.ns_precision == "bf16" else averages
        x = x.mT if is_tall else x
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=self.ns_eps)
        # fp16 has no place for small gradients before the division.
        x = torch.div(x, norm, out=torch.empty_like(x, dtype=_DTYPES[self.ns_precision]))
        rows, columns = x.shape[-2:]
        uses_grams = self.ns_precision == "fp16" and columns >= 2 * rows
        x = self._iterate_on_grams(x) if uses_grams else self._iterate(x)
        averages.copy_(x.mT if is_tall else x)

    def _iterate(self, x: Tensor) -> Tensor:
        """The Newton-Schulz iteration of torch.optim.Muon on matrices [..., rows, columns]."""
        a, b, c = self.ns_coefficients
        add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
        for _ in range(self.ns_steps):
            gram = x @ x.mT
            x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x

    def _iterate_on_grams(self, x: Tensor) -> Tensor:
        """The polynomial of `_iterate`, with most of its products on the smaller Gram matrices.

        Gram Newton-Schulz of Dao-AILab. Its Gram matrix is computed anew after every third step,
        because its rounding errors add up.
        """
        a, b, c = self.ns_coefficients
        add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
        for first in range(0, self.ns_steps, 3):
            gram = x @ x.mT
            # A step multiplies by `factor + a I`. In fp16 `a I` is added in the products instead.
            factor = add_product(gram, gram, gram, beta=b, alpha=c)
            polynomial = factor.clone()
            polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
            for _ in range(first + 1, min(first + 3, self.ns_steps)):
                gram = add_product(gram, factor, gram, beta=a)
                gram = add_product(gram, gram, factor, beta=a)
                factor = add_product(gram, gram, gram, beta=b, alpha=c)
                polynomial = add_product(polynomial, factor, polynomial, beta=a)
            x = polynomial @ x
        return x

    def update(self, tile: TileRange, group: Mapping[str, Any], options: UpdateOptions) -> None:
        if tile.states:
            update_adamw(tile, group, options)
            return
        lr, (rows, columns) = float(group["lr"]), group["shape"][-2:]
        factor = 0.2 * math.sqrt(max(rows, columns))
        if self.adjust_lr_fn == "original":
            factor = math.sqrt(max(1, rows / columns))
        scalars = Scalars(-lr * factor, 1 - lr * group["weight_decay"])
        kernels.update("direction", tile, scalars, options)
