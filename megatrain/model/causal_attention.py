"""Causal attention with windows, sinks and soft caps in memory that grows with the row.

It stands in transformers' models for attention by masks `[B, 1, T, T]`. torch's flash kernel takes
a window as a number, and computes nothing beyond it.

A sink (gpt-oss) is a logit of a head that takes a share of each token's softmax and has no value.
The eager form makes logits `[B, H, T, T]` several times over. Here a kernel for plain attention
gives the result `out` and the logarithm `l` of each token's sum; with `m = logaddexp(l, sink)` the
result with the sink is `out * exp(l - m)`, and the same kernel's backward, given that and `m`,
gives the gradients: it needs the two only for probabilities `exp(logit - m)` and for
`sum(gradient * out)`. Soft caps are beyond that kernel (model/attention_chunks.py).

Where the layers' own mask says more than order, window and documents (padding), it is kept.
Legend: B rows, T tokens of a row, H heads, D width of a head.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

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
from megatrain.model.attention_chunks import Seen, attend_in_chunks, gradients_in_chunks
from megatrain.model.documents import (
    BY_EAGER,
    BY_MASKS,
    BY_SINKS,
    BY_WINDOWS,
    MOST_WIDTH,
    are_told,
    chosen_attention,
    document_mask,
    has_kernel,
    has_sinks,
    row_edges,
)
from megatrain.model.spec import ModelSpec
from megatrain.placement import Precision


def attend_by_kernel(spec: ModelSpec, precision: Precision) -> None:
    """Have a model's layers attend so on a GPU, in place, if they have sinks, caps or windows.

    torch's kernel computes in bf16: in fp32 layers stay as they are, but for those with caps.
    """
    model, half = spec.capture.model, precision != "fp32"
    if not takes_flash_attention(model):
        return
    kinds = {id(layer.kind): layer.kind for layer in spec.layers}.values()
    modules = [module for kind in kinds for module in kind.module.modules()]
    eager = [m for m in modules if _has_cap(m) or (half and has_sinks(m))]
    of_modules = [module.config for module in modules if hasattr(module, "config")]
    for config in [model.config, model.config.get_text_config(), *of_modules]:
        if eager and all(map(_is_plain, eager)) and attention_of(config) == "eager":
            set_attention(config, BY_SINKS)
        if half and getattr(config, "sliding_window", None) and attention_of(config) == BY_MASKS:
            set_attention(config, BY_WINDOWS)


def takes_lengths(model: PreTrainedModel, *, fp32: bool) -> bool:
    """True if a kernel can replace the masks of a model; on a GPU in `fp32` none of torch can."""
    name, with_sinks = attention_of(model.config), [m for m in model.modules() if has_sinks(m)]
    able = not fp32 and (name == BY_SINKS or chosen_attention(name) == BY_MASKS)
    if name in ("eager", BY_EAGER):
        able = bool(with_sinks) and all(map(_is_plain, with_sinks))
    return able and takes_flash_attention(model)


def _has_cap(module: nn.Module) -> bool:
    return bool(getattr(module, "attn_logit_softcapping", None))


def _eager(module: nn.Module) -> Callable[..., tuple[Tensor, Any]] | None:
    """The eager attention beside the code of a module's forward."""
    return inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")


def _is_plain(module: nn.Module) -> bool:
    """True if a module's attention has a width of kernels, no dropout, and an eager form."""
    width = getattr(module, "head_dim", None)
    fits = (isinstance(width, int) and width % 8 == 0 and width <= MOST_WIDTH) or _has_cap(module)
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
    lengths = None
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        lengths = attention_mask.flatten()
    elif attention_mask is not None:
        eager = _eager(module)
        assert eager is not None  # see `_is_plain`
        return eager(module, query, key, value, attention_mask, scaling=scaling, **options)
    sinks = getattr(module, "sinks", None)
    sinks = None if sinks is None else sinks.to(query.dtype)  # None: a layer of another kind
    window, cap = options.get("sliding_window") or 0, options.get("softcap") or 0.0
    width = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - width))  # values may be narrower
    heads = (x.transpose(1, 2) for x in (query, key, value))
    how = max_length_q, window, scaling, cap, lengths
    out, _ = causal_attention(*heads, sinks, cu_seq_lens_q, *how)
    return out[..., :width], None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """`eager_mask`'s mask; None where only order, window and documents hide tokens. For rows with
    padding at their end their lengths `[B, 1, 1, 1]`, int32, if each token sees one that counts."""
    if are_told(kwargs) or is_causal_alone(kwargs):
        return None
    padding = kwargs.get("attention_mask")
    if padding is not None and is_causal_alone({**kwargs, "attention_mask": None}):
        lengths, tokens = padding.sum(1, dtype=torch.int32), padding.shape[1]
        least = max(1, tokens + 1 - (kwargs.get("local_size") or tokens))
        at_end = (padding.bool().int().diff(dim=1) <= 0).all()
        if bool(at_end & (lengths >= least).all()):
            return lengths[:, None, None, None]
    return eager_mask(*args, **kwargs)


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
    """`sdpa_mask`'s mask; for a sliding window alone an empty tensor `[1, 1, window, 0]` instead.

    `_attention_in_windows` reads the window's width from its shape.
    """
    window, config = kwargs.get("local_size"), kwargs.get("config")
    slides = window == getattr(config, "sliding_window", None)  # else local_size is a chunk's
    if window and slides and window < kwargs["kv_length"] and is_causal_alone(kwargs):
        return torch.empty(1, 1, window, 0, dtype=torch.bool, device=kwargs["device"])
    return sdpa_mask(*args, **kwargs)


