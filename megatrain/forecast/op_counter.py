"""Counts what operations on tensors without data would take: FLOPs, bytes touched, bytes alive."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op, infer_schema
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from megatrain.compat.torch import (
    GROUPED_PRODUCT,
    SOFTMAX_BACKWARD,
    UNSAFE_VIEW,
    FakeTensor,
    TorchDispatchMode,
    memory_of,
    packet_of,
)
from megatrain.errors import MegatrainError, first_line
from megatrain.forecast.ledger import WORKING_SET, Ledger

# A layer has some hundred; a recurrence that goes token by token would take minutes to count.
MOST_OPERATIONS = 10_000


class NotForeseeable(MegatrainError):
    """Nothing can be said beforehand of what a model computes."""


@contextmanager
def foreseeing(what: str) -> Iterator[None]:
    """Failures within this context are NotForeseeable."""
    try:
        yield
    except MegatrainError:
        raise
    except RecursionError as error:
        raise NotForeseeable(
            f"{what} has too many operations one after the other (a recurrence without a kernel of "
            "its own)"
        ) from error
    except Exception as error:
        raise NotForeseeable(
            f"what {what} takes depends on the values it computes with ({type(error).__name__}: "
            f"{first_line(error)})"
        ) from error


class Work(NamedTuple):
    """What a piece of device work takes.

    Attributes:
        product_flops: of matrix products.
        attention_flops, attention_backward_flops: causal attention counted at half.
        touched_bytes: of device memory, by all other operations.
        kernels: launched.
        attention_bytes: results of attention, which may wait for its backward.
        peak_bytes: that exist at once, besides what the work was given; results count.
        kept_bytes: that wait for a backward, besides results and what the work was given.
        calls: of the layer or head, if it is more than one.
    """

    product_flops: int = 0
    attention_flops: int = 0
    attention_backward_flops: int = 0
    touched_bytes: int = 0
    kernels: int = 0
    attention_bytes: int = 0
    peak_bytes: int = 0
    kept_bytes: int = 0
    calls: int = 0

    def between(self, other: "Work", way: int, whole: int) -> "Work":
        """The work that is `way` of the `whole` way from this one to another one, or beyond it."""
        pairs = zip(self, other, strict=True)
        return Work(*(one + (two - one) * way // whole for one, two in pairs))

    def times(self, count: int) -> "Work":
        """The work of `count` micro-batches, one after the other; what is kept adds up."""
        if count == 1:
            return self
        return self._replace(
            product_flops=count * self.product_flops,
            attention_flops=count * self.attention_flops,
            attention_backward_flops=count * self.attention_backward_flops,
            touched_bytes=count * self.touched_bytes,
            kernels=count * self.kernels,
            attention_bytes=count * self.attention_bytes,
            calls=count,
        )


def shapes_only(shapes: Callable[..., Any]) -> Any:
    """An operation that tells the shapes of its results, as `shapes` makes them, and no values."""

    def refuse(*_: Any) -> None:
        raise NotImplementedError("only the shapes are of interest")

    name, schema = shapes.__name__.lstrip("_"), infer_schema(shapes, mutates_args=())
    made = custom_op(f"megatrain::{name}", refuse, mutates_args=(), schema=schema)
    made.register_fake(shapes)
    return made


@shapes_only
def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    # Kernels lay the result out as the queries are; of other widths, a token's heads side by side.
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


def _keep_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, key, value, mask, ctx.causal = inputs
    ctx.save_for_backward(query, key, value, *output, mask)


def _pull(ctx: Any, gradient: Tensor, _: Tensor) -> tuple:
    return (*_attention_backward(gradient, *ctx.saved_tensors, ctx.causal), None, None)


_attention.register_autograd(_pull, setup_context=_keep_for_backward)


@shapes_only
def _experts_product(rows: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty((len(rows), weights.shape[-1]))


@shapes_only
def _experts_product_backward(
    gradient: Tensor, rows: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


_experts_product.register_autograd(
    lambda ctx, gradient: _experts_product_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

ATTENTION = torch.ops.megatrain.attention.default
_EXPERTS = torch.ops.megatrain.experts_product.default
_EXPERTS_BACKWARD = torch.ops.megatrain.experts_product_backward.default
_LOOKS = (UNSAFE_VIEW,)
_OVERWRITES = (
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.copy_.default,
)

ATTENTION_BACKWARD = torch.ops.megatrain.attention_backward.default


class OneAttention(TorchFunctionMode):
    """Sends attention to one operation, whatever kernel this machine would take for it.

    So are products of experts (`[S, I] x [E, I, O]`): torch tells their shapes of bf16 alone, and
    their FLOPs not at all.

    Raises:
        NotForeseeable: there are too many operations to count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._calls += 1
        if self._calls > MOST_OPERATIONS:  # told here: torch's own code below may not be left so
            raise NotForeseeable(
                f"a layer has more than {MOST_OPERATIONS:,} operations (a recurrence without a "
                "kernel of its own)"
            )
        if func is F.scaled_dot_product_attention:
            return _one_attention(*args, **(kwargs or {}))
        if func is GROUPED_PRODUCT:
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
    # No fused kernel takes such: torch computes the logits, in fp32.
    shared = query.shape[-3:-2] != key.shape[-3:-2] and not kwargs.get("enable_gqa")
    if shared or (attn_mask is not None and attn_mask.requires_grad):
        logits = query.float() @ key.float().transpose(-2, -1)
        logits = logits if attn_mask is None else logits + attn_mask
        return (logits.softmax(-1) @ value.float()).to(query.dtype)
    return cast(Tensor, _attention(query, key, value, attn_mask, is_causal)[0])


