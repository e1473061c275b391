"""The work and memory of each method with which an engine computes a model.

An engine hands its device methods with their arguments. A forecast runs none of them, but prices
each: its work follows from the measurements of the model (forecast/profile.py), a ledger counts the
memory that the method takes and gives back, and its results are stand-ins for tensors (`Held`).
A group of micro-batches (`Group`) takes the work and the memory of all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.engine.head import Head
from megatrain.engine.layer import Layer, Turn
from megatrain.engine.modules import Media, Prologue
from megatrain.engine.saved_tensors import OffloadPlan
from megatrain.forecast.op_counter import Held, LayerWork, Ledger, Place, Work, added
from megatrain.forecast.profile import Profile, grouped
from megatrain.model.capture import ADDED, FEATURES, Call, Ref
from megatrain.model.micro_batch import MicroBatch
from megatrain.placement import Saves
from megatrain.tile import Entry, TileLayout
from megatrain.tile.formats import BLOCKS, FP8, PIECE

# 4-bit codes are looked up in a table: an H200 does so at a fifth of its memory's rate, in GB/s,
# with more launches a parameter (NF4 of 7B, 72B, gpt-oss-120B, its MXFP4; benchmarks/results).
_BY_TABLE_GBPS, _MORE_LAUNCHES = 4080 / 5, 4

# A graph that leaves for the host or returns touches this many times its bytes of device memory.
# So the forecast for 7B with 15 graphs on the host is 0.9 % below the measured 7.79 s; with a 0
# here it would be 2.3 % below.
_CROSSING = 2

Values = dict[Ref, Any]


class _Graph(NamedTuple):
    """A layer's graph that waits for its backward; `memory` is None if the host holds the graph."""

    forward: Work
    backward: Work
    memory: Held | None


class _Visit:
    """The work of a layer for one micro-batch, and the bytes of its results and gradients."""

    def __init__(
        self, work: LayerWork, layer: Layer, input_grads: dict[Ref, int], itemsize: int
    ) -> None:
        self.work, self.input_grads = work, input_grads
        self.produced = {ref: work.outputs[ref.leaf].num_bytes for ref in layer.outputs}
        self.produced_bytes = sum(self.produced.values())
        layout = layer.tile.layout.local
        self.gradient_bytes = layout.trainable_numel * itemsize
        # Gradients are added to fp32 sums (8: read and written), in bf16 by a kernel a parameter.
        kernels = len(layout.trainable) if itemsize < 4 else min(len(layout.trainable), 1)
        self.summing = Work(touched_bytes=layout.trainable_numel * (itemsize + 8), kernels=kernels)


