"""Causal attention with windows and sinks in memory that grows with the row.

It stands in transformers' models for attention by masks `[B, 1, T, T]`. torch's flash kernel takes
a window as a number, and computes nothing beyond it.

A sink (gpt-oss) is a logit of a head that takes a share of each token's softmax and has no value.
The eager form makes logits `[B, H, T, T]` several times over. Here a kernel for plain attention
gives the result `out` and the logarithm `l` of each token's sum; with `m = logaddexp(l, sink)` the
result with the sink is `out * exp(l - m)`, and the same kernel's backward, given that and `m`,
gives the gradients: it needs the two only for probabilities `exp(logit - m)` and for
`sum(gradient * out)`.

Where the layers' own mask says more than order, window and documents (padding), it is kept.
Legend: B rows, T tokens of a row, H heads, D width of a head.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from megatrain.compat.torch import flash_attention, flash_attention_backward
from megatrain.compat.transformers import (
    attention_of,
    eager_mask,
    is_causal_alone,
    sdpa_attention_forward,
    sdpa_mask,
    set_attention,
    takes_flash_attention,
)
from megatrain.model.documents import (
    BY_MASKS,
    BY_SINKS,
    BY_WINDOWS,
    MOST_WIDTH,
    are_told,
    document_mask,
    has_kernel,
    row_edges,
)
from megatrain.model.spec import ModelSpec
from megatrain.placement import Precision


def attend_by_kernel(spec: ModelSpec, precision: Precision) -> None:
    """Have a model's layers attend so on a GPU, in place, if they have sinks or windows.

    Kernels compute in bf16; layers in fp32 stay as they are.
    """
    model = spec.capture.model
    if precision == "fp32" or not takes_flash_attention(model):
        return
    kinds = {id(layer.kind): layer.kind for layer in spec.layers}.values()
    modules = [module for kind in kinds for module in kind.module.modules()]
    with_sinks = [module for module in modules if isinstance(getattr(module, "sinks", 0), Tensor)]
    of_modules = [module.config for module in modules if hasattr(module, "config")]
    for config in [model.config, model.config.get_text_config(), *of_modules]:
        if with_sinks and all(map(_is_plain, with_sinks)) and attention_of(config) == "eager":
            set_attention(config, BY_SINKS)
        if getattr(config, "sliding_window", None) and attention_of(config) == BY_MASKS:
            set_attention(config, BY_WINDOWS)


def _eager(module: nn.Module) -> Callable[..., tuple[Tensor, Any]] | None:
    """The eager attention beside the code of a module's forward."""
    return inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")


def _is_plain(module: nn.Module) -> bool:
    """True if a module's attention has a width of kernels, no dropout, and an eager form."""
    width = getattr(module, "head_dim", None)
    fits = isinstance(width, int) and width % 8 == 0 and width <= MOST_WIDTH
    plain = not getattr(module, "attention_dropout", 0.0)
    return fits and plain and _eager(module) is not None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Attention over `[B, H, T, D]`; fewer heads of keys and values are shared."""
    if attention_mask is not None:
        eager = _eager(module)
        assert eager is not None  # see `_is_plain`
        return eager(module, query, key, value, attention_mask, scaling=scaling, **options)
    sinks = getattr(module, "sinks", None)
    sinks = None if sinks is None else sinks.to(query.dtype)  # None: a layer of another kind
    window = options.get("sliding_window") or 0
    heads = (x.transpose(1, 2) for x in (query, key, value))
    out, _ = causal_attention(*heads, sinks, cu_seq_lens_q, max_length_q, window, scaling)
    return out, None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return None if are_told(kwargs) or is_causal_alone(kwargs) else eager_mask(*args, **kwargs)


def _attention_in_windows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As `sdpa_attention_forward`; where the mask is a window, a kernel that skips the rest."""
    if attention_mask is None or attention_mask.numel():
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    window = attention_mask.shape[2]
    if has_kernel(query, value, options) and query.shape[-1] == value.shape[-1]:
        heads = (x.transpose(1, 2) for x in (query, key, value))
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        out, _ = causal_attention(*heads, None, None, 0, window, scale)
        return out, None
    rows, _, tokens, _ = query.shape
    mask = document_mask(row_edges(rows, tokens, query.device), rows, tokens, window)
    return sdpa_attention_forward(module, query, key, value, mask, **options)


def _window_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """As `sdpa_mask`; of a sliding window alone no mask, but its width in a shape.

    `_attention_in_windows` reads it from `[1, 1, window, 0]`, which has no elements.
    """
    window, config = kwargs.get("local_size"), kwargs.get("config")
    slides = window == getattr(config, "sliding_window", None)  # else local_size is a chunk's
    if window and slides and window < kwargs["kv_length"] and is_causal_alone(kwargs):
        return torch.empty(1, 1, window, 0, dtype=torch.bool, device=kwargs["device"])
    return sdpa_mask(*args, **kwargs)


AttentionInterface.register(BY_SINKS, _attention)
AttentionMaskInterface.register(BY_SINKS, _mask)
AttentionInterface.register(BY_WINDOWS, _attention_in_windows)
AttentionMaskInterface.register(BY_WINDOWS, _window_mask)


