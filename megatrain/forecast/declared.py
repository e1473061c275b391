"""Prices of the engine's pieces of work: nothing is run.

The engine hands a device methods with their arguments. Each of these has a price here: its work, by
what was measured of the model (forecast/profile.py), the memory that it takes and gives back, and
its results, which are memory that is `Held`. A group of micro-batches holds as much as they do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.engine.head import Head
from megatrain.engine.layer import Layer, Turn
from megatrain.engine.modules import Prologue
from megatrain.engine.saved_tensors import OffloadPlan
from megatrain.forecast.op_counter import (
    Held,
    LayerWork,
    Ledger,
    Place,
    Work,
    added,
)
from megatrain.forecast.profile import Once, Profile, grouped
from megatrain.model.capture import Call, Ref
from megatrain.model.program import MicroBatch
from megatrain.tile import TileLayout

# Of a graph that leaves or returns, what the bus takes from device memory besides the packing: a
# step of 7B with 15 graphs on the host takes 7.79 s; the forecast is 0.9 % less, without it 2.3 %.
_CROSSING = 2

_NO_WORK = Work()

Values = dict[Ref, Any]


class _Graph(NamedTuple):
    """The graph of a layer that waits for its backward: the works of both, and device memory."""

    first: Work
    second: Work
    held: Held | None


class _Visit(Once):
    """The cost of a layer, for one micro-batch; remembers sums of works."""

    def __init__(
        self, work: LayerWork, layer: Layer, input_grads: dict[Ref, int], itemsize: int
    ) -> None:
        super().__init__()
        self.work, self.input_grads = work, input_grads
        self.produced = {ref: work.outputs[ref.leaf].num_bytes for ref in layer.outputs}
        self.produced_bytes = sum(self.produced.values())
        layout = layer.tile.layout
        self.gradient_bytes = layout.trainable_numel * itemsize
        # Sums are read and written, in bf16 by a kernel for each parameter.
        kernels = len(layout.trainable) if itemsize < 4 else min(len(layout.trainable), 1)
        self.summed = Work(touched_bytes=layout.trainable_numel * (itemsize + 8), kernels=kernels)


class Declared:
    """The work and the memory of everything that an engine computes with a model."""

    def __init__(
        self, measured: Profile, ledger: Ledger, head: TileLayout, head_tokens: int
    ) -> None:
        """Args: `head`: layout of the head's tile, whose logits are of `head_tokens` at once."""
        self._measured, self._ledger = measured, ledger
        self._head, self._head_tokens = head, head_tokens
        self._itemsize = measured.dtype.itemsize
        self._visits: dict[tuple[Layer, int], _Visit] = {}
        self._prices: dict[Any, Callable[..., tuple[Work, Any]]] = {
            Layer.forward: self._forward,
            Layer.backward: self._backward,
            Prologue.forward: self._prologue,
            Prologue.backward: self._prologue_backward,
            Head.gradients: self._gradients,
            Head.token_losses: self._token_losses,
            Head.routed_total: self._routed_total,
            Declared.unpack: self._unpacked,
        }

    def of(self, work: Any) -> tuple[Work, Any] | None:
        """The work of a method of the engine, and its result; None: it has no price here."""
        method = getattr(work, "func", None)
        price = self._prices.get(getattr(method, "__func__", None))
        if price is None:
            return None
        return price(work.func.__self__, *work.args, **work.keywords)

    def unpack(self, layout: TileLayout, stored: Tensor, out: Tensor) -> None:
        """Stands for the unpacking of weights on the device."""

    def _unpacked(self, _: Any, layout: TileLayout, *memory: Tensor) -> tuple[Work, None]:
        touched = (layout.numel + layout.unpacked.numel) * self._itemsize
        kernels = sum(entry.packed is not None for entry in layout.entries)
        return Work(touched_bytes=touched, kernels=kernels), None

    def _took(self, work: Work, count: int) -> Work:
        """The work of a group; its peak lies on top of what is alive now."""
        self._ledger.took(work.peak_bytes)
        return work.times(count)

    def _visit(self, layer: Layer, rows: int) -> _Visit:
        visit, measured = self._visits.get((layer, rows)), self._measured
        if visit is None:
            work = measured.layer(layer.visit, rows)
            shapes = {ref: measured.shape(ref, rows) for ref in layer.grad_inputs}
            input_grads = {r: s.num_bytes for r, s in shapes.items() if s.dtype.is_floating_point}
            visit = _Visit(work, layer, input_grads, self._itemsize)
            self._visits[layer, rows] = visit
        return visit

    def _forward(
        self, layer: Layer, at: Turn, leaving: OffloadPlan | None, *, train: bool
    ) -> tuple[Work, Values]:
        ledger, count = self._ledger, grouped(at.micro)
        visit = self._visit(layer, len(at.micro.inputs["input_ids"]))
        work, stays = visit.work, leaving is None
        saves = layer.saves(at) if train else None
        kept_on = {ref: value for ref, value in at.values.items() if ref in layer.live_out}
        if saves is not None:
            first, second, place = work.forward, work.repeating or work.backward, Place.WORKING_SET
            if saves == "graph":
                first, second, place = work.keeping, work.kept_backward, Place.KEPT_GRAPHS
            elif saves == "all":
                first, second, place = work.again, work.backward, Place.KEPT_GRAPHS
            kept = first.kept_bytes
            # The last of a group has its peak on top of the others; what leaves does so one by one.
            before = (count - 1) * (kept * stays + visit.produced_bytes)
            ledger.took(first.peak_bytes, before, place)
            held = ledger.hold(place, count * kept, count * kept if stays else kept)
            layer.waiting[at.index] = _Graph(first, second, held if stays else None)
            crossing = 0
            if leaving is not None:
                crossing = _CROSSING * held.nbytes
                leaving.memory.append(held)
            # What a graph holds is packed piece by piece, and its inputs are let go of.
            packing = Work(touched_bytes=crossing, kernels=count * len(layer.inputs))
            key = "forward", saves, stays, count
            done = visit.once(key, lambda: added(first.times(count), packing))
        elif train and layer.policy.saves == "attention":
            waiting = ledger.hold(Place.KEPT_ATTENTION, work.again.attention_bytes * count)
            first = _beside_attention(work.again)
            ledger.took(first.peak_bytes, (count - 1) * visit.produced_bytes, Place.WORKING_SET)
            ledger.took(first.kept_bytes)
            if leaving is not None:
                leaving.memory.append(waiting)
            layer.waiting[at.index] = [waiting] if leaving is None else []
            done = first.times(count)
        else:
            done = self._took(work.forward, count)
        return done, {**kept_on, **self._results(visit.produced, count)}

    def _results(self, sizes: Mapping[Ref, int], count: int) -> Values:
        return {ref: self._ledger.hold(Place.ACTIVATIONS, n * count) for ref, n in sizes.items()}

    def _backward(
        self, layer: Layer, at: Turn, returned: Sequence[Any], dh: Values, accumulator: Any
    ) -> tuple[Work, Values]:
        ledger, count = self._ledger, grouped(at.micro)
        visit = self._visit(layer, len(at.micro.inputs["input_ids"]))
        waiting = layer.waiting.pop(at.index, None)
        if isinstance(waiting, _Graph):
            first, second, held = waiting
            crossing = _CROSSING * sum(graph.nbytes for graph in returned)
            done = Work(touched_bytes=crossing) if crossing else _NO_WORK
        else:
            first, second = visit.work.again, visit.work.backward
            if waiting is not None:
                first = _beside_attention(first)._replace(attention_flops=0)
            # Each of a group is computed again after the one before it is done.
            done = self._took(first, count)
            held = ledger.hold(Place.WORKING_SET, first.kept_bytes)
            ledger.took(visit.produced_bytes)
        del waiting
        rest = {ref: gradient for ref, gradient in dh.items() if ref not in layer.outputs}
        if dh.keys().isdisjoint(visit.produced) and dh.keys().isdisjoint(layer.outputs):
            return done, rest
        # What is held already counts in the backward's peak.
        ledger.took(max(0, second.peak_bytes - first.kept_bytes))
        ledger.add_bytes(Place.WORKING_SET, visit.gradient_bytes)
        ledger.took(sum(visit.input_grads.values()))
        if count > 1 and held is not None and held.nbytes:  # all but the last are done
            held = None
            held = ledger.hold(Place.WORKING_SET, first.kept_bytes)
        # Of a group, each one's inputs are gone when the next one's gradients are made.
        inputs = [at.values[ref] for ref in visit.input_grads if ref in layer.new_inputs]
        gone = sum(value.nbytes for value in inputs if isinstance(value, Held))
        gone = gone * (count - 1) // count
        ledger.add_bytes(Place.ACTIVATIONS, -gone)
        input_grads = {
            ref: ledger.hold(Place.WORKING_SET, n * count) for ref, n in visit.input_grads.items()
        }
        del held
        ledger.add_bytes(Place.ACTIVATIONS, gone)
        ledger.add_bytes(Place.WORKING_SET, -visit.gradient_bytes)
        before = done
        done = visit.once(
            (before, second, count),
            lambda: added(before, added(second, visit.summed).times(count)),
        )
        for ref in input_grads.keys() & rest.keys():
            input_grads[ref] = ledger.hold(Place.WORKING_SET, input_grads[ref].nbytes)
            done = added(done, Work(touched_bytes=3 * input_grads[ref].nbytes, kernels=1))
        return done, rest | input_grads

    def _prologue(
        self, prologue: Prologue, slot: Any, micro: MicroBatch, h: Values
    ) -> tuple[Work, Values]:
        count, measured = grouped(micro), self._measured
        results, _, argument_bytes = measured.prologue(len(micro.inputs["input_ids"]))
        held = self._ledger.hold(Place.ARGUMENTS, count * argument_bytes)
        micro.calls = [Call([held], None)] * len(measured.spec.layers)
        sizes = {ref: shape.num_bytes for ref, shape in results.items()}
        moved = count * sum(sizes.values())
        work = Work(touched_bytes=2 * moved, kernels=count, calls=count)
        return work, self._results(sizes, count)

    def _prologue_backward(
        self,
        prologue: Prologue,
        slot: Any,
        accumulator: Any,
        micro: MicroBatch,
        h: Values,
        dh: Values,
    ) -> tuple[Work, None]:
        work, values = self._prologue(prologue, slot, micro, h)
        rows = sum(micro.rows.tables[name].nbytes for name in prologue.embedding.trained)
        numel = prologue.tile.layout.trainable_numel
        if values.keys().isdisjoint(dh) or not rows + numel:
            return work, None
        self._ledger.took(rows + numel * self._itemsize)
        summed = (rows // self._itemsize + numel) * (self._itemsize + 8)
        kernels = len(micro.rows.tables) + len(prologue.tile.layout.trainable)
        more = Work(touched_bytes=work.touched_bytes + summed, kernels=work.kernels + kernels)
        return added(work, more), None

    def _gradients(
        self,
        head: Head,
        slot: Any,
        count: float,
        accumulator: Any,
        micro: MicroBatch,
        values: Values,
    ) -> tuple[Work, tuple[Tensor, Values]]:
        number, rows, ledger = grouped(micro), len(micro.inputs["input_ids"]), self._ledger
        loss = torch.empty((), device="meta")
        work = self._measured.head(self._head, rows, self._head_tokens, micro.loss)
        done = self._took(work, number)
        sizes = {
            ref: value.nbytes
            for ref, value in values.items()
            if self._measured.shape(ref, rows).dtype.is_floating_point
        }
        # Of a group, each one's activations are gone when the next one's gradients are made.
        gone = sum(sizes.values()) * (number - 1) // number
        ledger.add_bytes(Place.ACTIVATIONS, -gone)
        gradients = self._results(sizes, 1)
        ledger.add_bytes(Place.ACTIVATIONS, gone)
        return done, (loss, gradients)

    def _token_losses(
        self, head: Head, slot: Any, micro: MicroBatch, values: Values
    ) -> tuple[Work, Tensor]:
        rows, count = len(micro.inputs["input_ids"]), grouped(micro)
        done = self._took(self._measured.head_losses(self._head, rows, self._head_tokens), count)
        every = torch.empty(count, micro.inputs["input_ids"].numel(), device="meta")
        return done, self._ledger.count(every, Place.WORKING_SET)[0]

    def _routed_total(self, head: Head, h: list[Values]) -> tuple[Work, Tensor]:
        spec = self._measured.spec
        taken = sum(values.pop(ref).nbytes for values in h for ref in spec.routed)
        work = Work(touched_bytes=2 * taken, kernels=len(h) * len(spec.routed))
        return work, torch.empty(spec.routed_shape, device="meta")


def _beside_attention(work: Work) -> Work:
    """Work whose attention's results are kept: they are beside the graph that reads them."""
    size = work.attention_bytes
    return work._replace(peak_bytes=work.peak_bytes - size, kept_bytes=work.kept_bytes - size)
