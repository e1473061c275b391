"""Counts the cost of operations on tensors without data: FLOPs, bytes touched, bytes alive."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import add
from typing import Any, NamedTuple, TypeVar, cast
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op, infer_schema
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from megatrain.base.units import align, on_line
from megatrain.compat import torch as compat
from megatrain.errors import MegatrainError, in_one_line
from megatrain.model.attention_chunks import cost_of_chunks
from megatrain.model.capture import Call, Ref
from megatrain.model.micro_batch import Activations

# A layer has some hundred operations. To count those of a recurrence over tokens takes minutes.
MOST_OPERATIONS = 10_000

# Products in float8 are this many times as fast as in bf16, torchao's casts included: a step of 7B
# on an H200, of which products are a part, took 5.59 s instead of 7.40.
_FLOAT8_SPEED = 1.48
# A kept graph holds torchao's casts (a byte an element) instead of the operands of products, and so
# this share of its bytes in bf16: on an H200 0.74 for 14B, half kept, 0.73 for 7B, kept whole.
_FLOAT8_KEPT = 0.75

Value = TypeVar("Value")

# torch's kernel for grouped products on Hopper computes pairs of tiles of 128 rows, by 256 columns
# or, if a matrix has no more, 128 (aten/src/ATen/native/cuda/GroupMM.cu). Two launches before it
# count the groups and set the kernel up. A sort of 64-bit numbers passes over each of their bytes.
_TILE_ROWS, _TILE_COLUMNS, _NARROW = 256, 256, 128
_GROUPED_LAUNCHES, _SORTING = 3, 15
_LAUNCHES = {"aten::sort": _SORTING, "aten::topk": 3, "megatrain::arrivals": _SORTING}

_ALIGNMENT = 256  # bytes: each tensor takes a multiple of these, on the device and on the host


class Place:
    """Names of the parts of device memory that come and go in a step."""

    ACTIVATIONS, WORKING_SET, KEPT_GRAPHS = "activations", "working set", "kept graphs"
    KEPT_ATTENTION, ARGUMENTS = "kept attention", "layer arguments"


class NotForeseeable(MegatrainError):
    """A forecast is impossible: what the model computes depends on values that it reads."""


@contextmanager
def foreseeing(part: str) -> Iterator[None]:
    """Failures within this context are NotForeseeable."""
    try:
        yield
    except MegatrainError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {in_one_line(error, 200)}"
        message = f"what {part} takes depends on the values it computes with ({reason})"
        if isinstance(error, RecursionError):
            message = f"{part} has too many operations one after the other (a recurrence without a "
            message += "kernel of its own)"
        raise NotForeseeable(message) from error


class Work(NamedTuple):
    """The cost of a piece of device work."""

    product_flops: int = 0
    expert_flops: int = 0  # of the experts' grouped products, rounded up to whole tiles
    # attention_flops, attention_backward_flops: causal attention counts half
    attention_flops: int = 0
    attention_backward_flops: int = 0
    exchanged_bytes: int = 0  # of rows that ranks send to the owners of their experts
    touched_bytes: int = 0  # of device memory, but for attention and dense products
    kernels: int = 0
    attention_bytes: int = 0  # results of attention, which may be kept for its backward
    peak_bytes: int = 0  # of memory that is alive at once: results count, arguments do not
    kept_bytes: int = 0  # kept for a backward, besides results and arguments
    made_bytes: int = 0  # the peak of what a backward allocates, without what was kept for it
    calls: int = 0  # of the layer or head, if there is more than one

    def times(self, count: int) -> "Work":
        """The work of `count` micro-batches, one after the other; memory stays that of one."""
        if count == 1:
            return self
        added_up = (count * number for number in self[:_ADDED])
        return Work._make((*added_up, *self[_ADDED:-1], count))


# The fields of a `Work` before this one add up over its operations; peaks and kept bytes do not.
_ADDED = Work._fields.index("peak_bytes")


def added(first: Work, second: Work) -> Work:
    """The work of both, one after the other; memory is 0, as it depends on what stays alive."""
    calls = max(first.calls, second.calls)
    return Work._make((*map(add, first[:_ADDED], second[:_ADDED]), 0, 0, 0, calls))


class Shape(NamedTuple):
    """The sizes of a tensor, and the name of its dtype (`kind`)."""

    sizes: tuple[int, ...]
    kind: str

    @classmethod
    def of(cls, tensor: Tensor) -> "Shape":
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self.kind))

    @property
    def num_bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize

    def empty(self) -> Tensor:
        return torch.empty(self.sizes, dtype=self.dtype)


class Prologue(NamedTuple):
    """The results of the part before the layers, and the bytes of the layers' other arguments."""

    results: list[tuple[Ref, Shape]]
    argument_bytes: int

    @classmethod
    def of(cls, calls: Sequence[Call], values: Activations) -> "Prologue":
        leaves = {id(leaf): leaf for call in calls for leaf in call.leaves}
        num_bytes = sum(leaf.nbytes for leaf in leaves.values() if isinstance(leaf, Tensor))
        return cls([(ref, Shape.of(value)) for ref, value in values.items()], num_bytes)