@torch.library.custom_op("megatrain::causal_attention", mutates_args=())
def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    edges: Tensor | None,
    longest: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Causal attention of `[B, T, H, D]`: the result, and the logarithms of the sums in fp32.

    Args:
        sinks: a logit `[H]`, which the sums count; None: there are none.
        edges: ends of documents in the rows laid end to end, int32; None: each row is one.
        longest: tokens of the longest document.
        window: tokens that a token sees, itself included; 0: all before it.
    """
    if not query.is_cuda:  # by all logits, in fp32
        logits = _logits(query, key, edges, window, scale)
        whole = _with_sinks(logits.logsumexp(-1).flatten(1, 2), sinks)
        share = (logits - whole.view(logits.shape[:-1])[..., None]).exp()
        out = torch.einsum("bkgij,bjkd->bikgd", share, value.float()).flatten(2, 3)
        whole = whole if edges is None else whole.transpose(0, 1).flatten(1)
        return out.to(query.dtype).contiguous(), whole.contiguous()
    q, k, v = (_laid_out(x, edges) for x in (query, key, value))
    plain, sums = flash_attention(q, k, v, edges, longest, window, scale)
    if sinks is None:
        return plain.view(query.shape), sums
    whole = _with_sinks(sums, sinks)
    share = (sums - whole).exp().transpose(-2, -1).unsqueeze(-1)
    return (plain * share).to(query.dtype).contiguous().view(query.shape), whole.contiguous()


@causal_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, edges: Any, *_: Any) -> Any:
    rows, tokens, heads = query.shape[:3]
    shape = [rows, heads, tokens] if edges is None else [heads, rows * tokens]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return out, query.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("megatrain::causal_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    edges: Tensor | None,
    out: Tensor,
    whole: Tensor,
    longest: int,
    window: int,
    scale: float,
) -> list[Tensor]:
    leaves = [query, key, value]

    @cache  # the kernel computes it by itself
    def product_BTH() -> Tensor:
        return (gradient.float() * out.float()).sum(-1)

    if query.is_cuda:
        g, q, k, v, result = (_laid_out(x, edges) for x in (gradient, query, key, value, out))
        how = edges, longest, window, scale
        gradients = [*flash_attention_backward(g, q, k, v, result, whole, *how)]
    else:
        logits, g = _logits(query, key, edges, window, scale), _grouped(gradient, key)

        def by_head(of_tokens: Tensor) -> Tensor:
            return of_tokens.transpose(1, 2).reshape(*logits.shape[:-1], 1)

        share = (logits - by_head(_by_token(whole, query))).exp()
        of_share = torch.einsum("bikgd,bjkd->bkgij", g, value.float()) - by_head(product_BTH())
        of_logits = share * of_share * scale
        gradients = [
            torch.einsum("bkgij,bjkd->bikgd", of_logits, key.float()).flatten(2, 3),
            torch.einsum("bkgij,bikgd->bjkd", of_logits, _grouped(query, key)),
            torch.einsum("bkgij,bikgd->bjkd", share, g),
        ]
    if sinks is not None:
        shares = (sinks.float() - _by_token(whole, query)).exp()
        of_sinks = -(shares * product_BTH()).sum((0, 1))
        leaves, gradients = [*leaves, sinks], [*gradients, of_sinks]
    every = zip(gradients, leaves, strict=True)
    return [each.to(x.dtype).contiguous().view(x.shape) for each, x in every]


@_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Any, *_: Any) -> Any:
    inputs = (query, key, value, sinks)
    every = (x for x in inputs if x is not None)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in every]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *saved, ctx.longest, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*saved, *output)


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    how = ctx.longest, ctx.window, ctx.scale
    gradients = _backward(gradient.contiguous(), *ctx.saved_tensors, *how)
    of_leaves = [*gradients, None][:4]  # the last is of sinks
    return *of_leaves, None, None, None, None


causal_attention.register_autograd(_gradients, setup_context=_save)


def _with_sinks(sums: Tensor, sinks: Tensor | None) -> Tensor:
    return sums if sinks is None else torch.logaddexp(sums, sinks.float()[:, None])


def _laid_out(rows: Tensor, edges: Tensor | None) -> Tensor:
    return rows if edges is None else rows.flatten(0, 1)


def _by_token(sums: Tensor, query: Tensor) -> Tensor:
    """Sums `[B, H, T]`, or `[H, B T]` of documents, as `[B, T, H]`."""
    rows, tokens, heads, _ = query.shape
    return sums.transpose(-2, -1).reshape(rows, tokens, heads)


def _logits(query: Tensor, key: Tensor, edges: Tensor | None, window: int, scale: float) -> Tensor:
    """`[B, K, G, T, T]` in fp32: K heads of keys, G of queries for each."""
    rows, tokens = query.shape[:2]
    edges = row_edges(rows, tokens, query.device) if edges is None else edges
    seen = document_mask(edges, rows, tokens, window or None)[:, :, None]
    logits = torch.einsum("bikgd,bjkd->bkgij", _grouped(query, key), key.float()) * scale
    return logits.masked_fill(~seen, -torch.inf)


def _grouped(of_queries: Tensor, key: Tensor) -> Tensor:
    return of_queries.float().unflatten(2, (key.shape[2], -1))
