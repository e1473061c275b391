"""Prices of all that a step puts on a device: seconds and bytes, from a machine's rates.

The engine hands a device methods with their arguments. Each of these has a price in `Declared`, and
none is run: its work, by what was measured of the model (forecast/profile.py), the memory that it
takes and gives back, and its results, which are memory that is `Held`. A group of micro-batches
holds as much as they do.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.device import Buffer, base
from megatrain.device.base import Buffers, Kind, Memory, kind_of
from megatrain.device.recording import update_bytes
from megatrain.engine.head import Head
from megatrain.engine.layer import Layer, Turn
from megatrain.engine.modules import Media, Prologue
from megatrain.engine.saved_tensors import OffloadPlan
from megatrain.forecast.op_counter import Held, LayerWork, Ledger, Place, Work, added, counted
from megatrain.forecast.profile import Profile, grouped
from megatrain.kernels.reference import UPDATE_BLOCK
from megatrain.machine import DISK_READ_GBPS, NETWORK_GBPS, Machine
from megatrain.model.capture import ADDED, FEATURES, Call, Ref
from megatrain.model.micro_batch import MicroBatch
from megatrain.optim import AdamW, PlaneKind, Rule, moved_bytes
from megatrain.telemetry.timeline import Span, overlap
from megatrain.tile import TileLayout
from megatrain.tile.formats import BLOCKS, FP8

# What couples resources, measured on an H200 with 16 cores (55.5 and 55.4 GB/s one way):
# 101.7 GB/s in both directions at once, and 2.97 instead of 4.56 Gparam/s of AdamW's updates
# under such copies: a byte over the bus takes 0.41 from what an update may move.
_BOTH_WAYS = 101.7 / (55.5 + 55.4)
_TAKEN_PER_BUS_BYTE = moved_bytes(AdamW(), torch.bfloat16) * (4.56 - 2.97) / 101.7

# A device that is faster than the thread that launches waits for it. In launches of the machine
# (22 us where it was not measured): what Python and torch take around the kernels of a layer or a
# head, each of these kernels, and whatever is put on a stream. In a step of 0.5B, 16 x 1024 by 4,
# on an H200 a compiled layer's 16 kernels take 0.95 ms and the 45 of its backward 1.95, of which
# the device has 0.2 and 0.7 ms of work; a boundary takes 0.14 ms to its lane.
_PER_UNIT, _PER_KERNEL, _PER_PUT = 20, 1.4, 1.8

# At a collective ranks wait for the last of them: 3 ms beside its bytes, here in launches. Two
# H200s take 0.10 s longer than one for 0.5B with its 78 collectives (ranks-2-0.5b-32x1024-h200).
_PER_MEETING = 136

# Each of torch's operations of an update: 22 resident layers of 7B take Muon 0.89 s
# (step-7b-96x1024-muon-h200).
_PER_OPERATION = 0.92

# The model's own forward around the layers is Python and small kernels, whatever the batch, and
# looks at the positions, which waits for the device: 2.6 to 6.9 ms forward and 2.2 to 5.4 backward,
# a micro-batch (step-0.5b-64x1024, step-3b-8x1024, step-3b-96x1024, step-7b-96x1024).
_PROLOGUE_SECONDS = 4e-3

# Codes of four bits are looked up, by arithmetic: on an H200 at a fifth of its memory's rate, GB/s,
# with more launches a parameter (NF4 of 7B, 72B, gpt-oss-120B, its MXFP4; benchmarks/results).
_BY_TABLE_GBPS, _MORE_LAUNCHES = 4080 / 5, 4

# What a GPU reads of the host's memory does not stay in its cache: products read weights there anew
# for every so many tokens (an H200, 8,192 tokens: 41 times; in-place-7b-2-layers-8x1024-h200).
_TILE_TOKENS = 200

_GRAPHS = "graph", "all"  # saved by these policies

_SMALL = 1 << 14  # elements: what touches no more is only launched

# The parts of device memory, by what a buffer is.
_LANES = "lanes of the host"
_PLACES: dict[Enum, str] = {
    Memory.SLOTS: "slots",
    Memory.SUMS: "gradients and rows",
    Memory.KEPT_SUMS: "gradient sums",
    Memory.KEPT_WEIGHTS: "kept weights",
    Memory.GRADIENTS: "gradients and rows",
    Memory.LANES: _LANES,
    Memory.OTHER: "small buffers",
    **dict.fromkeys(PlaneKind, "resident tiles"),
}


class Cost(NamedTuple):
    """The cost of a piece of work.

    Attributes:
        seconds: of its stream.
        launching: seconds of the calling thread beyond `CostModel.put_seconds`.
        blocking: the caller waits until it is done.
        num_bytes: of host memory moved.
        result: what `Device.run` returns.
    """

    seconds: float = 0.0
    launching: float = 0.0
    blocking: bool = False
    num_bytes: int = 0
    result: Any = None


class CostModel:
    """The cost of work on a machine.

    Attributes:
        put_seconds: of the launching thread, for anything on a stream of the device.
        group: micro-batches that are followed as one; each of them is put on a stream `puts` times.
        tokens: of a micro-batch.
    """

    def __init__(
        self,
        machine: Machine,
        rule: Rule | None = None,
        ranks: int = 1,
        hosts: int = 1,
        declared: "Declared | None" = None,
    ) -> None:
        """Prices of a machine's work.

        Args:
            rule: of updates; None: none are.
            ranks: that share the model; `hosts`: times so many, each of which has all of it.
            declared: the work of the engine's methods; other work on COMPUTE is run once for its
                sizes, on tensors without data. None: nothing is put on a device.
        """
        self._rule = rule
        self._declared: Any = declared
        self.group, self.puts, self.tokens = 1, 2, 1
        self._shared = rule, ranks, hosts
        # If nothing is known, cards of a host exchange by way of it, in and out again.
        way = min(machine.to_device_gbps, machine.from_device_gbps) / 2
        link, network = machine.link_gbps or way, machine.network_gbps or NETWORK_GBPS / ranks
        self._ranks = {base.GATHER: ranks, base.REDUCE: ranks, base.HOSTS: hosts}  # of a collective
        self._link = {base.GATHER: link * 1e9, base.REDUCE: link * 1e9, base.HOSTS: network * 1e9}
        self._machine = machine
        self._rate = {
            base.COPY_IN: machine.to_device_gbps * 1e9,
            base.COPY_OUT: machine.from_device_gbps * 1e9,
            base.UPDATE: machine.update_gbps * 1e9,
            base.ROWS: machine.update_gbps * 1e9,
            base.DISK_IN: machine.disk_gbps * 1e9,
            base.DISK_OUT: machine.disk_gbps * 1e9,
            base.DISK_WEIGHTS: (machine.disk_read_gbps or DISK_READ_GBPS) * 1e9,
        }
        self._alone = dict(self._rate)
        self.put_seconds = _PER_PUT * machine.launch_seconds

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        place = _PLACES[kind_of(name, Memory.OTHER)]
        memory = torch.empty(numel, dtype=dtype, device="meta")
        grouped = self.group if place == _LANES else 1
        return self._declared.ledger.count(memory, place, memory.nbytes // grouped)

    def copy(self, stream: str, num_bytes: int) -> float:
        return num_bytes / self._rate[stream]

    def run(
        self, stream: str, name: str, work: Callable[[], Any], reads: Buffers, writes: Buffers
    ) -> Cost:
        """Work on COMPUTE is done, on tensors without data; what host threads do is estimated."""
        kind = kind_of(name)
        if stream == base.COMPUTE:
            return self._on_compute(kind, work, reads, writes)
        if kind is Kind.UPDATE:
            moved = update_bytes(reads, writes)
            return Cost(moved / self._rate[base.UPDATE], num_bytes=moved)
        if stream == base.ROWS:
            moved = 2 * min((b.data.nbytes for b in (*reads, *writes)), default=0)
            return Cost(moved / self._rate[base.ROWS], num_bytes=moved)
        if stream in (base.DISK_WEIGHTS, base.DISK_OUT):
            moved = sum(buffer.data.nbytes for buffer in reads)
            return Cost(moved / self._rate[stream], num_bytes=moved)
        if kind in (Kind.COLLECTIVE, Kind.ALL_REDUCE):
            written = sum(buffer.data.nbytes for buffer in writes)
            received = (1 + (kind is Kind.ALL_REDUCE)) * written * (1 - 1 / self._ranks[stream])
            meeting = _PER_MEETING * self._machine.launch_seconds
            return Cost(meeting + received / self._link[stream])
        return Cost()

    def _on_compute(
        self, kind: Enum, work: Callable[[], Any], reads: Buffers, writes: Buffers
    ) -> Cost:
        if kind is Kind.NOTE:
            return Cost(result=work())
        crossing = self._in_place(kind, work, reads, writes)
        if kind is Kind.ROUND:  # a large model's gradients leave in thousands of pieces
            rounded = Work(touched_bytes=sum(b.data.numel() for b in writes) * 6)
            return Cost(self._busy(rounded, crossing))
        if kind is Kind.UPDATE:
            sizes = [buffer.data.numel() for buffer in writes]
            # What has moments beside directions is AdamW's, which has a kernel.
            directing = self._rule is not None and self._rule.directing
            numel = max(sizes, default=0) - (min(sizes, default=0) if directing else 0)
            launching = self.launching_updates(numel)
            moved = update_bytes(reads, writes)
            return Cost(max(launching, moved / (self._machine.device_gbps * 1e9)), launching)
        if (priced := self._declared.of(work)) is not None:
            done, result = priced
            if kind is Kind.PROLOGUE:
                model = max(1, done.calls) * _PROLOGUE_SECONDS
                seconds = max(self._busy(done, crossing), self._launching(done, 0), model)
                return Cost(seconds, blocking=True, result=result)
            calls = max(1, done.calls) if kind is not Kind.OTHER else 0
            cost = self._cost(done, calls, crossing * max(1, calls))
            return Cost(*cost, result=result)
        if kind is Kind.HEAD:  # what losses of a whole step compute is next to nothing
            return Cost()
        if kind is Kind.PACK:
            packed = Work(touched_bytes=2 * sum(b.data.nbytes for b in writes), kernels=1)
            return Cost(*self._cost(packed, 0))
        return Cost(*self._cost(self._counted(work, (*reads, *writes)), 0, crossing))

    def _in_place(self, kind: Enum, work: Any, reads: Buffers, writes: Buffers) -> float:
        """Seconds in which work, of one micro-batch, uses host memory where it rests.

        A backward has two products for each weight, and so has a head; of a kept graph it has one.
        Of a table work reads as many rows as it writes elsewhere.
        """
        sizes = [
            sum(b.data.nbytes for b in buffers if kind_of(b.name) is Memory.IN_PLACE)
            for buffers in (reads, writes)
        ]
        if not any(sizes):
            return 0.0
        (read, written), machine = sizes, self._machine
        if kind in (Kind.LAYER, Kind.LAYER_BACKWARD, Kind.HEAD):
            kept = kind is Kind.LAYER_BACKWARD and work.func.__self__.policy.saves in _GRAPHS
            read *= max(1, self.tokens // _TILE_TOKENS) * (1 if kind is Kind.LAYER or kept else 2)
        elif writes and not written:
            read = min(read, sum(buffer.data.nbytes for buffer in writes))
        gbps = machine.device_gbps if machine.one_memory else machine.to_device_gbps
        return (read + written) / (gbps * 1e9)

    def _counted(self, work: Callable[[], Any], buffers: Sequence[Buffer]) -> Work:
        """Work that takes the same for the same buffers; it is run for the first ones."""
        sizes = [buffer.data.numel() for buffer in buffers]

        def count() -> Work:
            return counted(work, [buffer.data for buffer in buffers])[0]

        done = Work(touched_bytes=0, kernels=2)
        if sum(sizes) > _SMALL:
            function = getattr(work, "func", work)
            key = *self._shared, function.__qualname__, *sizes
            done = self._declared.measured.counted(key, count)
        self._declared.ledger.took(done.peak_bytes)
        return done

    def _cost(self, work: Work, calls: int, crossing: float = 0.0) -> tuple[float, float]:
        """Seconds of work on COMPUTE, and of the thread that launches it."""
        return self._busy(work, crossing), self._launching(work, calls)

    def seconds(self, work: Work) -> float:
        """Seconds of a layer's work, launches included."""
        return max(self._busy(work), self._launching(work, 1))

    def _busy(self, work: Work, crossing: float = 0.0) -> float:
        """Seconds of the device, if it never waits for a launch; products hide what is crossing."""
        machine = self._machine
        products = work.product_flops + work.expert_flops / machine.experts
        return (
            max(crossing, products / (machine.matmul_tflops * 1e12))
            + work.attention_flops / (machine.attention_forward_tflops * 1e12)
            + work.attention_backward_flops / (machine.attention_backward_tflops * 1e12)
            + work.touched_bytes / (machine.device_gbps * 1e9)
            + self._exchanging(work)
        )

    def _exchanging(self, work: Work) -> float:
        """Seconds of exchanges; the host waits for counts of rows before it launches the rest."""
        launches = work.kernels * _PER_KERNEL / 2 * self._machine.launch_seconds
        sent = work.exchanged_bytes * (1 - 1 / self._ranks[base.GATHER])
        return sent / self._link[base.GATHER] + launches * (work.exchanged_bytes > 0)

    def _launching(self, work: Work, calls: int) -> float:
        puts = max(0, calls - 1) * self.puts * _PER_PUT  # of all but the one that is put there
        launches = calls * _PER_UNIT + work.kernels * _PER_KERNEL + puts
        return launches * self._machine.launch_seconds

    def launching_updates(self, numel: float) -> float:
        """Seconds in which updates of so many elements are launched; 0: the rule has a kernel."""
        launches = 0 if self._rule is None else self._rule.launches
        return numel / UPDATE_BLOCK * launches * _PER_OPERATION * self._machine.launch_seconds

    def slow_down(self, spans: Sequence[Span]) -> None:
        """Take the rates of the next step from what ran at the same time in this one."""
        by_stream = {
            stream: [s for s in spans if s.stream == stream]
            for stream in (base.COPY_IN, base.COPY_OUT, base.UPDATE, *base.DISK_STREAMS)
        }
        busy = {stream: sum(s.seconds for s in ran) for stream, ran in by_stream.items()}
        both = overlap(by_stream[base.COPY_IN], by_stream[base.COPY_OUT])
        for stream in (base.COPY_IN, base.COPY_OUT):
            share = both / busy[stream] if busy[stream] else 0.0
            self._rate[stream] = self._alone[stream] * (1 - share * (1 - _BOTH_WAYS))
        if busy[base.UPDATE]:
            moved = sum(
                self._rate[stream] * overlap(by_stream[base.UPDATE], by_stream[stream])
                for stream in (base.COPY_IN, base.COPY_OUT)
            )
            taken = _TAKEN_PER_BUS_BYTE * moved / busy[base.UPDATE]
            self._rate[base.UPDATE] = self._alone[base.UPDATE] - taken
        # Sweeps read weights beside updates that read and write: each gets a third of the disk.
        for stream in base.DISK_STREAMS:
            weights = stream == base.DISK_WEIGHTS
            others = (base.DISK_IN, base.DISK_OUT) if weights else (base.DISK_WEIGHTS,)
            beside = max(overlap(by_stream[stream], by_stream[other]) for other in others)
            share = beside / busy[stream] if busy[stream] else 0.0
            third = self._alone[base.DISK_IN] * 2 / 3
            self._rate[stream] = (1 - share) * self._alone[stream] + share * third


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