AttentionInterface.register(BY_SINKS, _attention)
AttentionMaskInterface.register(BY_SINKS, _mask)
AttentionInterface.register(BY_EAGER, _attention)
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
    cap: float = 0.0,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of `[B, T, H, D]`: the result, and the logarithms of the sums in fp32.

    Args:
        sinks: a logit `[H]`, which the sums count; None: there are none.
        edges: ends of documents in the rows laid end to end, int32; None: each row is one.
        longest: tokens of the longest document.
        window: tokens that a token sees, itself included; 0: all before it.
        cap: of logits, `cap * tanh(logit / cap)`; 0: none.
        lengths: tokens of each row that others see, int32; None: all.
    """
    if query.is_cuda and not cap and lengths is None and query.dtype != torch.float32:
        q, k, v = (_laid_out(x, edges) for x in (query, key, value))
        plain, sums = flash_attention(q, k, v, edges, longest, window, scale)
    else:
        seen = _seen(query, edges, longest, window, scale, cap, lengths)
        plain, sums_BTH = attend_in_chunks(query, key, value, seen)
        plain = _laid_out(plain, edges)
        sums = _laid_out(sums_BTH, edges).transpose(-2, -1).contiguous()
    if sinks is None:
        return plain.view(query.shape), sums
    whole = torch.logaddexp(sums, sinks.float()[:, None])
    share = (sums - whole).exp().transpose(-2, -1).unsqueeze(-1)
    return (plain * share).to(query.dtype).contiguous().view(query.shape), whole.contiguous()


@causal_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, edges: Any, *_: Any) -> Any:
    rows, tokens, heads = query.shape[:3]
    shape = [rows, heads, tokens] if edges is None else [heads, rows * tokens]
    return query.new_empty(query.shape), query.new_empty(shape, dtype=torch.float32)


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
    cap: float = 0.0,
    lengths: Tensor | None = None,
) -> list[Tensor]:
    leaves = [query, key, value]
    if query.is_cuda and not cap and lengths is None and query.dtype != torch.float32:
        g, q, k, v, result = (_laid_out(x, edges) for x in (gradient, query, key, value, out))
        how = edges, longest, window, scale
        gradients = [*flash_attention_backward(g, q, k, v, result, whole, *how)]
    else:
        seen = _seen(query, edges, longest, window, scale, cap, lengths)
        results = out, _by_token(whole, query)
        gradients = gradients_in_chunks(gradient, query, key, value, *results, seen)
    if sinks is not None:
        shares = (sinks.float() - _by_token(whole, query)).exp()
        product_BTH = (gradient.float() * out.float()).sum(-1)
        of_sinks = -(shares * product_BTH).sum((0, 1))
        leaves, gradients = [*leaves, sinks], [*gradients, of_sinks]
    every = zip(gradients, leaves, strict=True)
    return [each.to(x.dtype).contiguous().view(x.shape) for each, x in every]


@_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Any, *_: Any) -> Any:
    return [x.new_empty(x.shape) for x in (query, key, value, sinks) if x is not None]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *saved, ctx.longest, ctx.window, ctx.scale, ctx.cap, lengths = inputs
    ctx.save_for_backward(*saved, *output, lengths)


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *saved, lengths = ctx.saved_tensors
    how = ctx.longest, ctx.window, ctx.scale, ctx.cap, lengths
    gradients = _backward(gradient.contiguous(), *saved, *how)
    of_leaves = [*gradients, None][:4]  # the last is of sinks
    return *of_leaves, *[None] * 6


causal_attention.register_autograd(_gradients, setup_context=_save)


def _laid_out(rows: Tensor, edges: Tensor | None) -> Tensor:
    return rows if edges is None else rows.flatten(0, 1)


def _by_token(sums: Tensor, query: Tensor) -> Tensor:
    """Sums `[B, H, T]`, or `[H, B T]` of documents, as `[B, T, H]`."""
    rows, tokens, heads, _ = query.shape
    return sums.transpose(-2, -1).reshape(rows, tokens, heads)


def _seen(
    query: Tensor,
    edges: Tensor | None,
    longest: int,
    window: int,
    scale: float,
    cap: float,
    lengths: Tensor | None,
) -> Seen:
    rows, tokens = query.shape[:2]
    if edges is None:
        edges, longest = row_edges(rows, tokens, query.device), tokens
    reach = min(window or longest, longest)
    at_BT = torch.arange(rows * tokens, device=query.device, dtype=torch.int32).view(rows, tokens)
    place_T = at_BT[0]
    document_BT = torch.searchsorted(edges, at_BT, right=True, out_int32=True) - 1
    first_BT = (edges[document_BT] - at_BT + place_T).maximum(place_T + 1 - reach)
    last_BT = place_T.expand(rows, tokens)
    last_BT = last_BT if lengths is None else last_BT.minimum(lengths[:, None] - 1)
    return Seen(first_BT, last_BT, reach, scale, cap)
