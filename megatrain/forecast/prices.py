"""The seconds that each piece of a step's work takes, by the rates of a machine."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.device import Buffer, base
from megatrain.device.base import Buffers, Kind, Memory, kind_of
from megatrain.device.recording import update_bytes
from megatrain.forecast.declared import Declared
from megatrain.forecast.op_counter import Work, counted
from megatrain.kernels.reference import UPDATE_BLOCK
from megatrain.machine import DISK_READ_GBPS, NETWORK_GBPS, Machine
from megatrain.optim import AdamW, PlaneKind, Rule, moved_bytes
from megatrain.telemetry.timeline import Span, overlap

# Resources slow each other down. An H200 with 16 cores copies 55.5 and 55.4 GB/s one way, but
# 101.7 GB/s in both directions at once; beside such copies AdamW updates 2.97 instead of 4.56
# Gparam/s: each byte over the bus takes 0.41 bytes from what updates can move.
_BOTH_WAYS = 101.7 / (55.5 + 55.4)
_TAKEN_PER_BUS_BYTE = moved_bytes(AdamW(), torch.bfloat16) * (4.56 - 2.97) / 101.7

# The device may have to wait for the thread that launches its work. Times of that thread, in
# launches of the machine (22 us where it was not measured): Python and torch around the kernels of
# a layer or a head; one of these kernels; one piece of work put on a stream. In a step of 0.5B,
# 16 x 1024 by 4, on an H200 the thread takes 0.95 ms for a compiled layer's 16 kernels and 1.95 for
# the 45 of its backward, the device 0.2 and 0.7; to put a boundary on its way takes 0.14 ms.
_PER_UNIT, _PER_KERNEL, _PER_PUT = 20, 1.4, 1.8

# At a collective, ranks wait 3 ms for the last of them, here in launches: two H200s take 0.10 s
# longer than one for 0.5B with its 78 collectives (ranks-2-0.5b-32x1024-h200).
_PER_COLLECTIVE = 136

# Launches for each of torch's operations in an update: 22 resident layers of 7B take Muon 0.89 s
# (step-7b-96x1024-muon-h200).
_PER_OPERATION = 0.92

# The model's own forward before the layers is Python and small kernels, whatever the batch, and
# reads positions, for which it waits: 2.6 to 6.9 ms forward and 2.2 to 5.4 backward for each
# micro-batch (step-0.5b-64x1024, step-3b-8x1024, step-3b-96x1024, step-7b-96x1024).
_PROLOGUE_SECONDS = 4e-3

# A GPU does not cache host memory: a product whose weights lie there reads them once for every so
# many tokens (an H200, 8,192 tokens: 41 times; in-place-7b-2-layers-8x1024-h200).
_TILE_TOKENS = 200

_GRAPHS = "graph", "all"  # values of `Policy.saves` with which a layer keeps its graph

_SMALL = 1 << 14  # elements: work on no more takes only its launches

# The parts of device memory, by the kind of a buffer.
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
    """The cost of a piece of work."""

    seconds: float = 0.0  # that the work takes its stream
    launching: float = 0.0  # seconds of the calling thread beyond `CostModel.put_seconds`
    blocking: bool = False  # True if the calling thread waits for the work
    num_bytes: int = 0  # of host memory that the work moves
    result: Any = None


class CostModel:
    """The cost of work on a machine, followed in groups of `group` micro-batches of `tokens`.

    Attributes:
        put_seconds: of the launching thread, for each piece of work on a stream of the device.
        puts: pieces of work that a layer puts on streams for each micro-batch.
        reads_in_place: True if the device reads some host memory without copying it.
    """

    def __init__(
        self,
        machine: Machine,
        rule: Rule | None = None,
        ranks: int = 1,
        hosts: int = 1,
        declared: Declared | None = None,
    ) -> None:
        """Prices of work on `hosts` that each have all of the model, shared by `ranks`.

        Args:
            rule: of updates; None: there are none.
            declared: the work of the engine's methods; other work on COMPUTE is counted by running
                it once for its sizes, on tensors without data. None: nothing runs on a device.
        """
        self._rule = rule
        self._declared: Any = declared
        self.group, self.puts, self.tokens, self.reads_in_place = 1, 2, 1, False
        self._key = rule, ranks, hosts  # in the keys of works that are counted
        # Without a measured link, cards of a host exchange through its memory: in and out again.
        through_host = min(machine.to_device_gbps, machine.from_device_gbps) / 2
        link = machine.link_gbps or through_host
        network = machine.network_gbps or NETWORK_GBPS / ranks
        self._ranks = {base.GATHER: ranks, base.REDUCE: ranks, base.HOSTS: hosts}  # by stream
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
        self._rate_alone = dict(self._rate)  # while no other stream works
        self.put_seconds = _PER_PUT * machine.launch_seconds

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        place = _PLACES[kind_of(name, Memory.OTHER)]
        memory = torch.empty(numel, dtype=dtype, device="meta")
        copies = self.group if place == _LANES else 1  # a lane serves one micro-batch of a group
        return self._declared.ledger.count(memory, place, memory.nbytes // copies)

    def copy(self, stream: str, num_bytes: int) -> float:
        return num_bytes / self._rate[stream]

    def run(
        self, stream: str, name: str, work: Callable[[], Any], reads: Buffers, writes: Buffers
    ) -> Cost:
        """The cost of work on a stream; only work on COMPUTE may have to be run for it."""
        kind = kind_of(name)
        if stream == base.COMPUTE:
            return self._on_compute(kind, work, reads, writes)
        if kind is Kind.UPDATE:
            moved = update_bytes(reads, writes)
            return Cost(moved / self._rate[base.UPDATE], num_bytes=moved)
        if stream == base.ROWS:  # rows are read and written; the largest buffer may be a table
            moved = 2 * min((b.data.nbytes for b in (*reads, *writes)), default=0)
            return Cost(moved / self._rate[base.ROWS], num_bytes=moved)
        if stream in (base.DISK_WEIGHTS, base.DISK_OUT):
            moved = sum(buffer.data.nbytes for buffer in reads)
            return Cost(moved / self._rate[stream], num_bytes=moved)
        if kind in (Kind.COLLECTIVE, Kind.ALL_REDUCE):
            written = sum(buffer.data.nbytes for buffer in writes)
            exchanges = 2 if kind is Kind.ALL_REDUCE else 1  # a reduce-scatter and a gather
            received = exchanges * written * (1 - 1 / self._ranks[stream])
            waiting = _PER_COLLECTIVE * self._machine.launch_seconds
            return Cost(waiting + received / self._link[stream])
        return Cost()

    def _on_compute(
        self, kind: Enum, work: Callable[[], Any], reads: Buffers, writes: Buffers
    ) -> Cost:
        if kind is Kind.NOTE:
            return Cost(result=work())
        crossing = self._in_place(kind, work, reads, writes) if self.reads_in_place else 0.0
        if kind is Kind.ROUND:  # a large model's gradients leave in thousands of pieces
            touched = sum(buffer.data.numel() for buffer in writes) * (4 + 2)  # from fp32 to bf16
            return Cost(crossing + touched / (self._machine.device_gbps * 1e9))
        if kind is Kind.UPDATE:
            sizes = [buffer.data.numel() for buffer in writes]
            # The smallest buffer is a moment of AdamW, which updates all but Muon's matrices.
            has_other_moments = self._rule is not None and self._rule.directing
            numel = max(sizes, default=0) - (min(sizes, default=0) if has_other_moments else 0)
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
            busy = self._busy(done, crossing * max(1, calls))
            return Cost(busy, self._launching(done, calls), result=result)
        if kind is Kind.HEAD:  # a joint loss of all tokens computes next to nothing
            return Cost()
        if kind is Kind.PACK:
            packed = Work(touched_bytes=2 * sum(b.data.nbytes for b in writes), kernels=1)
            return Cost(self._busy(packed), self._launching(packed, 0))
        done = self._counted(work, (*reads, *writes))
        return Cost(self._busy(done, crossing), self._launching(done, 0))

    def _in_place(self, kind: Enum, work: Any, reads: Buffers, writes: Buffers) -> float:
        """Seconds in which work of one micro-batch reads and writes host memory in place.

        A forward has one product for each weight, a backward or a head two; the backward of a kept
        graph has one. From a table, work reads as many bytes of rows as it writes elsewhere.
        """
        read, written = (
            sum(b.data.nbytes for b in buffers if kind_of(b.name) is Memory.IN_PLACE)
            for buffers in (reads, writes)
        )
        if kind in (Kind.LAYER, Kind.LAYER_BACKWARD, Kind.HEAD):
            kept_graph = kind is Kind.LAYER_BACKWARD and work.func.__self__.policy.saves in _GRAPHS
            products = 1 if kind is Kind.LAYER or kept_graph else 2
            return self.reading_in_place(products * read, self.tokens, written)
        if writes and not written:
            read = min(read, sum(buffer.data.nbytes for buffer in writes))
        return self.reading_in_place(read, written=written)

    def reading_in_place(self, num_bytes: int, tokens: int = 1, written: int = 0) -> float:
        """Seconds to read weights in host memory, for products of `tokens`, and to write there."""
        machine = self._machine
        gbps = machine.device_gbps if machine.one_memory else machine.to_device_gbps
        return (num_bytes * max(1, tokens // _TILE_TOKENS) + written) / (gbps * 1e9)

    def _counted(self, work: Callable[[], Any], buffers: Sequence[Buffer]) -> Work:
        """The work of a function, which runs once for all buffers of the same sizes."""
        sizes = [buffer.data.numel() for buffer in buffers]

        def count() -> Work:
            return counted(work, [buffer.data for buffer in buffers])[0]

        done = Work(touched_bytes=0, kernels=2)
        if sum(sizes) > _SMALL:
            function = getattr(work, "func", work)
            key = *self._key, function.__qualname__, *sizes
            done = self._declared.measured.counted(key, count)
        self._declared.ledger.note_peak(done.peak_bytes)
        return done

    def seconds(self, work: Work) -> float:
        """Seconds of a layer's work, launches included."""
        return max(self._busy(work), self._launching(work, 1))

    def _busy(self, work: Work, crossing: float = 0.0) -> float:
        """Seconds of the device if no launch is late; products take `crossing` seconds or more."""
        machine = self._machine
        products = work.product_flops + work.expert_flops / machine.experts
        return (
            max(crossing, products / (machine.matmul_tflops * 1e12))
            + work.attention_flops / (machine.attention_forward_tflops * 1e12)
            + work.attention_backward_flops / (machine.attention_backward_tflops * 1e12)
            + work.touched_bytes / (machine.device_gbps * 1e9)
            + (self._exchanging(work) if work.exchanged_bytes else 0.0)
        )

    def _exchanging(self, work: Work) -> float:
        """Seconds in which ranks exchange rows; half of the launches wait for counts of rows."""
        launches = work.kernels * _PER_KERNEL / 2 * self._machine.launch_seconds
        sent = work.exchanged_bytes * (1 - 1 / self._ranks[base.GATHER])
        return sent / self._link[base.GATHER] + launches

    def _launching(self, work: Work, calls: int) -> float:
        # `put_seconds` counts the first micro-batch's pieces of work on streams.
        puts = max(0, calls - 1) * self.puts * _PER_PUT
        launches = calls * _PER_UNIT + work.kernels * _PER_KERNEL + puts
        return launches * self._machine.launch_seconds

    def launching_updates(self, numel: float) -> float:
        """Seconds to launch updates of `numel` elements; 0: the rule has a kernel."""
        launches = 0 if self._rule is None else self._rule.launches
        return numel / UPDATE_BLOCK * launches * _PER_OPERATION * self._machine.launch_seconds

    def slow_down(self, spans: Sequence[Span]) -> None:
        """Set the next step's rates by the copies, updates and disk accesses that overlapped."""
        by_stream = {
            stream: [s for s in spans if s.stream == stream]
            for stream in (base.COPY_IN, base.COPY_OUT, base.UPDATE, *base.DISK_STREAMS)
        }
        busy = {stream: sum(s.seconds for s in worked) for stream, worked in by_stream.items()}
        both_ways = overlap(by_stream[base.COPY_IN], by_stream[base.COPY_OUT])
        for stream in (base.COPY_IN, base.COPY_OUT):
            share = both_ways / busy[stream] if busy[stream] else 0.0
            self._rate[stream] = self._rate_alone[stream] * (1 - share * (1 - _BOTH_WAYS))
        if busy[base.UPDATE]:
            moved = sum(
                self._rate[stream] * overlap(by_stream[base.UPDATE], by_stream[stream])
                for stream in (base.COPY_IN, base.COPY_OUT)
            )
            lost = _TAKEN_PER_BUS_BYTE * moved / busy[base.UPDATE]
            self._rate[base.UPDATE] = self._rate_alone[base.UPDATE] - lost
        # Sweeps read weights beside updates, which read and write: each gets a third of the disk.
        for stream in base.DISK_STREAMS:
            is_weights = stream == base.DISK_WEIGHTS
            rivals = (base.DISK_IN, base.DISK_OUT) if is_weights else (base.DISK_WEIGHTS,)
            beside = max(overlap(by_stream[stream], by_stream[rival]) for rival in rivals)
            share = beside / busy[stream] if busy[stream] else 0.0
            # DISK_IN's rate is that of reads beside writes, which have half of the disk each.
            third = self._rate_alone[base.DISK_IN] * 2 / 3
            self._rate[stream] = (1 - share) * self._rate_alone[stream] + share * third
