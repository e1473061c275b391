"""The cost of a layer once it is compiled, predicted from its operations on tensors without data.

A compiled function differs from an eager one in what it writes to memory (torch._inductor, and the
partitioner of torch._functorch). Elementwise work and reductions are fused: of their results only
those are written that a matrix product or attention reads, that are returned, or that are small.
A graph keeps, for its backward, the operands of the backward's products, and those results of
products from which elementwise work can compute everything else again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Set
from typing import Any, NamedTuple

import networkx as nx
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatrain.compat.torch import SOFTMAX_BACKWARD, TorchDispatchMode, memory_of, schema_of
from megatrain.forecast.op_counter import (
    EXPERTS,
    LayerWork,
    OpCounter,
    Shape,
    Work,
    added,
    counted,
    is_view,
    tensors,
    work_of,
)
from megatrain.model.layer_template import KEPT_SHARE
from megatrain.model.micro_batch import Activations

# A result that is this many times smaller than what the operation reads is kept, not recomputed.
_SMALL = 16

# Fused kernels of a backward write several results, and sum over rows. In layers of 0.5B to 14B on
# an H200 they take this many times as long as a copy of the same bytes (benchmarks/results).
_BACKWARD_TOUCHES = 1.5

_FLOPS = 5  # the first fields of a `Work`: FLOPs and exchanged bytes

_UNITS = 10_000  # of memory, in torch's choice of what a graph keeps

# A graph keeps the results of these for its backward, as it does those of libraries: torch's
# partitioner does not count them among operations that a fused kernel computes.
_NOT_RECOMPUTED = {
    *("aten::cat", "aten::stack", "aten::constant_pad_nd", "aten::cumsum", "aten::sort"),
    *("aten::topk", "aten::scatter", "aten::scatter_add", "aten::index_add", "aten::index_put"),
}

# These operations read a tensor's shape alone.
_SHAPED_LIKE = ("aten::empty_like", "aten::new_", "aten::zeros_like", "aten::ones_like")


class Op(NamedTuple):
    """One operation, with the numbers of the storages that it reads and writes."""

    work: Work  # of a matrix product or attention; other operations are priced as fused kernels
    reads: tuple[int, ...]
    writes: tuple[int, ...]  # storages that no operation wrote before
    scratch_bytes: int = 0  # that the operation needs while it runs
    recomputed: bool = True  # True if a fused kernel of the backward may recompute the results
    # scratch in fp32, beyond `scratch_bytes`, if the graph was kept: so a layer of gpt-oss takes
    # 6.4 matrices of logits on an H200, and 4.4 where nothing is kept
    product_bytes: int = 0
    # True of products of experts and of cuDNN's attention, which torch's partitioner does not count
    # as heavy (`compute_intensive_ops`): within a budget a graph keeps their operands, and the
    # backward computes them again
    light: bool = False
    # True if the operation takes rows by index: some rows are read more than once
    gathers: bool = False

    @property
    def extern(self) -> bool:
        """True if a library's kernel computes the operation: nothing is fused with it."""
        return any(self.work[:_FLOPS])


class _Recorder(TorchDispatchMode):
    """Records operations without data, the bytes of their storages, and if any draws at random."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.sizes: list[int] = []
        self.random = False
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # all storages: no address is used twice

    def numbers(self, values: Any) -> set[int]:
        """The numbers of the tensors' storages; a new storage gets the next one."""
        numbers = set[int]()
        for tensor in tensors(values):
            storage, key = tensor.untyped_storage(), memory_of(tensor)
            if key not in self._numbers:
                self._numbers[key] = len(self.sizes)
                self.sizes.append(storage.nbytes())
                self._alive.append(storage)
            numbers.add(self._numbers[key])
        return numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        reads, first_new = self.numbers((args, kwargs)), len(self.sizes)
        out = func(*args, **kwargs)
        writes = sorted(n for n in self.numbers(out) if n >= first_new)
        if not is_view(func):
            work, scratch = work_of(func, args, kwargs, out)
            name = schema_of(func).name
            product_bytes = 4 * out.numel() if func is SOFTMAX_BACKWARD else 0
            op = Op(
                work,
                reads=() if name.startswith(_SHAPED_LIKE) else (*sorted(reads),),
                writes=(*writes,),
                scratch_bytes=scratch + product_bytes // 2,
                recomputed=name not in _NOT_RECOMPUTED,
                product_bytes=product_bytes,
                light=func is EXPERTS or work.attention_flops > 0,
                gathers=name == "aten::index",
            )
            self.ops.append(op)
        return out


