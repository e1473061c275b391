"""Cross entropy as one operation, for whoever counts operations."""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("megatrain::cross_entropy", mutates_args=())
def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Of which only the shapes are of interest."""
    raise NotImplementedError


@cross_entropy.register_fake
def _(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    return logits_NV.new_empty((), dtype=torch.float32)


def _pull_cross_entropy(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return torch.empty_like(ctx.saved_tensors[0]).copy_(ctx.saved_tensors[0]), None


cross_entropy.register_autograd(
    _pull_cross_entropy, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
)
