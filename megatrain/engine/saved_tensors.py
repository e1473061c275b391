"""Autograd graphs of layers, and what of them waits from the forward to the backward, and where.

A kept graph holds no weights and no inputs of its own: in the backward its layer's weights are in a
slot again, and its inputs are given again. All else that it saved either stays on the device or
waits on the host (engine/host_offload.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from megatrain.compat.torch import FakeTensor, memory_of, pytree
from megatrain.engine.sink import GradAccumulator
from megatrain.model.capture import Ref
from megatrain.model.program import Activations


@dataclass
class Graph:
    """One layer's graph of one micro-batch, ready for its backward."""

    inputs: Activations
    edges: dict[Ref, GradientEdge]
    sources: list[Tensor]
    names: list[str]

    @classmethod
    def of(
        cls, inputs: Activations, outputs: Activations, sources: list[Tensor], names: list[str]
    ) -> "Graph":
        """The graph whose results are `outputs`."""
        edges = {
            ref: get_gradient_edge(value) for ref, value in outputs.items() if value.requires_grad
        }
        return cls(inputs, edges, sources, names)

    def let_go(self) -> None:
        """Free the inputs' memory: autograd needs only their identity."""
        for value in self.inputs.values():
            value.data = value.data.new_empty(0)

    def backward(
        self, produced: Iterable[Ref], dh: Activations, accumulator: GradAccumulator
    ) -> Activations:
        """Accumulate the weights' gradients; in `dh`, replace the outputs' by the inputs'."""
        layer_outputs = set(produced)
        pairs = [(self.edges[ref], dh[ref]) for ref in self.edges if ref in dh]
        rest = {ref: gradient for ref, gradient in dh.items() if ref not in layer_outputs}
        if not pairs:
            return rest
        outputs, gradients = zip(*pairs, strict=True)
        differentiable = [ref for ref, value in self.inputs.items() if value.requires_grad]
        sources = [*(self.inputs[ref] for ref in differentiable), *self.sources]
        grads = torch.autograd.grad(outputs, sources, gradients, allow_unused=True)
        accumulator.add(self.names, grads[len(differentiable) :])
        return add(rest, differentiable, grads)


def add(total: Activations, refs: list[Ref], gradients: Iterable[Tensor | None]) -> Activations:
    """Add gradients of activations to `total`."""
    for ref, gradient in zip(refs, gradients, strict=False):
        if gradient is not None:
            total[ref] = total[ref] + gradient if ref in total else gradient
    return total


@dataclass(frozen=True)
class _View:
    """A tensor described by its place in memory that the backward can find again."""

    source: Any  # None: the weights; a Ref: an input; a number: one of `Leaving.memory`
    start: int  # bytes
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The byte after the view's last one."""
        reach = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.start + (reach + 1) * self.dtype.itemsize

    def on(self, memory: Tensor) -> Tensor:
        """The piece of `memory` at this place."""
        start = memory.storage_offset() * memory.itemsize + self.start
        piece = torch.empty(0, dtype=self.dtype, device=memory.device)
        offset = start // self.dtype.itemsize
        return piece.set_(memory.untyped_storage(), offset, self.size, self.stride)


class OffloadPlan:
    """Collects whole allocations to send to the host, so that all views of them are kept.

    Attributes:
        memory: the allocations, as bytes.
    """

    def __init__(self) -> None:
        self.memory: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def view(self, tensor: Tensor) -> _View:
        """Plan to send the tensor's allocation; the tensor's place in it."""
        memory = memory_of(tensor)
        if memory not in self._numbers:
            self._numbers[memory] = len(self.memory)
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self.memory.append(whole.set_(tensor.untyped_storage()))
        return _view(tensor, self._numbers[memory], 0)


def _view(tensor: Tensor, source: Any, begin: int) -> _View:
    start = int(tensor.storage_offset()) * tensor.itemsize - begin
    return _View(source, start, tensor.dtype, tensor.size(), tensor.stride())


class SavedTensors:
    """The tensors saved by a graph that is made within `saving()` and waits for its backward."""

    def __init__(
        self,
        weights: Tensor,
        inputs: Activations,
        outside: Iterable[Any],
        leaving: OffloadPlan | None,
    ) -> None:
        """Args: `outside`: other arguments, which stay on the device; `leaving` None: all stay."""
        self._weights, self._inputs, self._leaving = weights, inputs, leaving
        self._returned: list[Tensor] = []
        self._known: dict[int, Any] = {
            memory_of(value): ref for ref, value in inputs.items() if value.is_contiguous()
        }
        self._known[memory_of(weights)] = None
        self._outside = {memory_of(leaf) for leaf in outside if isinstance(leaf, Tensor)}

    def saving(self) -> saved_tensors_hooks:
        """Within this context autograd hands its saved tensors to this object."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def let_go(self) -> None:
        """Drop references to weights, inputs and tensors that leave, so that they can be freed."""
        self._weights, self._inputs, self._leaving = torch.empty(0), {}, None

    def give_back(self, weights: Tensor, inputs: Activations, returned: list[Tensor]) -> None:
        """Before the backward: set weights, inputs and tensors that are back from the host."""
        self._weights, self._inputs, self._returned = weights, inputs, returned

    def _pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, FakeTensor):  # a compiler at work
            return tensor
        memory = memory_of(tensor)
        if memory in self._known:
            source = self._known[memory]
            base = self._weights if source is None else self._inputs[source]
            view = _view(tensor, source, int(base.storage_offset()) * base.itemsize)
            if view.start >= 0 and view.stop <= base.nbytes:
                return view  # else it lies beside an input that is part of something larger
        if self._leaving is None or memory in self._outside:
            return tensor.detach()
        return self._leaving.view(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.source is None:
            return packed.on(self._weights)
        if isinstance(packed.source, Ref):
            return packed.on(self._inputs[packed.source])
        return packed.on(self._returned[packed.source])


@dataclass
class KeptGraph:
    """A graph that waits, and the tensors that it saved."""

    graph: Graph
    held: SavedTensors


class KeptAttention:
    """Results of a layer's attention, on the device or on their way to the host."""

    def __init__(self, results: list[Any], leaving: OffloadPlan | None) -> None:
        leaves, self._spec = pytree.tree_flatten(results)
        self._leaves = [
            leaving.view(leaf) if leaving is not None and isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]

    def results(self, returned: list[Tensor]) -> list[Any]:
        """The results as `attention.Replay` takes them."""
        leaves = [
            leaf.on(returned[leaf.source]) if isinstance(leaf, _View) else leaf
            for leaf in self._leaves
        ]
        return pytree.tree_unflatten(leaves, self._spec)
