"""Keeps attention's results in the forward for when the backward computes the layer again.

Recomputing attention over a row of 512 k tokens is a fifth of a step. Its results (the output and
the logarithms of the softmax's sums) are all that its backward needs besides queries, keys and
values, which are cheap. As torch.utils.checkpoint's selective checkpointing does it, beneath
autograd: the operation's own backward is recorded as usual.
"""

from typing import Any

import torch
from torch import Tensor

from megatrain.compat.torch import TorchDispatchMode, pytree, schema_of

_OPERATIONS = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
}


def _is_attention(func: Any, args: tuple, kwargs: dict) -> bool:
    """True for attention without dropout, whose random numbers would have to be drawn again."""
    if schema_of(func).name not in _OPERATIONS:
        return False
    names = [argument.name for argument in schema_of(func).arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return not arguments.get("dropout_p")


class Keep(TorchDispatchMode):
    """Keeps the results of attention within the context.

    Attributes:
        results: of each operation, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_attention(func, args, kwargs or {}):
            self.results.append(pytree.tree_map_only(Tensor, torch.Tensor.detach, result))
        return result


class Replay(TorchDispatchMode):
    """Gives results kept instead of computing attention, in the same order."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__()
        self._results = iter(results)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_attention(func, args, kwargs or {}):
            return pytree.tree_map_only(Tensor, torch.Tensor.detach, next(self._results))
        return func(*args, **(kwargs or {}))
