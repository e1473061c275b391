"""Prices of the engine's pieces of work: nothing is run.

The engine hands a device methods with their arguments. Of each of these methods is told here what
it takes, by what was measured of the model (forecast/profile.py), what memory it takes and gives
back, and how large its results are. They have no values: each is memory that is `Held`.

What stands for several micro-batches (forecast/groups.py) holds as much as they do, and works on
one after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.engine.head import Head
from megatrain.engine.layer import Layer, Turn
from megatrain.engine.modules import Prologue
from megatrain.engine.saved_tensors import OffloadPlan
from megatrain.forecast.groups import grouped
from megatrain.forecast.layer_work import LayerWork
from megatrain.forecast.ledger import (
    ACTIVATIONS,
    KEPT_ATTENTION,
    KEPT_GRAPHS,
    WORKING_SET,
    Held,
    Ledger,
)
from megatrain.forecast.op_counter import Work, added
from megatrain.forecast.profile import Profile
from megatrain.model.capture import Call, Ref
from megatrain.model.program import MicroBatch
from megatrain.tile import TileLayout

# Of a graph that leaves or returns, what the bus takes from device memory besides the packing: a
# step of 7B with 15 graphs on the host takes 7.79 s, and is foretold 0.9 % less, without it 2.3 %.
_CROSSING = 2

_NO_WORK = Work()

Values = dict[Ref, Any]


class _Graph(NamedTuple):
    """The graph of a micro-batch at a layer, which waits for its backward.

    Attributes:
        first, second: the work that has made it, and that of the backward.
        held: memory that waits, if it is on the device.
    """

    first: Work
    second: Work
    held: Held | None


class _Visit:
    """The cost of a layer, for one micro-batch.

    Attributes:
        produced: bytes of its results; `input_grads`: of the gradients of its inputs.
        gradient_bytes: of its weights, before they are summed; `summed`: the work of that.
    """

    def __init__(
        self,
        work: LayerWork,
        produced: dict[Ref, int],
        input_grads: dict[Ref, int],
        gradient_bytes: int,
        summed: Work,
    ) -> None:
        self.work, self.produced, self.input_grads = work, produced, input_grads
        self.gradient_bytes, self.summed = gradient_bytes, summed
        self.produced_bytes, self.input_grad_bytes = (
            sum(produced.values()),
            sum(input_grads.values()),
        )
        self._sums: dict[Any, Work] = {}

    def sum(self, key: Any, make: Callable[[], Work]) -> Work:
        """A sum of works, made once."""
        known = self._sums.get(key)
        if known is None:
            known = self._sums[key] = make()
        return known


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
        self._of: dict[Any, Callable[..., tuple[Work, Any]]] = {
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
        """The work of a method of the engine, and its result; None: of this nothing is said."""
        method = getattr(work, "func", None)
        price = self._of.get(getattr(method, "__func__", None))
        if price is None:
            return None
        return price(work.func.__self__, *work.args, **work.keywords)

    def unpack(self, layout: TileLayout, stored: Tensor, out: Tensor) -> None:
        """Stands for the unpacking of weights on the device."""

    def _unpacked(self, _: Any, layout: TileLayout, *memory: Tensor) -> tuple[Work, None]:
        touched = (layout.numel + layout.unpacked.numel) * self._itemsize
        kernels = sum(entry.packed is not None for entry in layout.entries)
        return Work(touched_bytes=touched, kernels=kernels), None

    def _add(self, *works: Work) -> Work:
        """All works together, one after the other; peaks lie on top of what is alive now."""
        total = _NO_WORK
        for work in works:
            self._ledger.took(work.peak_bytes)
            total = work if total is _NO_WORK else added(total, work)
        return total

    def _visit(self, layer: Layer, rows: int) -> "_Visit":
        """The cost of a layer, for micro-batches of so many rows."""
        visit = self._visits.get((layer, rows))
        if visit is None:
            work = self._measured.layer(layer.visit, rows)
            produced = {ref: work.outputs[ref.leaf].num_bytes for ref in layer.outputs}
            shapes = {ref: self._measured.shape(ref, rows) for ref in layer.grad_inputs}
            input_grads = {r: s.num_bytes for r, s in shapes.items() if s.dtype.is_floating_point}
            trained = layer.tile.layout.trainable_numel
            # Sums are read and written, in bf16 by a kernel for each parameter.
            count = len(layer.tile.layout.trainable)
            summed = Work(
                touched_bytes=trained * (self._itemsize + 8),
                kernels=count if self._itemsize < 4 else min(count, 1),
            )
            visit = _Visit(work, produced, input_grads, trained * self._itemsize, summed)
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
            first, second, place = work.forward, work.repeating or work.backward, WORKING_SET
            if saves == "graph":
                first, second, place = work.keeping, work.kept_backward, KEPT_GRAPHS
            elif saves == "all":
                first, second, place = work.again, work.backward, KEPT_GRAPHS
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
            done = visit.sum(
                ("forward", saves, stays, count),
                lambda: added(
                    first.times(count),
                    Work(touched_bytes=crossing, kernels=count * len(layer.inputs)),
                ),
            )
        elif train and layer.policy.saves == "attention":
            waiting = ledger.hold(KEPT_ATTENTION, work.again.attention_bytes * count)
            first = _beside_attention(work.again)
            ledger.took(first.peak_bytes, (count - 1) * visit.produced_bytes, WORKING_SET)
            ledger.took(first.kept_bytes)
            if leaving is not None:
                leaving.memory.append(waiting)
            layer.waiting[at.index] = [waiting] if leaving is None else []
            done = first.times(count)
        else:
            ledger.took(work.forward.peak_bytes)
            done = work.forward.times(count)
        return done, {**kept_on, **self._results(visit.produced, count)}

    def _results(self, produced: dict[Ref, int], count: int) -> Values:
        return {ref: self._ledger.hold(ACTIVATIONS, n * count) for ref, n in produced.items()}

    def _backward(
        self, layer: Layer, at: Turn, returned: Sequence[Any], dh: Values, accumulator: Any
    ) -> tuple[Work, Values]:
        ledger, count = self._ledger, grouped(at.micro)
        visit = self._visit(layer, len(at.micro.inputs["input_ids"]))
        waiting = layer.waiting.pop(at.index, None)
        if isinstance(waiting, _Graph):
            first, second, held = waiting
            crossing = _CROSSING * sum(each.nbytes for each in returned)
            done = Work(touched_bytes=crossing) if crossing else _NO_WORK
        else:
            first, second = visit.work.again, visit.work.backward
            if waiting is not None:
                first = _beside_attention(first)._replace(attention_flops=0)
            # Each of a group is computed again after the one before it is done.
            ledger.took(first.peak_bytes)
            done = first.times(count)
            held = ledger.hold(WORKING_SET, first.kept_bytes)
            ledger.took(visit.produced_bytes)
        del waiting
        rest = {ref: gradient for ref, gradient in dh.items() if ref not in layer.outputs}
        if dh.keys().isdisjoint(visit.produced) and dh.keys().isdisjoint(layer.outputs):
            return done, rest
        # What is held already counts in the backward's peak.
        ledger.took(max(0, second.peak_bytes - first.kept_bytes))
        ledger.add_bytes(WORKING_SET, visit.gradient_bytes)
        ledger.took(visit.input_grad_bytes)
        if count > 1 and held is not None and held.nbytes:  # all but the last are done
            held = None
            held = ledger.hold(WORKING_SET, first.kept_bytes)
        # Of a group, each one's inputs are gone when the next one's gradients are made.
        own = [at.values[ref] for ref in visit.input_grads if ref in layer.new_inputs]
        gone = sum(value.nbytes for value in own if isinstance(value, Held))
        gone = gone * (count - 1) // count
        ledger.add_bytes(ACTIVATIONS, -gone)
        input_grads = {
            ref: ledger.hold(WORKING_SET, n * count) for ref, n in visit.input_grads.items()
        }
        del held
        ledger.add_bytes(ACTIVATIONS, gone)
        ledger.add_bytes(WORKING_SET, -visit.gradient_bytes)
        done = visit.sum(
            (done, second, count),
            lambda: added(done, added(second, visit.summed).times(count)),
        )
        for ref in input_grads.keys() & rest.keys():
            input_grads[ref] = ledger.hold(WORKING_SET, input_grads[ref].nbytes)
            done = added(done, Work(touched_bytes=3 * input_grads[ref].nbytes, kernels=1))
        return done, rest | input_grads

    def _prologue(
        self, prologue: Prologue, slot: Any, micro: MicroBatch, h: Values
    ) -> tuple[Work, Values]:
        rows, count, measured = len(micro.inputs["input_ids"]), grouped(micro), self._measured
        held = self._ledger.hold("layer arguments", count * measured.argument_bytes(rows))
        micro.calls = [Call([held], None)] * len(measured.spec.layers)
        sizes = {ref: shape.num_bytes for ref, shape in measured.entering(rows).items()}
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
        done = self._add(
            self._measured.head(self._head, rows, self._head_tokens, micro.loss).times(number)
        )
        input_grads = {
            ref: value.nbytes
            for ref, value in values.items()
            if self._measured.shape(ref, rows).dtype.is_floating_point
        }
        # Of a group, each one's activations are gone when the next one's gradients are made.
        gone = sum(input_grads.values()) * (number - 1) // number
        with ledger.more(ACTIVATIONS, -gone):
            return done, (
                loss,
                {ref: ledger.hold(ACTIVATIONS, n) for ref, n in input_grads.items()},
            )

    def _token_losses(
        self, head: Head, slot: Any, micro: MicroBatch, values: Values
    ) -> tuple[Work, Tensor]:
        rows, count = len(micro.inputs["input_ids"]), grouped(micro)
        work = self._measured.head_losses(self._head, rows, self._head_tokens)
        done = self._add(work.times(count))
        every = torch.empty(count, micro.inputs["input_ids"].numel(), device="meta")
        return done, self._ledger.made(every, WORKING_SET)[0]

    def _routed_total(self, head: Head, h: list[Values]) -> tuple[Work, Tensor]:
        spec, taken = self._measured.spec, 0
        for values in h:
            taken += sum(values.pop(ref).nbytes for ref in spec.routed)
        work = Work(touched_bytes=2 * taken, kernels=len(h) * len(spec.routed))
        return work, torch.empty(spec.routed_shape, device="meta")


def _beside_attention(work: Work) -> Work:
    """Work whose attention's results are kept: they are beside the graph that reads them."""
    size = work.attention_bytes
    return work._replace(peak_bytes=work.peak_bytes - size, kept_bytes=work.kept_bytes - size)