class _Visit:
    """The cost of a layer, for one micro-batch."""

    def __init__(
        self, work: LayerWork, layer: Layer, input_grads: dict[Ref, int], itemsize: int
    ) -> None:
        self.work, self.input_grads = work, input_grads
        self.produced = {ref: work.outputs[ref.leaf].num_bytes for ref in layer.outputs}
        self.produced_bytes = sum(self.produced.values())
        layout = layer.tile.layout.local
        self.gradient_bytes = layout.trainable_numel * itemsize
        # Sums are read and written, in bf16 by a kernel for each parameter.
        kernels = len(layout.trainable) if itemsize < 4 else min(len(layout.trainable), 1)
        self.summed = Work(touched_bytes=layout.trainable_numel * (itemsize + 8), kernels=kernels)


class Declared:
    """The work of everything that an engine computes with a model; a ledger counts its memory."""

    def __init__(self, measured: Profile, head_tokens: int, gbps: float) -> None:
        """Args: `head_tokens`: whose logits the head computes at once; `gbps`: of device memory."""
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
        """The work of a method of the engine, and its result; None: it has no price here."""
        method = getattr(work, "func", None)
        price = self._prices.get(getattr(method, "__func__", None))
        if price is None:
            return None
        return price(work.func.__self__, *work.args, **work.keywords)

    def unpack(self, layout: TileLayout, stored: Tensor, out: Tensor) -> None:
        """Stands for the unpacking of weights on the device."""

    def _unpacked(self, _: Any, layout: TileLayout, *memory: Tensor) -> tuple[Work, None]:
        unpacked = [e for e in layout.entries if e.needs_unpacking]
        by_table = [e for e in unpacked if e.packed not in (None, FP8, BLOCKS)]
        touched = (layout.numel + layout.unpacked.numel) * self._itemsize
        touched = int(touched * max(1.0, self._gbps / _BY_TABLE_GBPS)) if by_table else touched
        kernels = sum(2 if e.multiplied else e.packed is not None for e in layout.entries)
        kernels += _MORE_LAUNCHES * len(by_table)
        # Scales are spread over their blocks, a parameter's at once: three fp32 values a block.
        # What is multiplied in float8 is unpacked from NF4 before, and in fp32 if not compiled.
        spread, eager = 12 / 64, 0 if self.measured.compiled else 12
        each = ((e, 2 * (e.packed not in (None, FP8)) + eager) for e in unpacked)
        self.ledger.took(max(int(e.numel * (spread + e.multiplied * more)) for e, more in each))
        return Work(touched_bytes=touched, kernels=kernels), None

    def _took(self, work: Work, count: int) -> Work:
        """The work of a group; its peak lies on top of what is alive now."""
        self.ledger.took(work.peak_bytes)
        return work.times(count)

    def _visit(self, layer: Layer, rows: int) -> _Visit:
        visit, measured = self._visits.get((layer, rows)), self.measured
        if visit is None:
            work, entering = measured.layer(layer.visit, rows), measured.prologue(rows).results
            absent = {r for r in layer.inputs if r.visit == ADDED} - {*dict(entering)}
            shapes = {r: measured.shape(r, rows) for r in layer.inputs if r not in absent}
            input_grads = {r: s.num_bytes for r, s in shapes.items() if s.dtype.is_floating_point}
            visit = _Visit(work, layer, input_grads, self._itemsize)
            self._visits[layer, rows] = visit
        return visit

    def _forward(
        self, layer: Layer, at: Turn, leaving: OffloadPlan | None, *, train: bool
    ) -> tuple[Work, Values]:
        ledger, count = self.ledger, grouped(at.micro)
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
            done = added(first.times(count), packing)
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
        return {ref: self.ledger.hold(Place.ACTIVATIONS, n * count) for ref, n in sizes.items()}

    def _backward(
        self, layer: Layer, at: Turn, returned: Sequence[Any], dh: Values, accumulator: Any
    ) -> tuple[Work, Values]:
        ledger, count = self.ledger, grouped(at.micro)
        visit = self._visit(layer, len(at.micro.inputs["input_ids"]))
        waiting = layer.waiting.pop(at.index, None)
        if isinstance(waiting, _Graph):
            first, second, held = waiting
            made = second.made_bytes if held is None else 0  # what has returned stays in its lanes
            crossing = _CROSSING * sum(graph.nbytes for graph in returned)
            done = Work(touched_bytes=crossing) if crossing else _NO_WORK
        else:
            first, second, made = visit.work.again, visit.work.backward, 0
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
        ledger.took(max(made, second.peak_bytes - first.kept_bytes))
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
        done = added(done, added(second, visit.summed).times(count))
        for ref in input_grads.keys() & rest.keys():
            input_grads[ref] = ledger.hold(Place.WORKING_SET, input_grads[ref].nbytes)
            done = added(done, Work(touched_bytes=3 * input_grads[ref].nbytes, kernels=1))
        return done, rest | input_grads

    def _encode(self, media: Media, slot: Any, micro: MicroBatch, *, train: bool) -> Any:
        work, count = self.measured.media_work(len(micro.inputs["input_ids"])), grouped(micro)
        if train and media.trained:
            micro.kept = [self.ledger.hold(Place.ACTIVATIONS, count * work.kept_bytes)]
        done = self._took(work.encoding, count)
        return done, self._results({FEATURES: work.feature_bytes}, count)

    def _encode_again(
        self, media: Media, slot: Any, sums: Any, micro: MicroBatch, dh: Values
    ) -> Any:
        work = self.measured.media_work(len(micro.inputs["input_ids"]))
        done = self._took(work.again, grouped(micro))
        micro.kept.clear()
        return done, None

    def _prologue(
        self, prologue: Prologue, slot: Any, micro: MicroBatch, h: Values
    ) -> tuple[Work, Values]:
        count, measured = grouped(micro), self.measured
        results, argument_bytes = measured.prologue(len(micro.inputs["input_ids"]))
        held = self.ledger.hold(Place.ARGUMENTS, count * argument_bytes)
        micro.calls = [Call([held], None)] * len(measured.spec.layers)
        sizes = {ref: shape.num_bytes for ref, shape in results}
        moved = count * sum(sizes.values())
        work = Work(touched_bytes=2 * moved, kernels=count, calls=count)
        if micro.media:
            work = self._took(measured.media_work(len(micro.inputs["input_ids"])).entering, count)
        return work, self._results(sizes, count)

    def _prologue_backward(
        self,
        prologue: Prologue,
        slot: Any,
        accumulator: Any,
        micro: MicroBatch,
        h: Values,
        dh: Values,
    ) -> tuple[Work, Values]:
        work, values = self._prologue(prologue, slot, micro, h)
        rows = sum(micro.rows.tables[name].nbytes for name in prologue.embedding.trained)
        numel = prologue.tile.layout.trainable_numel
        if values.keys().isdisjoint(dh) or not rows + numel + len(h):
            return work, {}
        if micro.media:
            length = len(micro.inputs["input_ids"])
            self.ledger.took(self.measured.media_work(length).leaving.peak_bytes)
        self.ledger.took(rows + numel * self._itemsize)
        summed = (rows // self._itemsize + numel) * (self._itemsize + 8)
        kernels = len(micro.rows.tables) + len(prologue.tile.layout.trainable)
        more = Work(touched_bytes=work.touched_bytes + summed, kernels=work.kernels + kernels)
        slopes = {ref: self.ledger.hold(Place.ACTIVATIONS, h[ref].nbytes) for ref in h}
        return added(work, more), slopes

    def _gradients(
        self,
        head: Head,
        slot: Any,
        count: float,
        accumulator: Any,
        micro: MicroBatch,
        values: Values,
    ) -> tuple[Work, tuple[Tensor, Values]]:
        number, rows, ledger = grouped(micro), len(micro.inputs["input_ids"]), self.ledger
        loss = torch.empty((), device="meta")
        work = self.measured.head(rows, self._head_tokens, micro.loss)
        done = self._took(work, number)
        sizes = {
            ref: value.nbytes
            for ref, value in values.items()
            if self.measured.shape(ref, rows).dtype.is_floating_point
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
        done = self._took(self.measured.head_losses(rows, self._head_tokens, micro.loss), count)
        every = torch.empty(count, micro.inputs["input_ids"].numel(), device="meta")
        return done, self.ledger.count(every, Place.WORKING_SET)[0]

    def _routed_total(self, head: Head, h: list[Values]) -> tuple[Work, Tensor]:
        spec = self.measured.spec
        taken = sum(values.pop(ref).nbytes for values in h for ref in spec.routed)
        work = Work(touched_bytes=2 * taken, kernels=len(h) * len(spec.routed))
        return work, torch.empty(spec.routed_shape, device="meta")


def _beside_attention(work: Work) -> Work:
    """Work whose attention's results are kept: they are beside the graph that reads them."""
    size = work.attention_bytes
    return work._replace(peak_bytes=work.peak_bytes - size, kept_bytes=work.kept_bytes - size)