class _Decomposed(TorchFunctionMode):
    """Makes a dropout that drops nothing of a view return a copy, as torch.compile does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        copied = func is F.dropout and out.nbytes < out.untyped_storage().nbytes()
        return out.clone() if copied else out


class Trace(NamedTuple):
    """The operations of a layer's forward, and from `split` on those of its backward.

    Storages are numbers: `sizes` has their bytes; `inputs` are those of weights, of the layer's
    inputs, and of the gradients of its results; the forward returns `results`, the backward
    `gradients`. `outputs` are the shapes of results by output leaf.
    """

    ops: list[Op]
    sizes: list[int]
    split: int
    inputs: set[int]
    results: set[int]
    gradients: set[int]
    random: bool
    outputs: dict[int, Shape]

    @property
    def structure(self) -> tuple:
        """The trace without sizes and works: where it is equal, these are affine in the rows."""
        ops = [(op.reads, op.writes, op.extern) for op in self.ops]
        return ops, self.split, self.inputs, self.results, self.gradients, self.random


def traced(run: Any, inputs: list[Any]) -> Trace:
    """The recorded operations of a layer's forward, which `run` calls, and of its backward."""
    recorder = _Recorder()
    with _Decomposed(), recorder:
        results = run()
        split = len(recorder.ops)
        values, grads = with_gradients(results)
        input_grads = torch.autograd.grad(values, leaves(inputs), grads, allow_unused=True)
    return Trace(
        ops=recorder.ops,
        sizes=recorder.sizes,
        split=split,
        inputs=recorder.numbers((inputs, grads)),
        results=recorder.numbers(list(results.values())),
        gradients=recorder.numbers(input_grads),
        random=recorder.random,
        outputs=shapes(results),
    )


def with_gradients(results: Activations) -> tuple[list[Tensor], list[Tensor]]:
    """A layer's results that require gradients, and an empty gradient for each."""
    values = [value for value in results.values() if value.requires_grad]
    return values, [torch.empty_like(value) for value in values]


def leaves(inputs: list[Any]) -> list[Tensor]:
    """The tensors among the inputs that require gradients."""
    return [leaf for leaf in inputs if isinstance(leaf, Tensor) and leaf.requires_grad]


def shapes(results: Activations) -> dict[int, Shape]:
    """The shapes of a layer's results, by output leaf."""
    return {ref.leaf: Shape.of(value) for ref, value in results.items()}


def eager_work(run: Callable[[], Activations], inputs: list[Any]) -> LayerWork:
    """The work of a layer, or a part of one, that is not compiled."""
    with torch.no_grad():
        forward, _ = counted(run, inputs)
    counter = OpCounter()
    with counter:
        counter.ignore(inputs)
        outputs = run()
    values, gradients = with_gradients(outputs)
    counter.ignore(gradients)
    result_bytes = sum(value.nbytes for value in outputs.values())
    kept_bytes = counter.total_bytes - result_bytes
    keeping = counter.work._replace(peak_bytes=counter.peak_bytes, kept_bytes=kept_bytes)
    counter.restart()
    with counter:
        torch.autograd.grad(values, leaves(inputs), gradients, allow_unused=True)
    peak_bytes = counter.peak_bytes - result_bytes
    backward = counter.work._replace(peak_bytes=peak_bytes, made_bytes=counter.made_bytes)
    # `keeping` and `kept_backward`: a graph that waits between the sweeps is a recomputed one.
    return LayerWork(forward, keeping, backward, keeping, backward, None, shapes(outputs))


