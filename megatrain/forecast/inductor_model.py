"""What a layer takes once it is compiled, read off its operations on tensors without data.

A compiled function differs from an eager one in what it writes to memory (torch._inductor, and the
partitioner of torch._functorch). Elementwise work and reductions are fused: of their results only
those exist that a matrix product or attention reads, that are returned, or that are small. Between
forward and backward wait what a product of the backward reads, and the results of products from
which all else can be computed again.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import networkx as nx
import torch
from torch import Tensor

from megatrain.compat.torch import SOFTMAX_BACKWARD, TorchDispatchMode, memory_of, schema_of
from megatrain.forecast.op_counter import Work, added, is_view, tensors, work_of

# A reduction's result that is so much smaller than what it reads is kept, not computed again.
_SMALL = 16

# Fused kernels of a backward write several results, and sum over rows. In layers of 0.5B to 14B on
# an H200 they take that much longer than a copy of what they touch (benchmarks/results).
_BACKWARD_TOUCHES = 1.5

_UNITS = 10_000  # of memory, in torch's choice of what a graph keeps

# Their results are held for the backward rather than computed again, as those of libraries are:
# torch's partitioner does not count them among what a fused kernel computes.
_NOT_AGAIN = {
    *("aten::cat", "aten::stack", "aten::constant_pad_nd", "aten::cumsum", "aten::sort"),
    *("aten::topk", "aten::scatter", "aten::scatter_add", "aten::index_add", "aten::index_put"),
}

# These look at a tensor for its shape alone.
_SHAPED_LIKE = ("aten::empty_like", "aten::new_", "aten::zeros_like", "aten::ones_like")


@dataclass(frozen=True)
class Op:
    """One operation. Tensors are numbers of storages.

    Attributes:
        work: of a matrix product or attention; other operations are counted where they are fused.
        made: storages that it is the first to write.
        scratch_bytes: that it needs for itself.
        product_bytes: of a product in fp32 that it needs besides where a graph was kept: so a layer
            of gpt-oss takes 6.4 matrices of logits on an H200, and 4.4 where nothing is kept.
        again: whether a fused kernel of the backward may compute it again.
    """

    work: Work
    reads: tuple[int, ...]
    made: tuple[int, ...]
    scratch_bytes: int = 0
    again: bool = True
    product_bytes: int = 0

    @property
    def extern(self) -> bool:
        """Whether a library computes it: nothing is fused with it."""
        work = self.work
        flops = work.product_flops + work.attention_flops + work.attention_backward_flops
        return bool(flops)


class Recorder(TorchDispatchMode):
    """Takes down the operations of a computation on fake tensors.

    Attributes:
        ops: in order.
        sizes: bytes of each storage.
        random: whether one of them draws random numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.sizes: list[int] = []
        self.random = False
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no address is used twice

    def number(self, tensor: Tensor) -> int:
        """The storage of a tensor."""
        storage, key = tensor.untyped_storage(), memory_of(tensor)
        if key not in self._numbers:
            self._numbers[key] = len(self.sizes)
            self.sizes.append(storage.nbytes())
            self._alive.append(storage)
        return self._numbers[key]

    def numbers(self, values: Any) -> set[int]:
        """The storages of all tensors among some values."""
        return {self.number(tensor) for tensor in tensors(values)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        given = self.numbers((args, kwargs))
        known = len(self.sizes)
        out = func(*args, **kwargs)
        made = tuple(sorted(n for n in self.numbers(out) if n >= known))
        if not is_view(func):
            work, scratch = work_of(func, args, kwargs, out)
            name = schema_of(func).name
            reads = () if name.startswith(_SHAPED_LIKE) else tuple(sorted(given))
            product = 4 * out.numel() if func is SOFTMAX_BACKWARD else 0
            self.ops.append(
                Op(work, reads, made, scratch + product // 2, name not in _NOT_AGAIN, product)
            )
        return out


@dataclass
class Traced:
    """A forward, and the backward that follows it.

    Attributes:
        split: operations of the forward; those that follow are the backward's.
        given: storages of weights and inputs, and of the gradients that the backward is given.
        made: the forward's results.
        pulled: the backward's.
        random: whether one of the operations draws random numbers.
    """

    ops: list[Op]
    sizes: list[int]
    split: int
    given: set[int]
    made: set[int]
    pulled: set[int]
    random: bool

    def between(self, other: "Traced", way: int, whole: int) -> "Traced | None":
        """What a trace would be that is `way` of the `whole` way from this one to another one.

        All numbers are on a line, as they are by the rows of a micro-batch. None: the two traces
        are of different operations.
        """
        if self._structure != other._structure:
            return None

        def at(one: int, two: int) -> int:
            return one + (two - one) * way // whole

        ops = [
            replace(
                op,
                work=op.work.between(like.work, way, whole),
                scratch_bytes=at(op.scratch_bytes, like.scratch_bytes),
                product_bytes=at(op.product_bytes, like.product_bytes),
            )
            for op, like in zip(self.ops, other.ops, strict=True)
        ]
        return replace(self, ops=ops, sizes=[*map(at, self.sizes, other.sizes)])

    @property
    def _structure(self) -> tuple:
        ops = [(op.reads, op.made, op.extern) for op in self.ops]
        return ops, self.split, self.given, self.made, self.pulled, self.random


class Compiled:
    """What forward and backward of a traced layer take once it is compiled."""

    def __init__(self, traced: Traced) -> None:
        self._t = traced
        self._forward, self._backward = traced.ops[: traced.split], traced.ops[traced.split :]
        self._producer = {n: op for op in traced.ops for n in op.made}
        self._maker = {n: i for i, op in enumerate(self._forward) for n in op.made}
        self._bases: dict[int, frozenset[int]] = {}
        inside = {n for op in self._forward for n in op.made} - traced.given
        read = {n for op in self._backward for n in op.reads} & inside
        by_library = {n for op in self._backward if op.extern for n in op.reads} & inside
        # All that any product or attention would have to be run again for.
        self._least = {base for n in read for base in self._base(n)} - traced.given
        rest = self._least_cut(read - by_library, by_library | traced.given)
        self._saved = by_library - traced.given | rest
        self._fewest = self._least_cut(read, traced.given)

    def forward(self) -> Work:
        """A forward of which nothing is kept."""
        return self._phase(self._forward, frozenset(), self._t.made)

    def forward_keeping(self, share: float | None = None) -> Work:
        """A forward that keeps what its backward needs; `share` as in `backward`."""
        held = self._held(share)
        work = self._phase(self._forward, frozenset(), self._t.made | held)
        return work._replace(kept_bytes=self._size(held - self._t.made))

    def backward(self, share: float | None = None) -> Work:
        """The backward; what was kept counts in its peak.

        With `share` of what would be kept by default (activation_memory_budget of
        torch._functorch) the products that are not kept are computed again; with 0 nothing is kept,
        and it begins with most of a forward.
        """
        held = self._held(share)
        ops = self._with_again(held)
        if share != 0:
            ops = [replace(op, scratch_bytes=op.scratch_bytes + op.product_bytes) for op in ops]
        work = self._phase(ops, frozenset(held), self._t.pulled)
        return work._replace(touched_bytes=int(_BACKWARD_TOUCHES * work.touched_bytes))

    def _held(self, share: float | None) -> set[int]:
        """What waits between the two, arguments left out.

        As torch's partitioner tries it: what the backward's products read may be computed again
        from less; only where that is not little enough are products themselves.
        """
        if share is None:
            return set(self._saved)
        few = 0 < self._size(self._fewest) < share * self._size(self._saved)
        return set(self._fewest) if few else self._chosen(share)

    def _with_again(self, held: set[int]) -> list[Op]:
        """The backward, and before each operation what of the forward it needs and is not held."""
        done: set[int] = set()
        ops: list[Op] = []
        for op in self._backward:
            needed, asked = set(), [op]
            while asked:
                for n in asked.pop().reads:
                    maker = self._maker.get(n)
                    if n not in held and maker is not None and maker not in done:
                        done.add(maker)
                        needed.add(maker)
                        asked.append(self._forward[maker])
            ops += [self._forward[maker] for maker in sorted(needed)]
            ops.append(op)
        return ops

    def _library(self) -> list[Op]:
        """Products and attention whose results spare the backward from running them again."""
        return [op for op in self._forward if op.extern and not self._least.isdisjoint(op.made)]

    def _chosen(self, share: float) -> set[int]:
        """What a kept graph holds: as many FLOPs' results as fit in a share of the default.

        A knapsack, as in torch._functorch.partitioners (dp_knapsack): 1 / 10,000 of the default is
        the unit in which sizes count. Attention is no part of it: cuDNN's is missing among the
        operations that count as heavy there (`compute_intensive_ops`), so it is computed again.
        """
        unit = max(1, self._size(self._saved)) / _UNITS
        small = {n for n in self._least if not self._producer[n].extern}
        best: dict[int, tuple[int, frozenset[int]]] = {0: (0, frozenset(small))}
        for op in self._library():
            flops = op.work.product_flops
            if not flops:
                continue
            results = self._least.intersection(op.made)
            size = round(self._size(results) / unit)
            for used, (value, chosen) in list(best.items()):
                total, gain = used + size, value + flops
                if total <= share * _UNITS and best.get(total, (-1, chosen))[0] < gain:
                    best[total] = gain, chosen | results
        return set(max(best.values(), key=lambda found: found[0])[1])

    def _size(self, storages: Iterable[int]) -> int:
        return sum(self._t.sizes[n] for n in storages)

    def _base(self, storage: int) -> frozenset[int]:
        """What a storage can be computed from by elementwise work alone."""
        if storage not in self._bases:
            op = self._producer.get(storage)
            if op is None or op.extern or storage in self._t.given or self._small(storage, op):
                self._bases[storage] = frozenset({storage})
            else:
                self._bases[storage] = frozenset(b for n in op.reads for b in self._base(n))
        return self._bases[storage]

    def _least_cut(self, wanted: set[int], kept: set[int]) -> set[int]:
        """The fewest bytes from which, beside `kept`, elementwise work computes what is wanted.

        As torch's partitioner cuts a graph: of two products whose sum is wanted the sum is held.
        """
        graph = nx.DiGraph()
        graph.add_nodes_from(("forward", "backward"))
        asked = [*(wanted - kept)]
        graph.add_edges_from(((n, "held"), "backward") for n in asked)
        while asked:
            n = asked.pop()
            if graph.has_edge((n, "made"), (n, "held")):
                continue
            graph.add_edge((n, "made"), (n, "held"), capacity=self._t.sizes[n])
            op = self._producer.get(n)
            if op is None or op.extern or not op.again or self._small(n, op):
                graph.add_edge("forward", (n, "made"))
                continue
            reads = [each for each in op.reads if each not in kept]
            graph.add_edges_from(((each, "held"), (n, "made")) for each in reads)
            asked += reads
        _, (before, after) = nx.minimum_cut(graph, "forward", "backward")
        return {n for n, side in before - {"forward"} if side == "made" and (n, "held") in after}

    def _small(self, storage: int, op: Op) -> bool:
        largest = max((self._t.sizes[n] for n in op.reads), default=0)
        return self._t.sizes[storage] * _SMALL <= largest

    def _phase(self, ops: list[Op], before: frozenset[int], ends: set[int]) -> Work:
        """Run through one phase that starts with `before` in memory and ends with `ends`."""
        given = self._t.given
        real = self._real(ops) | before | ends | given
        ops = [op for op in ops if op.extern or not op.made or not real.isdisjoint(op.made)]
        sources = [frozenset(s for n in op.reads for s in self._sources(n, real)) for op in ops]
        left = Counter(n for read in sources for n in read)  # how many operations will read it
        alive = set(before) - given
        peak = self._size(alive)
        work = Work()
        for kernel in self._kernels(ops, sources):
            reads = {n for i in kernel for n in sources[i]}
            new = {n for i in kernel for n in ops[i].made if n in real} - given - alive
            touched = 0
            if not ops[kernel[0]].extern:
                touched = self._size(reads | new)
                for i in kernel:
                    alive -= self._overwritten(ops[i], sources[i] & (alive - ends), left)
            alive |= new
            peak = max(peak, self._size(alive) + max(ops[i].scratch_bytes for i in kernel))
            work = added(work, ops[kernel[0]].work._replace(touched_bytes=touched, kernels=1))
            left.subtract(n for i in kernel for n in sources[i])
            alive = {n for n in alive if left[n] or n in ends}
        return work._replace(peak_bytes=peak)

    def _overwritten(self, op: Op, reads: frozenset[int], left: Counter[int]) -> set[int]:
        """What an elementwise operation writes its result over: what nothing else will read."""
        sizes = self._t.sizes
        made = sizes[op.made[0]] if op.made else 0
        return set(islice((n for n in reads if left[n] == 1 and sizes[n] == made), 1))

    def _kernels(self, ops: list[Op], sources: list[frozenset[int]]) -> list[list[int]]:
        """The operations (numbers) of each kernel, in the order in which they run.

        As torch._inductor's scheduler has it, elementwise results of one size that read one memory
        of that size are written together, wherever none of them waits for another by way of a
        library's operation. All that they read and write is alive at once.
        """
        maker = {n: i for i, op in enumerate(ops) for n in op.made}
        waits = [{maker[n] for n in read if n in maker} - {i} for i, read in enumerate(sources)]
        kernels = _Kernels(waits)
        writers: dict[tuple[int, int], int] = {}  # by memory read, and size: the last of them
        for i, op in enumerate(ops):
            if op.extern or not op.made:
                continue
            size = max(self._t.sizes[n] for n in op.made)
            for n in (*sources[i], *op.made):
                if self._t.sizes[n] == size:
                    kernels.join(writers.get((n, size), i), i)
                    writers[n, size] = i
        return kernels.in_order()

    def _real(self, ops: list[Op]) -> set[int]:
        """Storages that exist in memory because of how they are made or read."""
        by_library = {n for op in ops if op.extern for n in (*op.reads, *op.made)}
        by_library |= {n for op in ops if op.product_bytes or not op.again for n in op.made}
        return by_library | {n for op in ops for n in op.made if self._small(n, op)}

    def _sources(self, storage: int, real: set[int]) -> frozenset[int]:
        """What exists in memory of that which a storage is computed from."""
        op = self._producer.get(storage)
        if storage in real or op is None:
            return frozenset({storage})
        return frozenset(s for n in op.reads for s in self._sources(n, real))


class _Kernels:
    """Operations that are put together into kernels, of which none waits for itself."""

    def __init__(self, waits: list[set[int]]) -> None:
        """Args: `waits`: the operations that each one reads from."""
        self._waits = waits
        self._of = list(range(len(waits)))
        self._members = {i: [i] for i in self._of}

    def join(self, one: int, other: int) -> None:
        """Make two operations' kernels one, unless one waits for the other by way of a third."""
        kept, gone = sorted((self._of[one], self._of[other]))
        if kept == gone or self._between(kept, gone) or self._between(gone, kept):
            return
        for i in self._members[gone]:
            self._of[i] = kept
        self._members[kept] = sorted(self._members[kept] + self._members.pop(gone))

    def in_order(self) -> list[list[int]]:
        """The operations of each kernel, every kernel as early as its first operation allows."""
        done: set[int] = set()
        order = []
        for first in self._members:
            path = [first]
            while path:
                kernel = path[-1]
                left = self._before(kernel) - done
                if left:
                    path.append(min(left))
                    continue
                path.pop()
                if kernel not in done:
                    done.add(kernel)
                    order.append(self._members[kernel])
        return order

    def _before(self, kernel: int) -> set[int]:
        """The kernels that it waits for."""
        of, waits = self._of, self._waits
        return {of[j] for i in self._members[kernel] for j in waits[i]} - {kernel}

    def _between(self, first: int, last: int) -> bool:
        """Whether `last` waits for a kernel that waits for `first`."""
        asked = [*(self._before(last) - {first})]
        seen = set(asked)
        while asked:
            before = self._before(asked.pop())
            if first in before:
                return True
            asked += before - seen
            seen |= before
        return False