class MediaWork(NamedTuple):
    """The work of one micro-batch's images and sounds."""

    encoding: Work  # a forward of the encoders that keeps nothing
    recompute: Work  # the encoders' forward and backward in the backward sweep; 0 if all are frozen
    # entering, leaving: forward, and forward with backward, of what puts features among tokens
    entering: Work
    leaving: Work
    kept_bytes: int  # of results of frozen parts, which are kept for the backward sweep
    feature_bytes: int  # of the encoders' results
    prologue: Prologue

    def of_rows(self, rows: int, of_two: "MediaWork") -> "MediaWork":
        """The work of `rows` rows, which is affine in them: `self` is of one row, `of_two` of two.

        The encoders' work is proportional to the rows: it is taken from one row alone.
        """
        work: MediaWork = on_line(self, of_two, rows - 1, 1)
        return work._replace(
            encoding=on_line(Work(), self.encoding, rows, 1),
            recompute=on_line(Work(), self.recompute, rows, 1),
            kept_bytes=self.kept_bytes * rows,
        )


@dataclass(frozen=True)
class LayerWork:
    """The work of one micro-batch in a layer."""

    forward: Work  # a forward that keeps nothing
    recompute: Work  # the forward of the backward sweep, which keeps a graph for `backward`
    backward: Work
    # keeping, kept_backward: of a layer that keeps its graph between the sweeps
    keeping: Work
    kept_backward: Work
    # the backward of a graph that holds nothing and computes `forward` again itself (`recompute`
    # does not run); None: the layer does not make such graphs
    repeating: Work | None
    outputs: dict[int, Shape]

    def in_float8(self, *, trained: bool) -> "LayerWork":
        """This work with its products computed in float8; `trained`: their weights are trained."""
        works = {
            name: work._replace(product_flops=int(work.product_flops / _FLOAT8_SPEED))
            for name, work in vars(self).items()
            if isinstance(work, Work)
        }
        if trained:
            for forward, backward in (("recompute", "backward"), ("keeping", "kept_backward")):
                kept_bytes = int(_FLOAT8_KEPT * works[forward].kept_bytes)
                peak_bytes = works[backward].peak_bytes + kept_bytes - works[forward].kept_bytes
                works[forward] = works[forward]._replace(kept_bytes=kept_bytes)
                works[backward] = works[backward]._replace(peak_bytes=peak_bytes)
        return replace(self, **cast(Any, works))

    @property
    def computed_twice(self) -> list[Work]:
        """All that runs, in a step, of a layer that keeps nothing between the sweeps."""
        if self.repeating is not None:
            return [self.forward, self.repeating]
        return [self.forward, self.recompute, self.backward]


class Held:
    """A stand-in for a tensor, without data: a ledger counts its bytes until it is deleted."""

    __slots__ = ("_counted", "_ledger", "_place", "nbytes", "shape")
    dtype = torch.uint8

    def __init__(self, ledger: "Ledger", place: str, num_bytes: int, counted: int) -> None:
        self._ledger, self._place, self.nbytes, self._counted = ledger, place, num_bytes, counted
        self.shape = (num_bytes,)

    def __del__(self) -> None:
        self._ledger.add_bytes(self._place, -self._counted)

    def contiguous(self) -> "Held":
        return self