def compiled_work(trace: Trace) -> LayerWork:
    """The work of a traced layer, or a part of one, that is compiled."""
    layer, random = Compiled(trace), trace.random
    share = None if random else KEPT_SHARE  # as model/layer_template.py compiles kept graphs
    return LayerWork(
        forward=layer.forward(),
        recompute=layer.forward(layer.held()),
        backward=layer.backward(),
        keeping=layer.forward(layer.held(share)),
        kept_backward=layer.backward(share),
        repeating=None if random else layer.backward(0.0),
        outputs=trace.outputs,
    )


class Compiled:
    """Forward and backward of a traced layer, compiled."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._forward, self._backward = trace.ops[: trace.split], trace.ops[trace.split :]
        self._producer = {n: op for op in trace.ops for n in op.writes}
        self._forward_index = {n: i for i, op in enumerate(self._forward) for n in op.writes}
        # The storages from which elementwise work alone computes each one.
        bases: dict[int, set[int]] = {}
        for op in self._forward:
            of_reads = {base for n in op.reads for base in bases.get(n, (n,))}
            for n in op.writes:
                is_heavy = (op.extern and not op.light) or self._small(n, op)
                bases[n] = {n} if is_heavy or n in trace.inputs else of_reads
        made_inside = self._forward_index.keys() - trace.inputs
        read = {n for op in self._backward for n in op.reads} & made_inside
        by_library = {n for op in self._backward if op.extern for n in op.reads} & made_inside
        # Results that only a product or attention could compute again for the backward.
        self._heavy = {base for n in read for base in bases[n]} & made_inside
        # Storages that a graph keeps by default, and the fewest that it keeps within a budget.
        self._saved = by_library | self._least_cut(read - by_library, by_library | trace.inputs)
        self._fewest = self._least_cut(read, trace.inputs, light=True)

    def forward(self, saved: Set[int] = frozenset()) -> Work:
        """The work of a forward that keeps its inputs and the storages `saved` for its backward."""
        work = self._phase(self._forward, set(), self._trace.results.union(saved))
        return work._replace(kept_bytes=self._size(saved - self._trace.results))

    def backward(self, share: float | None = None) -> Work:
        """The backward; the kept graph counts in its peak.

        Args:
            share: of the bytes that a graph keeps by default (torch._functorch's
                activation_memory_budget): products that do not fit are computed again. At 0 nothing
                is kept, and the backward begins with most of a forward. None: the default.
        """
        saved = self.held(share)
        ops = self._with_recomputed(saved)
        if share != 0:
            ops = [op._replace(scratch_bytes=op.scratch_bytes + op.product_bytes) for op in ops]
        work = self._phase(ops, saved, self._trace.gradients)
        by_library = sum(op.work.touched_bytes for op in ops if op.extern)
        fused = _BACKWARD_TOUCHES * (work.touched_bytes - by_library)
        return work._replace(touched_bytes=int(fused) + by_library)

    def held(self, share: float | None = None) -> set[int]:
        """Storages, beside inputs, that the graph keeps: the choice of torch's partitioner."""
        if share is None:
            return self._saved
        is_less = 0 < self._size(self._fewest) < share * self._size(self._saved)
        return self._fewest if is_less else self._knapsack(share)

    def _with_recomputed(self, saved: set[int]) -> list[Op]:
        """The operations of the backward, with those of the forward that it computes again."""
        recomputed, ops = set[int](), list[Op]()  # `recomputed` has indices in the forward
        for op in self._backward:
            needed, pending = set(), [op]
            while pending:
                for n in pending.pop().reads:
                    index = self._forward_index.get(n)
                    if n not in saved and index is not None and index not in recomputed:
                        recomputed.add(index)
                        needed.add(index)
                        pending.append(self._forward[index])
            ops += [*(self._forward[index] for index in sorted(needed)), op]
        return ops

    def _knapsack(self, share: float) -> set[int]:
        """The results worth most FLOPs that fit in a share of the bytes that a graph keeps.

        As in torch._functorch.partitioners (dp_knapsack): sizes are counted in units of 1 / 10,000
        of what is kept by default. Results of light operations are not kept.
        """
        unit = max(1, self._size(self._saved)) / _UNITS
        always = frozenset(n for n in self._heavy if not self._producer[n].extern)
        # by size in units: the FLOPs of the best choice of that size, and its results
        best: dict[int, tuple[int, frozenset[int]]] = {0: (0, always)}
        for op in self._forward:
            flops = 0 if op.light else op.work.product_flops
            results = self._heavy.intersection(op.writes)
            if not flops or not results:
                continue
            size = round(self._size(results) / unit)
            for used, (value, chosen) in list(best.items()):
                total, gain = used + size, value + flops
                if total <= share * _UNITS and best.get(total, (-1, chosen))[0] < gain:
                    best[total] = gain, chosen | results
        return set(max(best.values(), key=lambda pair: pair[0])[1])

    def _size(self, storages: Iterable[int]) -> int:
        return sum(self._trace.sizes[n] for n in storages)

    def _least_cut(self, wanted: set[int], available: set[int], *, light: bool = False) -> set[int]:
        """The storages of fewest bytes from which elementwise work computes the `wanted` ones.

        Work may also read the `available` storages. The minimum cut is that of torch's partitioner:
        of two products whose sum is wanted, the sum is kept.

        Args: `light`: light products may be computed again as well, and any elementwise work.
        """
        graph = nx.DiGraph()
        graph.add_nodes_from(("forward", "backward"))
        pending = [*(wanted - available)]
        graph.add_edges_from(((n, "held"), "backward") for n in pending)
        while pending:
            n = pending.pop()
            if graph.has_edge((n, "made"), (n, "held")):
                continue
            graph.add_edge((n, "made"), (n, "held"), capacity=self._trace.sizes[n])
            op = self._producer.get(n)
            if op is None or not self._is_recomputed(op, light) or self._small(n, op):
                graph.add_edge("forward", (n, "made"))
                continue
            reads = [read for read in op.reads if read not in available]
            graph.add_edges_from(((read, "held"), (n, "made")) for read in reads)
            pending += reads
        _, (forward, backward) = nx.minimum_cut(graph, "forward", "backward")
        sources = {n for n, side in forward - {"forward"} if side == "made"}
        return {n for n in sources if (n, "held") in backward}

    @staticmethod
    def _is_recomputed(op: Op, light: bool) -> bool:
        """True if a backward may compute the operation's results again."""
        return (op.light or not op.extern) if light else (op.recomputed and not op.extern)

    def _small(self, storage: int, op: Op) -> bool:
        """True if a storage is much smaller than the largest that its operation reads."""
        largest = max((self._trace.sizes[n] for n in op.reads), default=0)
        return self._trace.sizes[storage] * _SMALL <= largest

    def _phase(self, ops: list[Op], before: set[int], ends: set[int]) -> Work:
        """The work and peak of fused operations, as by Inductor.

        Args: `before`, `ends`: the storages alive when the operations begin, and when they end.
        """
        inputs, sizes = self._trace.inputs, self._trace.sizes
        # A storage is real if it exists in memory; results of other operations are fused away.
        by_library = {n for op in ops if op.extern for n in (*op.reads, *op.writes)}
        by_library |= {n for op in ops if op.product_bytes or not op.recomputed for n in op.writes}
        small = {n for op in ops for n in op.writes if self._small(n, op)}
        real = by_library | small | before | ends | inputs
        ops = [op for op in ops if op.extern or not op.writes or not real.isdisjoint(op.writes)]
        sources = [frozenset(s for n in op.reads for s in self._sources(n, real)) for op in ops]
        reads_left = Counter(n for read in sources for n in read)
        alive = before - inputs
        peak_bytes, made_bytes, total = self._size(alive), 0, Work()
        for kernel in self._kernels(ops, sources):
            fused = [ops[i] for i in kernel]
            new = {n for op in fused for n in op.writes if n in real} - inputs - alive
            if fused[0].extern:
                work = fused[0].work
                work = work if work.expert_flops else work._replace(kernels=1)
            else:
                reads = {n for i in kernel for n in sources[i]}
                touched = self._size(reads | new) + self._again_bytes(fused, real)
                launches = max(op.work.kernels for op in fused) or 1
                work = Work(touched_bytes=touched, kernels=launches)
                for i in kernel:  # its result takes the memory of a storage that is read last here
                    result_bytes = sizes[ops[i].writes[0]] if ops[i].writes else 0
                    candidates = sources[i] & (alive - ends)
                    last = (
                        n for n in candidates if reads_left[n] == 1 and sizes[n] == result_bytes
                    )
                    alive.discard(next(last, -1))
            alive |= new
            scratch = max(op.scratch_bytes for op in fused)
            peak_bytes = max(peak_bytes, self._size(alive) + scratch)
            made_bytes = max(made_bytes, self._size(alive - before) + scratch)
            total = added(total, work)
            reads_left.subtract(n for i in kernel for n in sources[i])
            alive = {n for n in alive if reads_left[n] or n in ends}
        return total._replace(peak_bytes=peak_bytes, made_bytes=made_bytes)

    def _kernels(self, ops: list[Op], sources: list[frozenset[int]]) -> list[list[int]]:
        """The numbers of each kernel's operations, kernels in the order in which they run.

        As in torch._inductor's scheduler, one kernel computes all results of a size that read the
        same storage of that size, unless one result waits for another by way of a third kernel.
        All that a kernel reads and writes is alive at once.
        """
        maker = {n: i for i, op in enumerate(ops) for n in op.writes}
        waits = nx.DiGraph()  # from each kernel, by its first operation, to those it reads from
        waits.add_nodes_from(range(len(ops)))
        waits.add_edges_from(
            (i, maker[n]) for i, read in enumerate(sources) for n in read if maker.get(n, i) != i
        )
        kernel_of = list(range(len(ops)))  # each operation's kernel
        last_writer: dict[tuple[int, int], int] = {}  # by memory read, and size
        for i, op in enumerate(ops):
            if op.extern or not op.writes:
                continue
            size = max(self._trace.sizes[n] for n in op.writes)
            for n in (*sources[i], *op.writes):
                if self._trace.sizes[n] == size:
                    earlier = last_writer.get((n, size), i)
                    into, merged = sorted((kernel_of[earlier], kernel_of[i]))
                    if into != merged and not _waits_by_a_third(waits, {into, merged}):
                        nx.contracted_nodes(waits, into, merged, self_loops=False, copy=False)
                        kernel_of = [into if kernel == merged else kernel for kernel in kernel_of]
                    last_writer[n, size] = i
        # Postorder lists a kernel after all kernels that it waits for.
        in_order = nx.DiGraph()
        in_order.add_nodes_from(sorted(waits))
        in_order.add_edges_from(sorted(waits.edges))
        kernels = nx.dfs_postorder_nodes(in_order)
        return [[i for i, kernel in enumerate(kernel_of) if kernel == number] for number in kernels]

    def _again_bytes(self, ops: list[Op], real: set[int]) -> int:
        """Bytes of rows, taken by index, that a kernel reads more than once."""
        pending, again_bytes = [*ops], dict[int, int]()  # by the rows that are taken
        while pending:
            op = pending.pop()
            if op.gathers:
                rows, table = op.writes[0], {s for n in op.reads for s in self._sources(n, real)}
                again_bytes[rows] = max(0, self._trace.sizes[rows] - self._size(table))
            pending += [
                self._producer[n] for n in op.reads if n in self._producer and n not in real
            ]
        return sum(again_bytes.values())

    def _sources(self, storage: int, real: set[int]) -> frozenset[int]:
        """The storages in memory from which fused work computes this one."""
        pending, sources, seen = [storage], set[int](), {storage}
        while pending:
            op = self._producer.get(n := pending.pop())
            if n in real or op is None:
                sources.add(n)
            else:
                pending += {*op.reads} - seen
                seen.update(op.reads)
        return frozenset(sources)


def _waits_by_a_third(waits: nx.DiGraph, pair: set[int]) -> bool:
    """True if one of two kernels waits for the other by way of a third."""
    thirds = {other for kernel in pair for other in waits.successors(kernel)} - pair
    return any(not pair.isdisjoint(reached) for reached in nx.bfs_layers(waits, thirds))
