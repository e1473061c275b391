"""What a layer takes once it is compiled, read off its operations on tensors without data.

A compiled function differs from an eager one in what it writes to memory (torch._inductor, and the
partitioner of torch._functorch). Elementwise work and reductions are fused: of their results only
those exist that a matrix product or attention reads, that are returned, or that are small. Between
forward and backward wait what a product of the backward reads, and the results of products from
which all else can be computed again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.engine.tally import Work, added, is_view, tensors, work_of

# A reduction's result that is so much smaller than what it reads is kept, not computed again.
_SMALL = 16

_UNITS = 10_000  # of memory, in torch's choice of what a graph keeps

# These look at a tensor for its shape alone.
_SHAPED_LIKE = ("aten::empty_like", "aten::new_", "aten::zeros_like", "aten::ones_like")


@dataclass(frozen=True)
class Op:
    """One operation. Tensors are numbers of storages.

    Attributes:
        work: of a matrix product or attention; other operations are counted where they are fused.
        made: storages that it is the first to write.
        scratch_bytes: that it needs for itself.
    """

    work: Work
    reads: tuple[int, ...]
    made: tuple[int, ...]
    scratch_bytes: int = 0

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
        storage = tensor.untyped_storage()
        key = storage._cdata
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
            reads = () if func._schema.name.startswith(_SHAPED_LIKE) else tuple(sorted(given))
            self.ops.append(Op(work, reads, made, scratch))
        return out


@dataclass
class Traced:
    """A forward, and the backward that follows it.

    Attributes:
        split: operations of the forward; those that follow are the backward's.
        given: storages of weights and inputs, and of the gradients that the backward is given.
        made: the forward's results.
        pulled: the backward's.
    """

    ops: list[Op]
    sizes: list[int]
    split: int
    given: set[int]
    made: set[int]
    pulled: set[int]


class Compiled:
    """What forward and backward of a traced layer take once it is compiled."""

    def __init__(self, traced: Traced) -> None:
        self._t = traced
        self._forward, self._backward = traced.ops[: traced.split], traced.ops[traced.split :]
        self._producer = {n: op for op in traced.ops for n in op.made}
        self._bases: dict[int, frozenset[int]] = {}
        inside = {n for op in self._forward for n in op.made} - traced.given
        read = {n for op in self._backward for n in op.reads} & inside
        by_library = {n for op in self._backward if op.extern for n in op.reads} & inside
        # All that any product or attention would have to be run again for.
        self._least = {base for n in read for base in self._base(n)} - traced.given
        bases = {base for n in read - by_library for base in self._base(n)}
        self._saved = (by_library | bases) - traced.given

    def forward(self) -> Work:
        """A forward of which nothing is kept."""
        return self._phase(self._forward, frozenset(), self._t.made)

    def forward_keeping(self, share: float | None = None) -> Work:
        """A forward that keeps what its backward needs; `share` as in `backward`."""
        work = self._phase(self._forward, frozenset(), self._t.made | self._saved)
        kept = self._size(self._saved - self._t.made)
        held = kept if share is None else self._size(self._chosen(share))
        return replace(work, peak_bytes=work.peak_bytes - kept + held, kept_bytes=held)

    def backward(self, share: float | None = None) -> Work:
        """The backward; what was kept counts in its peak.

        With `share` of what would be kept by default (activation_memory_budget of
        torch._functorch) the products that are not kept are computed again.
        """
        work = self._phase(self._backward, frozenset(self._saved), self._t.pulled)
        if share is None:
            return work
        chosen = self._chosen(share)
        missing = [op.work for op in self._library() if chosen.isdisjoint(op.made)]
        return replace(
            work,
            product_flops=work.product_flops + sum(w.product_flops for w in missing),
            attention_flops=work.attention_flops + sum(w.attention_flops for w in missing),
        )

    def repeating(self) -> Work:
        """The backward of a graph that holds nothing: it begins with most of a forward."""
        again, backward = self.forward_keeping(), self.backward(0.0)
        touched = backward.touched_bytes + again.touched_bytes
        return replace(backward, touched_bytes=touched, kernels=backward.kernels + again.kernels)

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

    def _small(self, storage: int, op: Op) -> bool:
        largest = max((self._t.sizes[n] for n in op.reads), default=0)
        return self._t.sizes[storage] * _SMALL <= largest

    def _phase(self, ops: list[Op], before: frozenset[int], ends: set[int]) -> Work:
        """Run through one phase that starts with `before` in memory and ends with `ends`."""
        given = self._t.given
        real = self._real(ops) | before | ends | given
        ops = [op for op in ops if op.extern or not op.made or not real.isdisjoint(op.made)]
        sources = [frozenset(s for n in op.reads for s in self._sources(n, real)) for op in ops]
        last = {n: i for i, op in enumerate(ops) for n in (*op.made, *sources[i])}
        alive = set(before) - given
        live = peak = self._size(alive)
        work = Work()
        for index, op in enumerate(ops):
            made = {n for n in op.made if n in real and n not in alive} - given
            alive |= made
            live += self._size(made)
            peak = max(peak, live + op.scratch_bytes)
            touched = 0 if op.extern else self._size({*sources[index], *made})
            work = added(work, replace(op.work, touched_bytes=touched, kernels=1))
            gone = {n for n in alive if last.get(n, -1) <= index} - ends
            alive -= gone
            live -= self._size(gone)
        return replace(work, peak_bytes=peak)

    def _real(self, ops: list[Op]) -> set[int]:
        """Storages that exist in memory because of how they are made or read."""
        by_library = {n for op in ops if op.extern for n in (*op.reads, *op.made)}
        return by_library | {n for op in ops for n in op.made if self._small(n, op)}

    def _sources(self, storage: int, real: set[int]) -> frozenset[int]:
        """What exists in memory of that which a storage is computed from."""
        op = self._producer.get(storage)
        if storage in real or op is None:
            return frozenset({storage})
        return frozenset(s for n in op.reads for s in self._sources(n, real))