class Ledger:
    """Counts bytes by place: those alive now (`live`), and at the peak (`peak_live`)."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, int] = {}
        self.peak_live: dict[str, int] = {}
        self.total_bytes = self.peak_bytes = 0
        # `made_bytes` is the peak of bytes that are newer than the last `restart` (OpCounter).
        self.made_bytes = self._older_bytes = 0
        self._older = set[int]()  # storages older than the last `restart`, and alive
        self._known: dict[int, Any] = {}  # weak references that report the end of a storage

    def hold(self, place: str, num_bytes: int, counted: int | None = None) -> Any:
        """A stand-in for a tensor of `num_bytes`, which counts as `counted` bytes; None: as all."""
        counted = num_bytes if counted is None else counted
        self.add_bytes(place, counted)
        self.note_peak(0)  # nothing beside the bytes that are already counted
        return Held(self, place, num_bytes, counted)

    def count(self, tensor: Tensor, place: str, num_bytes: int | None = None) -> Tensor:
        """Count a tensor while its storage lives: as `num_bytes`, or all. Returns the tensor."""
        storage, key = tensor.untyped_storage(), compat.memory_of(tensor)
        if key not in self._known:
            size = align(storage.nbytes() if num_bytes is None else num_bytes, _ALIGNMENT)
            self.add_bytes(place, size)
            self._known[key] = ref(storage, partial(self._count_no_more, key, place, size))
            self.note_peak(0)
        return tensor

    def _count_no_more(self, key: int, place: str, num_bytes: int, _: Any) -> None:
        """Count a storage no more, nor among `_older`: the callback of its weak reference."""
        self._known.pop(key, None)
        self.add_bytes(place, -num_bytes)
        if key in self._older:
            self._older.discard(key)
            self._older_bytes -= num_bytes

    def add_bytes(self, place: str, num_bytes: int) -> None:
        """Count `num_bytes` more as alive; if negative, fewer."""
        self.live[place] = self.live.get(place, 0) + num_bytes
        self.total_bytes += num_bytes

    def note_peak(self, num_bytes: int, beside: int = 0, place: str = Place.WORKING_SET) -> None:
        """Note that `num_bytes` of working set and `beside` of `place` were alive for a moment."""
        total = self.total_bytes + num_bytes + beside
        self.made_bytes = max(self.made_bytes, total - self._older_bytes)
        if total > self.peak_bytes:
            self.peak_bytes = total
            self.peak_live = live = {**self.live}
            for name, more in ((Place.WORKING_SET, num_bytes), (place, beside)):
                live[name] = live.get(name, 0) + more


def shapes_only(shapes: Callable[..., Any]) -> Any:
    """Register an operation that only runs without data: `shapes` returns its empty results."""

    def refuse(*_: Any) -> None:
        raise NotImplementedError("only the shapes are of interest")

    name, schema = shapes.__name__.lstrip("_"), infer_schema(shapes, mutates_args=())
    operation = custom_op(f"megatrain::{name}", refuse, mutates_args=(), schema=schema)
    operation.register_fake(shapes)
    return operation


@shapes_only
def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """An operation that stands for any loss that is compiled to one kernel."""
    return logits_NV.new_empty((), dtype=torch.float32)


cross_entropy.register_autograd(
    lambda ctx, gradient: (
        torch.empty_like(ctx.saved_tensors[0]).copy_(ctx.saved_tensors[0]),
        None,
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@shapes_only
def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    # Kernels lay results out as the queries; values of another width with a token's heads together.
    out = torch.empty_like(query)
    if query.shape[-1] != value.shape[-1]:
        *batch, heads, tokens, _ = query.shape
        out = query.new_empty((*batch, tokens, heads, value.shape[-1])).transpose(-3, -2)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@shapes_only
def _attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save_attention(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, key, value, mask, ctx.causal = inputs
    ctx.save_for_backward(query, key, value, *output, mask)


_attention.register_autograd(
    lambda ctx, gradient, _: (
        *_attention_backward(gradient, *ctx.saved_tensors, ctx.causal),
        *(None, None),
    ),
    setup_context=_save_attention,
)


@shapes_only
def _experts_product(rows: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty((len(rows), weights.shape[-1]))


@shapes_only
def _experts_product_backward(gradient: Tensor, other_factor: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(factor)


def _experts_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of rows and weights; None for those that need none."""
    (rows, weights), (rows_need, weights_need) = ctx.saved_tensors, ctx.needs_input_grad
    return (
        _experts_product_backward(gradient, weights, rows) if rows_need else None,
        _experts_product_backward(gradient, rows, weights) if weights_need else None,
    )


_experts_product.register_autograd(
    _experts_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)