class Declared:
    """The prices of all methods with which an engine computes a model; `ledger` counts memory."""

    def __init__(self, measured: Profile, head_tokens: int, gbps: float) -> None:
        """Args: `head_tokens`: tokens of a head's chunk; `gbps`: rate of device memory."""
        self.measured, self.ledger, self._gbps = measured, Ledger(), gbps
        self._head_tokens = head_tokens
        self._itemsize = measured.dtype.itemsize
        self._visits: dict[tuple[Layer, int], _Visit] = {}
        self._prices: dict[Any, Callable[..., tuple[Work, Any]]] = {
            Layer.forward: self._forward,
            Layer.backward: self._backward,
            Media.forward: self._encode,
            Media.backward: self._encode_again,
            Prologue.forward: self._prologue,
            Prologue.backward: self._prologue_backward,
            Head.gradients: self._gradients,
            Head.token_losses: self._token_losses,
            Head.routed_total: self._routed_total,
            Declared.unpack: self._unpacked,
        }

    def of(self, work: Any) -> tuple[Work, Any] | None:
        """The work and the result of a call of an engine's method; None: it is not priced here."""
        method = getattr(work, "func", None)
        price = self._prices.get(getattr(method, "__func__", None))
        if price is None:
            return None
        return price(work.func.__self__, *work.args, **work.keywords)

    def unpack(self, layout: TileLayout, stored: Tensor, out: Tensor) -> None:
        """Called where a real engine unpacks weights: does nothing, and has a price."""

    def _unpacked(self, _: Any, layout: TileLayout, *memory: Tensor) -> tuple[Work, None]:
        unpacked = [e for e in layout.entries if e.needs_unpacking]
        by_table = [e for e in unpacked if e.packed not in (None, FP8, BLOCKS)]
        touched = (layout.numel + layout.unpacked.numel) * self._itemsize
        if by_table:
            touched = int(touched * max(1.0, self._gbps / _BY_TABLE_GBPS))
        kernels = sum(2 if e.is_operand else e.packed is not None for e in layout.entries)
        kernels += _MORE_LAUNCHES * len(by_table)

        def scratch_bytes(entry: Entry) -> int:
            # All scales of a parameter are spread at once: three fp32 values for a block of 64.
            scratch = entry.numel * 12 // 64
            # Operands of float8 products are unpacked from NF4 first, to bf16.
            if entry.is_operand and entry.packed not in (None, FP8):
                scratch += entry.numel * 2
            if not self.measured.compiled:  # values and products in fp32, and indices of a table
                at_once = entry.numel if entry.is_operand else min(entry.numel, PIECE)
                scratch += at_once * (12 if entry.is_operand or entry in by_table else 8)
            return scratch

        self.ledger.note_peak(max(map(scratch_bytes, unpacked)))
        return Work(touched_bytes=touched, kernels=kernels), None

    def _of_group(self, work: Work, count: int) -> Work:
        """The work of `count` micro-batches; the peak of one is noted, beside all that is alive."""
        self.ledger.note_peak(work.peak_bytes)
        return work.times(count)

    def _visit(self, layer: Layer, rows: int) -> _Visit:
        visit, measured = self._visits.get((layer, rows)), self.measured
        if visit is None:
            work = measured.layer(layer.visit, rows)
            of_prologue = dict(measured.prologue(rows).results)
            # Tensors that a forward with images adds are there only if the rows have images.
            present = [r for r in layer.inputs if r.visit != ADDED or r in of_prologue]
            shapes = {r: measured.shape(r, rows) for r in present}
            input_grads = {r: s.num_bytes for r, s in shapes.items() if s.dtype.is_floating_point}
            visit = _Visit(work, layer, input_grads, self._itemsize)
            self._visits[layer, rows] = visit
        return visit

    def _forward(
        self, layer: Layer, turn: Turn, leaving: OffloadPlan | None, *, train: bool
    ) -> tuple[Work, Values]:
        ledger, count = self.ledger, grouped(turn.micro)
        visit = self._visit(layer, turn.micro.inputs["input_ids"].shape[0])
        saves = layer.graph_saves(turn) if train else None
        if saves is not None:
            done = self._forward_with_graph(layer, turn, visit, saves, leaving)
        elif train and layer.policy.saves == "attention":
            recompute = visit.work.recompute
            results = ledger.hold(Place.KEPT_ATTENTION, recompute.attention_bytes * count)
            forward = _beside_attention(recompute)
            others_bytes = (count - 1) * visit.produced_bytes
            ledger.note_peak(forward.peak_bytes, others_bytes, Place.WORKING_SET)
            ledger.note_peak(forward.kept_bytes)
            if leaving is not None:
                leaving.memory.append(results)
            layer.waiting[turn.index] = [results] if leaving is None else []
            done = forward.times(count)
        else:
            done = self._of_group(visit.work.forward, count)
        passed_on = {ref: value for ref, value in turn.values.items() if ref in layer.live_out}
        return done, {**passed_on, **self._results(visit.produced, count)}

    def _forward_with_graph(
        self, layer: Layer, turn: Turn, visit: _Visit, saves: Saves, leaving: OffloadPlan | None
    ) -> Work:
        """The work of a forward that keeps its graph: on the device, or (`leaving`) on the host."""
        ledger, count, work = self.ledger, grouped(turn.micro), visit.work
        forward, backward, place = {
            "graph": (work.keeping, work.kept_backward, Place.KEPT_GRAPHS),
            "all": (work.recompute, work.backward, Place.KEPT_GRAPHS),
            "nothing": (work.forward, work.repeating or work.backward, Place.WORKING_SET),
        }[saves]
        graph_bytes = forward.kept_bytes
        all_bytes = count * graph_bytes
        stays = leaving is None
        # The last micro-batch of a group has its peak beside the graphs and results of the others.
        others_bytes = (count - 1) * ((graph_bytes if stays else 0) + visit.produced_bytes)
        ledger.note_peak(forward.peak_bytes, others_bytes, place)
        memory = ledger.hold(place, all_bytes, all_bytes if stays else graph_bytes)
        layer.waiting[turn.index] = _Graph(forward, backward, memory if stays else None)
        crossing = 0
        if leaving is not None:
            crossing = _CROSSING * memory.nbytes
            leaving.memory.append(memory)
        # A graph's tensors are packed piece by piece, and its inputs are let go of.
        packing = Work(touched_bytes=crossing, kernels=count * len(layer.inputs))
        return added(forward.times(count), packing)

    def _results(self, num_bytes: Mapping[Ref, int], count: int) -> Values:
        return {ref: self.ledger.hold(Place.ACTIVATIONS, n * count) for ref, n in num_bytes.items()}

    def _backward(
        self, layer: Layer, turn: Turn, returned: Sequence[Any], dh: Values, accumulator: Any
    ) -> tuple[Work, Values]:
        ledger, count = self.ledger, grouped(turn.micro)
        visit = self._visit(layer, turn.micro.inputs["input_ids"].shape[0])
        waiting = layer.waiting.pop(turn.index, None)
        if isinstance(waiting, _Graph):
            forward, backward, graph = waiting
            # A graph that has returned from the host stays in its lanes.
            least_peak = backward.made_bytes if graph is None else 0
            done = Work(touched_bytes=_CROSSING * sum(memory.nbytes for memory in returned))
        else:
            forward, backward, least_peak = visit.work.recompute, visit.work.backward, 0
            if waiting is not None:
                forward = _beside_attention(forward)._replace(attention_flops=0)
            # Micro-batches of a group follow each other: one graph is alive at a time.
            done = self._of_group(forward, count)
            graph = ledger.hold(Place.WORKING_SET, forward.kept_bytes)
            ledger.note_peak(visit.produced_bytes)
        del waiting  # so that `graph` alone holds the graph's memory
        passed_on = {ref: gradient for ref, gradient in dh.items() if ref not in layer.outputs}
        if dh.keys().isdisjoint(layer.outputs):  # no gradient reaches the layer
            return done, passed_on
        # The graph already counts in the backward's peak.
        ledger.note_peak(max(least_peak, backward.peak_bytes - forward.kept_bytes))
        ledger.add_bytes(Place.WORKING_SET, visit.gradient_bytes)
        ledger.note_peak(sum(visit.input_grads.values()))
        if count > 1 and graph is not None and graph.nbytes:  # only the last graph is left
            graph = None  # frees all graphs of the group, before the last one counts alone
            graph = ledger.hold(Place.WORKING_SET, forward.kept_bytes)
        # The inputs of a micro-batch are gone when the gradients of the next one are made.
        inputs = [turn.values[ref] for ref in visit.input_grads if ref in layer.new_inputs]
        inputs_bytes = sum(value.nbytes for value in inputs if isinstance(value, Held))
        freed = inputs_bytes * (count - 1) // count
        ledger.add_bytes(Place.ACTIVATIONS, -freed)
        input_grads = {
            ref: ledger.hold(Place.WORKING_SET, n * count) for ref, n in visit.input_grads.items()
        }
        del graph
        ledger.add_bytes(Place.ACTIVATIONS, freed)
        ledger.add_bytes(Place.WORKING_SET, -visit.gradient_bytes)
        done = added(done, added(backward, visit.summing).times(count))
        for ref in input_grads.keys() & passed_on.keys():  # read both gradients, write their sum
            input_grads[ref] = ledger.hold(Place.WORKING_SET, input_grads[ref].nbytes)
            done = added(done, Work(touched_bytes=3 * input_grads[ref].nbytes, kernels=1))
        return done, passed_on | input_grads

    def _encode(self, media: Media, slot: Any, micro: MicroBatch, *, train: bool) -> Any:
        work, count = self.measured.media_work(micro.inputs["input_ids"].shape[0]), grouped(micro)
        if train and media.trained:
            micro.kept = [self.ledger.hold(Place.ACTIVATIONS, count * work.kept_bytes)]
        done = self._of_group(work.encoding, count)
        return done, self._results({FEATURES: work.feature_bytes}, count)

    def _encode_again(
        self, media: Media, slot: Any, sums: Any, micro: MicroBatch, dh: Values
    ) -> Any:
        work = self.measured.media_work(micro.inputs["input_ids"].shape[0])
        done = self._of_group(work.recompute, grouped(micro))
        micro.kept.clear()
        return done, None

    def _prologue(
        self, prologue: Prologue, slot: Any, micro: MicroBatch, h: Values
    ) -> tuple[Work, Values]:
        measured = self.measured
        rows, count = micro.inputs["input_ids"].shape[0], grouped(micro)
        results, argument_bytes = measured.prologue(rows)
        arguments = self.ledger.hold(Place.ARGUMENTS, count * argument_bytes)
        micro.calls = [Call([arguments], None)] * len(measured.spec.layers)
        sizes = {ref: shape.num_bytes for ref, shape in results}
        work = Work(touched_bytes=2 * count * sum(sizes.values()), kernels=count, calls=count)
        if micro.media:
            work = self._of_group(measured.media_work(rows).entering, count)
        return work, self._results(sizes, count)

    def _prologue_backward(
        self, prologue: Prologue, slot: Any, sums: Any, micro: MicroBatch, h: Values, dh: Values
    ) -> tuple[Work, Values]:
        work, values = self._prologue(prologue, slot, micro, h)
        row_bytes = sum(micro.rows.tables[name].nbytes for name in prologue.embedding.trained)
        numel = prologue.tile.layout.trainable_numel
        if values.keys().isdisjoint(dh) or not (row_bytes or numel or h):  # nothing to compute
            return work, {}
        if micro.media:
            rows = micro.inputs["input_ids"].shape[0]
            self.ledger.note_peak(self.measured.media_work(rows).leaving.peak_bytes)
        self.ledger.note_peak(row_bytes + numel * self._itemsize)
        # 8: a sum in fp32 is read and written.
        summed = (row_bytes // self._itemsize + numel) * (self._itemsize + 8)
        kernels = len(micro.rows.tables) + len(prologue.tile.layout.trainable)
        summing = Work(touched_bytes=work.touched_bytes + summed, kernels=work.kernels + kernels)
        input_grads = {ref: self.ledger.hold(Place.ACTIVATIONS, h[ref].nbytes) for ref in h}
        return added(work, summing), input_grads

    def _gradients(
        self, head: Head, slot: Any, count: float, sums: Any, micro: MicroBatch, values: Values
    ) -> tuple[Work, tuple[Tensor, Values]]:
        rows, num_micro = micro.inputs["input_ids"].shape[0], grouped(micro)
        loss = torch.empty((), device="meta")
        work = self.measured.head(rows, self._head_tokens, micro.loss)
        done = self._of_group(work, num_micro)
        group_bytes = {
            ref: value.nbytes
            for ref, value in values.items()
            if self.measured.shape(ref, rows).dtype.is_floating_point
        }
        # Micro-batches of a group follow each other: the activations of one are freed before the
        # gradients of the next are made.
        freed = sum(group_bytes.values()) * (num_micro - 1) // num_micro
        self.ledger.add_bytes(Place.ACTIVATIONS, -freed)
        gradients = self._results(group_bytes, 1)
        self.ledger.add_bytes(Place.ACTIVATIONS, freed)
        return done, (loss, gradients)

    def _token_losses(
        self, head: Head, slot: Any, micro: MicroBatch, values: Values
    ) -> tuple[Work, Tensor]:
        rows, count = micro.inputs["input_ids"].shape[0], grouped(micro)
        done = self._of_group(self.measured.head_losses(rows, self._head_tokens, micro.loss), count)
        losses = torch.empty(count, micro.inputs["input_ids"].numel(), device="meta")
        return done, self.ledger.count(losses, Place.WORKING_SET)[0]

    def _routed_total(self, head: Head, h: list[Values]) -> tuple[Work, Tensor]:
        """Price the sum of routers' numbers over micro-batches, which leave `h`."""
        spec = self.measured.spec
        num_bytes = sum(values.pop(ref).nbytes for values in h for ref in spec.routed)
        work = Work(touched_bytes=2 * num_bytes, kernels=len(h) * len(spec.routed))
        return work, torch.empty(spec.routed_shape, device="meta")


def _beside_attention(work: Work) -> Work:
    """Work whose attention's results are kept apart from its graph: they count elsewhere."""
    size = work.attention_bytes
    return work._replace(peak_bytes=work.peak_bytes - size, kept_bytes=work.kept_bytes - size)
