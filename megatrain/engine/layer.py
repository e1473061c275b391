"""One layer's forward and backward, and the tensors that wait from the one to the other."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from megatrain.compat.torch import pytree
from megatrain.device import Buffer
from megatrain.device.base import COMPUTE, Kind, Name
from megatrain.engine.modules import Graph, State, StreamedModule, differentiable
from megatrain.engine.saved_tensors import (
    HostOffload,
    KeepAttention,
    OffloadPlan,
    ReplayAttention,
    SavedTensors,
    packed_bytes,
)
from megatrain.engine.shared import Shared
from megatrain.engine.sink import GradAccumulator
from megatrain.model.capture import ADDED, Ref
from megatrain.model.micro_batch import Activations, Batch, MicroBatch
from megatrain.placement import ActivationPolicy, Saves


@dataclass(slots=True)
class Turn:
    """One micro-batch at a layer: its number, the layer's weights, its inputs and activations."""

    index: int
    slot: Buffer
    micro: MicroBatch
    values: Activations


class Layer(StreamedModule):
    """One layer of the stack.

    Attributes:
        policy: which tensors of the forward are saved for the backward, and where.
        new_inputs: the previous unit's outputs that this or a later layer reads.
        live_out: the activations that later units still read.
        waiting: by micro-batch, the graph or attention results that wait for the backward.
    """

    def __init__(
        self, shared: Shared, visit: int, policy: ActivationPolicy, offload: HostOffload
    ) -> None:
        """Args: `offload` moves tensors that `policy` saves on the host."""
        spec, tile = shared.program.spec, shared.layers[visit]
        super().__init__(shared.device, shared.program, tile, spec.layers[visit].name + ".")
        self.name = Name(Kind.LAYER, f"layer {visit}")
        self.backward_name = Name(Kind.LAYER_BACKWARD, f"{self.name} backward")
        self.visit, self.policy, self.offload = visit, policy, offload
        self.inputs = spec.layers[visit].inputs
        self.outputs = spec.outputs[visit]
        previous_outputs = spec.outputs[visit - 1] if visit else spec.prologue_outputs
        self.new_inputs = [ref for ref in previous_outputs if ref in spec.read]
        self.live_out = spec.live_after[visit]
        self.waiting: dict[int, Any] = {}

    def take_added(self) -> None:
        """Read the features that images add to this layer's input; pass on later layers'."""
        layers = range(self.visit, len(self.program.spec.layers))
        added, *added_later = (Ref(ADDED, visit) for visit in layers)
        self.inputs, self.new_inputs = [*self.inputs, added], [*self.new_inputs, added]
        self.live_out = self.live_out.union(added_later)

    def with_policies(self, policies: Sequence[ActivationPolicy]) -> Self:
        """A copy of the layer with its policy of `policies`.

        Layer and copy share one `waiting`, so that a step of the one drops the graphs that an
        aborted step of the other has left there.
        """
        layer = copy.copy(self)
        layer.policy = policies[self.visit]
        return layer

    def begin(self) -> None:
        """Drop the graphs that an aborted step has left, which also frees their memory."""
        self.waiting.clear()
        self.offload.begin()

    def run(self, slot: Buffer, batch: Batch, h: State, *, train: bool) -> State:
        """The activations after this layer, for every micro-batch."""
        train = train and self.needs_backward
        out = []
        offloads = train and self.policy.where == "host"
        for index, micro in enumerate(batch.micro):
            self.seed(batch, index)
            leaving = OffloadPlan() if offloads else None
            work = partial(self.forward, Turn(index, slot, micro, h[index]), leaving, train=train)
            out.append(self.device.run(COMPUTE, self.name, work, [slot]))
            if leaving is not None:
                later_bytes = packed_bytes(leaving.memory) * (len(batch.micro) - 1 - index)
                self.offload.send(self.visit, (self.visit, index), leaving.memory, later_bytes)
                leaving.memory = []  # the device's copies can be freed
        if offloads:
            takes = [[(self.visit, index)] for index in range(len(batch.micro))]  # one key each
            self.offload.expect(*takes)
        return out

    def forward(self, turn: Turn, leaving: OffloadPlan | None, *, train: bool) -> Activations:
        """One micro-batch's activations; `leaving` collects saved tensors to send to the host."""
        saves = self.graph_saves(turn) if train else None
        if saves is not None:
            inputs = {ref: value for ref, value in turn.values.items() if ref in self.inputs}
            outside = [*turn.micro.calls[self.visit].leaves, *self.program.buffers_of(self.visit)]
            saved = SavedTensors(turn.slot.data, inputs, outside, leaving)
            with saved.saving():
                graph, produced = self._run_with_graph(turn, saves)
            saved.release()
            for value in graph.inputs.values():  # free: autograd needs the tensors, not their data
                value.data = value.data.new_empty(0)
            graph.saved, self.waiting[turn.index] = saved, graph
        elif train and self.policy.saves == "attention":
            with KeepAttention() as attention:
                _, produced = self._run_with_graph(turn)
            results = attention.results
            if leaving is not None:
                results = pytree.tree_map_only(Tensor, leaving.view, results)
            self.waiting[turn.index] = results
        else:
            weights = self.weights(turn.slot)
            with torch.no_grad():
                produced = self.program.layer(self.visit, weights, turn.micro, turn.values)
        if leaving is not None:
            leaving.end()
        passed_on = {ref: value for ref, value in turn.values.items() if ref in self.live_out}
        return {**passed_on, **produced}

    def graph_saves(self, turn: Turn) -> Saves | None:
        """The tensors that the layer's graph saves for the backward; None: no graph is kept."""
        saves = self.policy.saves
        if saves == "nothing":  # a compiled graph recomputes all tensors within its backward
            return saves if self.program.repeats(self.visit, turn.micro) else None
        return None if saves == "attention" else saves

    def vjp(
        self, slot: Buffer, batch: Batch, h: Iterable, dh: State, accumulator: GradAccumulator
    ) -> State:
        """Sum the weights' gradients in `accumulator`; return the gradients of the inputs.

        Tensors that the forward did not save are computed again from `h`.
        """
        out = []
        for index, values in enumerate(h):  # `h` is exhausted, which frees its lanes
            self.seed(batch, index)
            turn = Turn(index, slot, batch.micro[index], values)
            for returned, buffers in self._returned():  # yields once
                work = partial(self.backward, turn, returned, dh[index], accumulator)
                reads = [slot, *buffers]
                out.append(
                    self.device.run(COMPUTE, self.backward_name, work, reads, [accumulator.sums])
                )
        return out

    def backward(
        self, turn: Turn, returned: list[Tensor], dh: Activations, accumulator: GradAccumulator
    ) -> Activations:
        """One micro-batch's gradients of the inputs; `returned`: tensors saved on the host."""
        waiting = self.waiting.pop(turn.index, None)
        if isinstance(waiting, Graph):
            waiting.saved.restore(turn.slot.data, turn.values, returned)
            return waiting.backward(dh, accumulator)
        with nullcontext() if waiting is None else ReplayAttention(waiting, returned):
            graph = self._run_with_graph(turn)[0]  # the outputs are freed before the backward
        return graph.backward(dh, accumulator)

    def _returned(self) -> Iterator[tuple[list[Tensor], list[Buffer]]]:
        """Yield once: a micro-batch's tensors that come back from the host, and their buffers."""
        if self.policy.where == "host":
            for [tensors], buffers in self.offload.take(1):
                yield tensors, buffers
            return
        self.offload.fetch_ahead()  # for the next layer whose tensors are on the host
        yield [], []

    def _run_with_graph(self, turn: Turn, saves: Saves | None = None) -> tuple[Graph, Activations]:
        """Run the layer's forward; return its graph, and the outputs detached from it."""
        weights = self.leaves(turn.slot)
        inputs = differentiable(
            {ref: value for ref, value in turn.values.items() if ref in self.inputs}
        )
        with torch.enable_grad():
            values = {**turn.values, **inputs}
            produced = self.program.layer(self.visit, weights, turn.micro, values, saves)
        detached = {ref: value.detach() for ref, value in produced.items()}
        return self.graph(weights, inputs, produced), detached