_ATTENTION = torch.ops.megatrain.attention.default
_ATTENTION_BACKWARD = torch.ops.megatrain.attention_backward.default
_CAUSAL = "megatrain::causal_attention"  # model/attention.py
_EXCHANGE = "megatrain::exchange"  # parallel/distributed.py
EXPERTS = torch.ops.megatrain.experts_product.default
_EXPERTS_BACKWARD = torch.ops.megatrain.experts_product_backward.default
_OVERWRITES = (
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.copy_.default,
)


class OneAttention(TorchFunctionMode):
    """Makes attention one operation, whatever kernel this machine would take for it.

    The same is done with products of experts (`[S, I] x [E, I, O]`): torch knows their shapes in
    bf16 alone, and counts no FLOPs of them.
    """

    def __init__(self, layers: int = 1) -> None:
        """Args: `layers`: how many run in this context; each may have `MOST_OPERATIONS`."""
        super().__init__()
        self._calls, self._most_calls = 0, layers * MOST_OPERATIONS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._calls += 1
        if self._calls > self._most_calls:  # raised here: code within an operation may not raise
            most = f"{self._most_calls:,} operations"
            raise NotForeseeable(f"a layer has more than {most} (a recurrence without a kernel)")
        if func is F.scaled_dot_product_attention:
            return _one_attention(*args, **(kwargs or {}))
        if func is compat.GROUPED_PRODUCT:
            return _experts_product(*args)
        return func(*args, **(kwargs or {}))


def _one_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # kernels add it to the logits
        attn_mask = torch.where(attn_mask, query.new_zeros(()), -torch.inf)
    # No fused kernel takes shared heads, or a mask with a gradient: torch computes fp32 logits.
    shares_heads = query.shape[-3:-2] != key.shape[-3:-2] and not kwargs.get("enable_gqa")
    if shares_heads or (attn_mask is not None and attn_mask.requires_grad):
        logits = query.float() @ key.float().transpose(-2, -1)
        logits = logits if attn_mask is None else logits + attn_mask
        return (logits.softmax(-1) @ value.float()).to(query.dtype)
    return cast(Tensor, _attention(query, key, value, attn_mask, is_causal)[0])


def work_of(func: Any, args: tuple, kwargs: dict, out: Any) -> tuple[Work, int]:
    """An operation's work, and the bytes of scratch memory that it needs while it runs."""
    if func is _ATTENTION:
        result_bytes = sum(tensor.nbytes for tensor in tensors(out))
        flops = _attention_flops(*args)
        return Work(attention_flops=flops, kernels=1, attention_bytes=result_bytes), 0
    if func is _ATTENTION_BACKWARD:
        _, query, key, value, *_, mask, causal = args
        # The forward has two products, the backward five; it sums queries' gradients in fp32.
        flops = _attention_flops(query, key, value, mask, causal) * 5 // 2
        return Work(attention_backward_flops=flops, kernels=1), query.numel() * 4
    if func.name() in (_CAUSAL, f"{_CAUSAL}_backward"):
        return _causal_attention(func, args, sum(tensor.nbytes for tensor in tensors(out)))
    if func in (EXPERTS, _EXPERTS_BACKWARD):
        return _grouped_product(args[0], args[1], out), 0
    if func.name() == _EXCHANGE:
        return Work(exchanged_bytes=out.nbytes, touched_bytes=2 * out.nbytes, kernels=1), 0
    if (count_flops := flop_registry.get(compat.packet_of(func))) is not None:
        return Work(product_flops=int(count_flops(*args, **kwargs, out_val=out)), kernels=1), 0
    scratch_bytes = out.nbytes if func is compat.SOFTMAX_BACKWARD else 0  # its arguments' product
    read = tensors((args[1:] if func in _OVERWRITES else args, kwargs))
    if not read and func not in _OVERWRITES:
        return Work(), 0  # an allocation
    touched_bytes = sum(tensor.nbytes for tensor in (*read, *tensors(out)))
    kernels = _LAUNCHES.get(compat.schema_of(func).name, 1)
    return Work(touched_bytes=touched_bytes, kernels=kernels), scratch_bytes


def _grouped_product(a: Tensor, b: Tensor, out: Tensor) -> Work:
    """The work of a product for E experts, of S rows that are sorted by expert.

    `[S, I] x [E, I, O]`, the rows' gradient `[S, O] x [E, O, I]`, or the weights' gradient
    `[E, I, O]` from `[S, O]` and `[S, I]`.
    """
    *experts, rows, columns = out.shape
    is_weight_gradient = bool(experts)
    inner = len(a) if is_weight_gradient else a.shape[-1]
    # Of S rows, the last tile of each expert is half empty on average.
    rows = align(rows, _TILE_ROWS) if is_weight_gradient else rows + len(b) * _TILE_ROWS // 2
    columns = align(columns, _NARROW if columns <= _NARROW else _TILE_COLUMNS)
    touched = a.nbytes + b.nbytes + out.nbytes
    return Work(
        expert_flops=2 * rows * inner * columns,
        touched_bytes=touched,
        kernels=_GROUPED_LAUNCHES,
    )