def work_of(func: Any, args: tuple, kwargs: dict, out: Any) -> tuple[Work, int]:
    """What one operation takes on its own, and the bytes it needs while it runs."""
    if func is ATTENTION:
        results = sum(tensor.nbytes for tensor in tensors(out))
        flops = _attention_flops(*args)
        return Work(attention_flops=flops, kernels=1, attention_bytes=results), 0
    if func is ATTENTION_BACKWARD:
        _, query, key, value, *_, mask, causal = args
        # Five products where the forward has two; the gradient of the queries is summed in fp32.
        flops = _attention_flops(query, key, value, mask, causal) * 5 // 2
        return Work(attention_backward_flops=flops, kernels=1), query.numel() * 4
    if func in (_EXPERTS, _EXPERTS_BACKWARD):
        rows, weights = args[-2:]
        products = 1 if func is _EXPERTS else 2
        return Work(product_flops=2 * products * rows.numel() * weights.shape[-1], kernels=1), 0
    count = flop_registry.get(packet_of(func))
    if count is not None:
        return Work(product_flops=int(count(*args, **kwargs, out_val=out)), kernels=1), 0
    scratch = out.nbytes if func is SOFTMAX_BACKWARD else 0  # kernels write a product out
    given, made = tensors((args[1:] if func in _OVERWRITES else args, kwargs)), tensors(out)
    if not given and func not in _OVERWRITES:
        return Work(), 0  # an allocation
    return Work(touched_bytes=sum(t.nbytes for t in (*given, *made)), kernels=1), scratch


def _attention_flops(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> int:
    pairs = query.shape[:-1].numel() * key.shape[-2]
    flops = 2 * pairs * (query.shape[-1] + value.shape[-1])
    return flops // 2 if causal and mask is None else flops


def tensors(values: Any) -> list[Tensor]:
    """The tensors without data among some values, in containers of any depth."""
    # In this order: a fake tensor's device is an operation of its own.
    if isinstance(values, Tensor):
        return [values] if isinstance(values, FakeTensor) or values.is_meta else []
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in tensors(value)]


def is_view(func: Any) -> bool:
    """Whether an operation only looks at memory in another way, or at no memory."""
    return func.is_view or func in _LOOKS or func.namespace == "prim"


class OpCounter(Ledger, TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        work: so far, memory apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def ignore(self, values: Any) -> None:
        """Do not count the storages of some tensors."""
        self._known.update((memory_of(tensor), None) for tensor in tensors(values))

    def add(self, work: Work) -> None:
        """Count work that was measured before; its peak lies on top of what is alive now."""
        self.work = added(self.work, work)
        self.took(work.peak_bytes)

    def restart(self) -> None:
        """Forget work and peak so far; what is alive stays."""
        self.work = Work()
        self.peak_bytes, self.peak_live = self.total_bytes, Counter(self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if is_view(func):
            return out
        # Whoever says that a copy shall be on the meta device wants its shape alone.
        num_bytes = 0 if _described(func, kwargs) else None
        for tensor in tensors(out):
            self.made(tensor, WORKING_SET, num_bytes)
        work, scratch = work_of(func, args, kwargs, out)
        self.work = added(self.work, work)
        self.took(scratch)
        return out


def _described(func: Any, kwargs: dict) -> bool:
    device = kwargs.get("device")
    return func is torch.ops.aten.empty_like.default and device == torch.device("meta")


def added(one: Work, other: Work) -> Work:
    """The work of both, one after the other, but for their memory."""
    return Work(
        one.product_flops + other.product_flops,
        one.attention_flops + other.attention_flops,
        one.attention_backward_flops + other.attention_backward_flops,
        one.touched_bytes + other.touched_bytes,
        one.kernels + other.kernels,
        one.attention_bytes + other.attention_bytes,
        calls=max(one.calls, other.calls),
    )
