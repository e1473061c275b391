"""Layers of which only works and shapes are known: their graphs hold memory, and nothing else.

A step has thousands of them, so they count for themselves what autograd would make of a black box.
What stands for several micro-batches holds as much as they do, and works on one after the other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.device import Device
from megatrain.engine.host_offload import HostOffload
from megatrain.engine.layer import Layer, Turn
from megatrain.engine.saved_tensors import KeptAttention, OffloadPlan, add
from megatrain.engine.sink import GradAccumulator
from megatrain.forecast.groups import grouped
from megatrain.forecast.layer_work import LayerWork, Shape
from megatrain.forecast.meta_program import ACTIVATIONS, KEPT_ATTENTION, KEPT_GRAPHS, WORKING_SET
from megatrain.forecast.op_counter import OpCounter, Work
from megatrain.forecast.profile import Profile
from megatrain.model.capture import Ref
from megatrain.model.program import Activations, MicroBatch, Program
from megatrain.placement import ActivationPolicy
from megatrain.store import Tile

# Of a graph that leaves or returns, what the bus takes from device memory besides the packing: a
# step of 7B with 15 graphs on the host takes 7.79 s, and is foretold 0.9 % less, without it 2.3 %.
_CROSSING = 2

_NOTHING = torch.empty(0)


class MetaLayer(Layer):
    """A layer that says what it takes, holds as much memory as a real one, and computes nothing."""

    def __init__(
        self,
        device: Device,
        program: Program,
        tile: Tile,
        visit: int,
        policy: ActivationPolicy,
        offload: HostOffload | None,
        measured: Profile,
        counter: OpCounter,
    ) -> None:
        super().__init__(device, program, tile, visit, policy, offload)
        self._measured, self._counter = measured, counter
        self._itemsize = measured.dtype.itemsize
        # Gradients in bf16 are added to sums in fp32 by a kernel for each parameter.
        module = program.spec.layers[visit].module
        trained = measured.once(
            ("trained", id(module)), lambda: sum(p.requires_grad for p in module.parameters())
        )
        self._adding = trained if self._itemsize < 4 else min(trained, 1)

    def _forward(self, at: Turn, leaving: OffloadPlan | None, *, train: bool) -> Activations:
        micro, values = at.micro, at.values
        work, count = self._work(micro), grouped(micro)
        saves = self._saves(at) if train else None
        if saves is not None:
            first, second, place = work.forward, work.repeating or work.backward, WORKING_SET
            if saves == "graph":
                first, second, place = work.keeping, work.kept_backward, KEPT_GRAPHS
            elif saves == "all":
                first, second, place = work.again, work.backward, KEPT_GRAPHS
            stays = leaving is None
            held, made = self._black_box(first, work, count, place, stays=stays)
            # What a graph holds is packed piece by piece, and its inputs are let go of.
            self._counter.add(Work(kernels=count * len(self.inputs)))
            if leaving is not None:
                self._counter.add(Work(touched_bytes=_CROSSING * held.nbytes))
                leaving.memory.append(held)
                held = _NOTHING
            self._waiting[at.index] = MetaGraph(
                self, micro, self._read(values), first, second, held
            )
            return made
        if train and self.policy.saves == "attention":
            kept = self._counted(work.again.attention_bytes * count, KEPT_ATTENTION)
            _, made = self._black_box(_beside_attention(work.again), work, count, WORKING_SET)
            self._waiting[at.index] = KeptAttention([kept], leaving)
            return made
        self._counter.add(work.forward.times(count))
        return self._made(work, count)

    def _ready(self, at: Turn, returned: list[Tensor]) -> Any:
        micro, values = at.micro, at.values
        waiting = self._waiting.pop(at.index, None)
        if isinstance(waiting, MetaGraph):
            crossed = sum(each.nbytes for each in returned)
            self._counter.add(Work(touched_bytes=_CROSSING * crossed))
            return waiting
        work = self._work(micro)
        first = work.again
        if waiting is not None:
            first = _beside_attention(first)._replace(attention_flops=0)
        # Each of a group is computed again after the one before it is done.
        self._counter.add(first.times(grouped(micro)))
        held = self._counted(first.kept_bytes, WORKING_SET)
        self._counter.took(sum(shape.num_bytes for shape in self._shapes(work)))
        return MetaGraph(self, micro, self._read(values), first, work.backward, held)

    def _work(self, micro: MicroBatch) -> LayerWork:
        return self._measured.layer(self.visit, len(micro.inputs["input_ids"]))

    def _read(self, values: Activations) -> dict[Ref, Shape]:
        return {ref: Shape(tuple(values[ref].shape), values[ref].dtype) for ref in self.inputs}

    def _shapes(self, work: LayerWork) -> list[Shape]:
        return [work.outputs[ref.leaf] for ref in self.made]

    def _black_box(
        self, first: Work, work: LayerWork, count: int, place: str, *, stays: bool = True
    ) -> tuple[Tensor, Activations]:
        """What waits for the backward, and the results; what does not stay leaves one by one."""
        results = sum(shape.num_bytes for shape in self._shapes(work))
        kept = first.kept_bytes
        # The last of a group has its peak on top of the others.
        with self._counter.more(place, (count - 1) * (kept * stays + results)):
            self._counter.add(first.times(count))
        held = torch.empty(count * kept, dtype=torch.uint8, device="meta")
        self._counter.made(held, place, count * kept if stays else kept)
        return held, self._made(work, count)

    def _made(self, work: LayerWork, count: int) -> Activations:
        shapes = zip(self.made, self._shapes(work), strict=True)
        return {
            ref: self._counter.made(s.times(count).empty("meta"), ACTIVATIONS) for ref, s in shapes
        }

    def _counted(self, num_bytes: int, place: str) -> Tensor:
        return self._counter.made(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), place)

    def pull(self, graph: "MetaGraph", made: Iterable[Ref], dh: Activations) -> Activations:
        """What `Graph.pull` takes and returns."""
        counter, count, first, second = (
            self._counter,
            grouped(graph.micro),
            graph.first,
            graph.second,
        )
        of_layer = set(made)
        rest = {ref: gradient for ref, gradient in dh.items() if ref not in of_layer}
        if not any(ref in dh for ref in self.made):
            return rest
        # What is held already counts in the backward's peak.
        peak = max(0, second.peak_bytes - first.kept_bytes)
        counter.add(second._replace(peak_bytes=peak).times(count))
        trained = self.tile.layout.trainable_numel
        likes = {ref: shape for ref, shape in graph.reads.items() if shape.dtype.is_floating_point}
        with counter.more(WORKING_SET, trained * self._itemsize):  # gradients of the weights
            counter.took(sum(like.num_bytes for like in likes.values()) // count)
            if count > 1 and len(graph.held):  # all but the last of a group are done
                graph.held = _NOTHING
                graph.held = self._counted(first.kept_bytes, WORKING_SET)
            pulled = {r: counter.made(s.empty("meta"), WORKING_SET) for r, s in likes.items()}
            graph.held = _NOTHING
            summed = trained * (self._itemsize + 8)  # sums are read and written
            counter.add(Work(touched_bytes=summed, kernels=self._adding).times(count))
        if rest.keys().isdisjoint(pulled):
            return rest | pulled
        with counter.placing(WORKING_SET), counter:
            return add(rest, list(pulled), pulled.values())


@dataclass
class MetaGraph:
    """The `Graph` of a `MetaLayer`: work and memory, no values.

    Attributes:
        reads: what the layer reads.
        first, second: its forward, which has made the graph, and its backward.
        held: memory that waits, if it is on the device.
    """

    layer: MetaLayer
    micro: MicroBatch
    reads: dict[Ref, Shape]
    first: Work
    second: Work
    held: Tensor

    def pull(self, made: Iterable[Ref], dh: Activations, room: GradAccumulator) -> Activations:
        """As `Graph.pull`."""
        return self.layer.pull(self, made, dh)


def _beside_attention(work: Work) -> Work:
    """Work whose attention's results are kept: they are beside the graph that reads them."""
    size = work.attention_bytes
    return work._replace(peak_bytes=work.peak_bytes - size, kept_bytes=work.kept_bytes - size)