def _causal_attention(func: Any, args: tuple, result_bytes: int) -> tuple[Work, int]:
    """The work and scratch memory of model/attention.py's operation, or of its backward."""
    backward = func.name() != _CAUSAL
    names = [argument.name for argument in compat.schema_of(func).arguments]
    by_name = dict(zip(names, args, strict=False))
    query, sinks, window = (by_name[name] for name in ("query", "sinks", "window"))
    rows, tokens, heads, width = query.shape
    window = min(window, tokens) or tokens
    if by_name.get("cap"):
        pairs, chunks, scratch = cost_of_chunks(query, by_name["key"], window, backward=backward)
        # A chunk's logits go to memory and back between any two of its products.
        touched = pairs * query.itemsize * (10 if backward else 4)
        work = Work(touched_bytes=touched, kernels=chunks * (18 if backward else 9))
    else:
        pairs = rows * heads * window * (2 * tokens - window) // 2  # the first tokens see fewer
        scratch = query.numel() * 4 if backward else 0  # queries' gradients in fp32
        work = Work(kernels=4)
    flops = 4 * pairs * width
    if backward:  # five products, and the forward two
        return work._replace(attention_backward_flops=flops * 5 // 2), scratch
    if sinks is not None:
        scratch += 2 * query.nbytes
    return work._replace(attention_flops=flops, attention_bytes=result_bytes), scratch


def _attention_flops(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> int:
    pairs = query.shape[:-1].numel() * key.shape[-2]
    flops = 2 * pairs * (query.shape[-1] + value.shape[-1])
    return flops // 2 if causal and mask is None else flops


def tensors(values: Any, *, real: bool = False) -> list[Tensor]:
    """The tensors without data in nested containers; `real`: those with data as well."""
    if isinstance(values, Tensor):
        return [values] if real or values.is_meta or isinstance(values, compat.FakeTensor) else []
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in tensors(value, real=real)]


def is_view(func: Any) -> bool:
    """True if an operation returns a view of its argument, or reads no memory at all."""
    return func.is_view or func is compat.UNSAFE_VIEW or func.namespace == "prim"


class OpCounter(Ledger, compat.TorchDispatchMode):
    """Counts operations within its context: their `work`, and as a ledger their memory."""

    def __init__(self, *, real: bool = False) -> None:
        """Args: `real`: the memory of results with data counts as well."""
        super().__init__()
        self.work, self._real = Work(), real

    def ignore(self, values: Any) -> None:
        """Do not count the storages of these tensors while they live."""
        for tensor in tensors(values, real=self._real):
            self.count(tensor, Place.WORKING_SET, 0)

    def add(self, work: Work) -> None:
        """Count work that was measured before; its peak is beside all that is alive now."""
        self.work = added(self.work, work)
        self.note_peak(work.peak_bytes)

    def restart(self) -> None:
        """Forget the work and the peak so far; memory that is alive still counts."""
        self.work = Work()
        self.peak_bytes, self.peak_live = self.total_bytes, {**self.live}
        self.made_bytes, self._older_bytes, self._older = 0, self.total_bytes, {*self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if is_view(func):
            return out
        # Code that asks for a copy on the meta device wants its shape alone.
        on_meta = kwargs.get("device") == torch.device("meta")
        is_shape = on_meta and func is torch.ops.aten.empty_like.default
        for tensor in tensors(out, real=self._real):
            self.count(tensor, Place.WORKING_SET, 0 if is_shape else None)
        work, scratch_bytes = work_of(func, args, kwargs, out)
        self.work = added(self.work, work)
        self.note_peak(scratch_bytes)
        return out


def counted(
    run: Callable[[], Value], ignored: Any = (), *, real: bool = False
) -> tuple[Work, Value]:
    """The work of a function, and its result, without `ignored` tensors; `real`: as OpCounter."""
    counter = OpCounter(real=real)
    counter.ignore(ignored)
    with counter:
        result = run()
    return counter.work._replace(peak_bytes=counter.peak_bytes), result
