"""The units that sweeps visit: their base class, the prologue and the encoders.

A unit takes its streamed weights and a list of activations, one entry for each micro-batch. It puts
the forward or the backward of all micro-batches in turn on the device's compute stream.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatrain.base.seeds import derived_seed
from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, Kind, Name
from megatrain.engine.embedding import Embedding
from megatrain.engine.shared import Shared
from megatrain.engine.sink import GradAccumulator
from megatrain.model.capture import FEATURES, MEDIA, PROLOGUE, Ref
from megatrain.model.media import FrozenParts
from megatrain.model.micro_batch import Activations, Batch, MicroBatch
from megatrain.placement import ActivationPolicy
from megatrain.store.store import Tile

if TYPE_CHECKING:
    from megatrain.model.program import ModelProgram

State = list[Activations]


@dataclass
class Graph:
    """A unit's graph of one micro-batch, ready for its backward."""

    # autograd leaves by Ref; the rows of an embedding table by the table's name
    inputs: dict[Any, Tensor]
    parameters: dict[str, Tensor]
    edges: dict[Ref, GradientEdge]  # gradient edges of the outputs that need a gradient
    outputs: set[Ref]
    # the SavedTensors of a graph that waits. They must not refer to the graph, whose hooks refer to
    # them: Python cannot free such a cycle, half of which is in torch.
    saved: Any = None

    def backward(self, dh: Activations, accumulator: GradAccumulator) -> dict[Any, Tensor]:
        """Sum the parameters' gradients; return `dh`, for the inputs instead of the outputs."""
        pairs = [(self.edges[ref], dh[ref]) for ref in self.edges if ref in dh]
        passed_on = {ref: gradient for ref, gradient in dh.items() if ref not in self.outputs}
        inputs = {ref: value for ref, value in self.inputs.items() if value.requires_grad}
        sources = [*inputs.values(), *self.parameters.values()]
        if not (pairs and sources):
            return passed_on
        outputs, gradients = zip(*pairs, strict=True)
        grads = torch.autograd.grad(outputs, sources, gradients, allow_unused=True)
        accumulator.add(self.parameters, grads[len(inputs) :])
        for ref, gradient in zip(inputs, grads, strict=False):
            if gradient is not None:
                passed_on[ref] = passed_on[ref] + gradient if ref in passed_on else gradient
        return passed_on


def differentiable(values: Activations) -> Activations:
    """Activations as autograd leaves."""
    return {
        ref: value.detach().requires_grad_(value.is_floating_point())
        for ref, value in values.items()
    }


class StreamedModule:
    """A unit: a function of activations, with the weights of one tile.

    Attributes:
        prefix: cut from the tile's parameter names, to get the names that the program uses.
        visit: number of the layer, from 0; the other units have numbers of their own.
        inputs: the activations that the unit reads; new_inputs: those that no unit before reads.
        trained: True if any weights of the unit are trained.
        needs_backward: True if the unit or one before it is trained.
    """

    visit: int
    inputs: list[Ref]
    needs_backward = True

    def __init__(
        self, device: Device, program: "ModelProgram", tile: Tile, prefix: str = ""
    ) -> None:
        self.device, self.program, self.tile, self.prefix = device, program, tile, prefix
        self.inputs, self.new_inputs = list[Ref](), list[Ref]()
        self.trained = bool(tile.layout.trainable_numel)

    def begin(self) -> None:
        """Begin a step: drop what an aborted step has left."""

    def with_policies(self, policies: Sequence[ActivationPolicy]) -> Self:
        """A copy of this unit with its policy of `policies`; units but layers have none."""
        return self

    def weights(self, slot: Buffer) -> dict[str, Tensor]:
        """The tile's parameters in `slot`, by the program's names."""
        views = self.tile.layout.local.computed(slot.data)
        return {name.removeprefix(self.prefix): view for name, view in views.items()}

    def leaves(self, slot: Buffer) -> dict[str, Tensor]:
        """The tile's parameters in `slot` as autograd leaves, by the program's names."""
        weights = {name: view.detach() for name, view in self.weights(slot).items()}
        for entry in self.tile.layout.trainable:
            weights[entry.name.removeprefix(self.prefix)].requires_grad_()
        return weights

    def graph(
        self, weights: dict[str, Tensor], inputs: dict[Any, Tensor], outputs: Activations
    ) -> Graph:
        """The autograd graph from `inputs` and the leaves `weights` to `outputs`."""
        names = [entry.name for entry in self.tile.layout.trainable]
        parameters = {name: weights[name.removeprefix(self.prefix)] for name in names}
        edges = {ref: get_gradient_edge(v) for ref, v in outputs.items() if v.requires_grad}
        return Graph(inputs, parameters, edges, {*outputs})

    def seed(self, batch: Batch, index: int) -> None:
        """Seed by step, unit and micro-batch, so that a recomputation draws the same dropout."""
        self.device.seed(derived_seed(batch.seed, self.visit, batch.before + batch.first + index))

    def run_each(
        self,
        name: str,
        batch: Batch,
        work: Callable[..., Any],
        *states: Iterable[Activations],
        reads: Sequence[Buffer],
        writes: Sequence[Buffer] = (),
    ) -> list[Any]:
        """Put `work(micro, its activations in each state)` on COMPUTE for every micro-batch."""
        results = []
        # Strict `zip` exhausts all of `states`, which frees the buffers of the last one.
        for index, arguments in enumerate(zip(batch.micro, *states, strict=True)):
            self.seed(batch, index)
            results.append(self.device.run(COMPUTE, name, partial(work, *arguments), reads, writes))
        return results


