"""Reads off the autograd graph which tensors another one was computed from."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatrain.model.capture import Ref


class _Tag(torch.autograd.Function):
    """Marks an activation in the autograd graph with its origin."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ref: Ref) -> Tensor:
        ctx.ref = ref
        return value.detach().clone().requires_grad_()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        return gradient[0], None


def tag(value: Tensor, ref: Ref) -> Tensor:
    """A copy of `value` by which `reach` knows what was computed from it."""
    anchor = torch.zeros((), dtype=value.dtype, requires_grad=True)
    with torch.enable_grad():
        return _Tag.apply(value + anchor, ref)


@dataclass
class AutogradDeps:
    """The tagged activations, and leaves (by id), that tensors depend on."""

    refs: set[Ref] = field(default_factory=set)
    leaves: set[int] = field(default_factory=set)


def reach(tensors: Iterable[Tensor]) -> AutogradDeps:
    """Walk the autograd graph of `tensors` back to tagged activations and leaves."""
    tensors = list(tensors)
    found, seen = AutogradDeps(), set()
    queue: list[Any] = [t.grad_fn for t in tensors]
    found.leaves.update(id(t) for t in tensors if t.requires_grad and t.grad_fn is None)
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "ref"):
            found.refs.add(node.ref)
        elif hasattr(node, "variable"):
            found.leaves.add(id(node.variable))
        else:
            queue.extend(parent for parent, _ in node.next_functions)
    return found