class Media(StreamedModule):
    """The encoders: from images and sounds to features, which the prologue puts among tokens."""

    visit = MEDIA

    def __init__(self, shared: Shared, tile: Tile, embedding: Embedding) -> None:
        super().__init__(shared.device, shared.program, tile)
        self.embedding = embedding
        frozen_names = {entry.name for entry in tile.layout.entries if entry.group is None}
        self.frozen = FrozenParts(self.program.capture.model, frozen_names)

    def run(self, slot: Buffer, batch: Batch, h: State, *, train: bool) -> State:
        """The features of every micro-batch, `[N]` values; none if a micro-batch has no media."""
        name, work = Name(Kind.PROLOGUE, "media"), partial(self.forward, slot, train=train)
        return self.run_each(name, batch, work, reads=[slot, *self.embedding.rows])

    def forward(self, slot: Buffer, micro: MicroBatch, *, train: bool) -> Activations:
        if not micro.media:
            return {FEATURES: torch.empty(0, device=self.program.device)}
        frozen = self.frozen if train and self.trained else None  # keeps results for the backward
        with torch.no_grad():
            return {FEATURES: self.program.encode(self.weights(slot), micro, frozen=frozen)}

    def vjp(
        self, slot: Buffer, batch: Batch, h: Iterable, dh: State, accumulator: GradAccumulator
    ) -> State:
        """Accumulate gradients of the encoders' weights."""
        name, work = Name(Kind.PROLOGUE, "media backward"), partial(self.backward, slot)
        reads, writes = [slot, *self.embedding.rows], [accumulator.sums]
        self.run_each(name, batch, partial(work, accumulator), dh, reads=reads, writes=writes)
        return [{} for _ in batch.micro]

    def backward(
        self, slot: Buffer, accumulator: GradAccumulator, micro: MicroBatch, dh: Activations
    ) -> None:
        if FEATURES in dh:
            weights = self.leaves(slot)
            with torch.enable_grad():
                features_N = self.program.encode(weights, micro, self.frozen)
            self.graph(weights, {}, {FEATURES: features_N}).backward(dh, accumulator)


class Prologue(StreamedModule):
    """From token ids to the first layer's arguments; the embedding rows come from `embedding`."""

    visit = PROLOGUE

    def __init__(self, shared: Shared, tile: Tile, embedding: Embedding) -> None:
        super().__init__(shared.device, shared.program, tile)
        self.embedding = embedding
        self.trained |= bool(embedding.trained)

    def run(self, slot: Buffer, batch: Batch, h: State, *, train: bool) -> State:
        """The first activations of every micro-batch; `h` has the features of media, if any."""
        name, work = Name(Kind.PROLOGUE, "prologue"), partial(self.forward, slot)
        return self.run_each(name, batch, work, h, reads=[slot, *self.embedding.rows])

    def forward(self, slot: Buffer, micro: MicroBatch, h: Activations) -> Activations:
        """The first layers' inputs; the micro-batch's rows become leaves, for `backward`."""
        tables = micro.rows.tables
        tables.update({n: table.detach().requires_grad_() for n, table in tables.items()})
        # `requires_grad` tells the program which of the layers' arguments are activations.
        weights = {n: w.detach().requires_grad_() for n, w in self.weights(slot).items()}
        features_N = h.get(FEATURES) if micro.media else None
        with torch.enable_grad():
            values = self.program.prologue(weights, micro, features_N)
        return {ref: value.detach() for ref, value in values.items()}

    def vjp(
        self, slot: Buffer, batch: Batch, h: Iterable, dh: State, accumulator: GradAccumulator
    ) -> State:
        """Accumulate gradients of the prologue's weights, and of the embedding's rows."""
        if not batch.first:  # in the step's first pass
            self.embedding.prepare_gradients(batch)
        reads, writes = [slot, *self.embedding.rows], [accumulator.sums, *self.embedding.sums]
        name, work = Name(Kind.PROLOGUE, "prologue backward"), partial(self.backward, slot)
        work = partial(work, accumulator)
        inputs = h if self.inputs else [{} for _ in batch.micro]  # features of media, if any
        return self.run_each(name, batch, work, inputs, dh, reads=reads, writes=writes)

    def backward(
        self,
        slot: Buffer,
        accumulator: GradAccumulator,
        micro: MicroBatch,
        h: Activations,
        dh: Activations,
    ) -> Activations:
        """Accumulate a micro-batch's gradients; return those of its media's features, if any."""
        weights, features = self.leaves(slot), differentiable(h if micro.media else {})
        tables: dict[Any, Tensor] = {n: micro.rows.tables[n] for n in self.embedding.trained}
        with torch.enable_grad():
            values = self.program.prologue(weights, micro, *features.values())
        gradients = self.graph(weights, tables | features, values).backward(dh, accumulator)
        self.embedding.add({n: gradients.pop(n) for n in tables if n in gradients})
        return gradients
