"""Attention in transformers' models without masks `[B, 1, T, T]`, in memory linear in the row.

These implementations are registered beside transformers' "sdpa" and "eager". **Documents** of
packed rows, and images of a batch: their edges are passed as transformers passes them to flash
attention (`cu_seq_lens_q`). On a GPU the variable-length kernel takes them, elsewhere each call
makes the mask that "sdpa" would get. **Windows**: torch's flash kernel takes a window as a number.

A **sink** (gpt-oss) is a logit of a head that takes a share of each token's softmax and has no
value. A kernel for plain attention returns the result `out` and the logarithm `l` of each token's
sum; with `m = logaddexp(l, sink)` the result with the sink is `out * exp(l - m)`. From this and `m`
the kernel's backward computes the gradients: it needs them only for probabilities `exp(logit - m)`
and for `sum(gradient * out)`. That kernel has no soft caps (model/attention_chunks.py).

A mask of the layers that hides more than order, window and documents do (padding) is kept.
Legend: B rows, T tokens of a row, H heads, D width of a head.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from megatrain.compat import transformers as hf
from megatrain.compat.torch import flash_attention, flash_attention_backward
from megatrain.model.attention_chunks import Seen, attend_in_chunks, gradients_in_chunks
from megatrain.model.spec import ModelSpec
from megatrain.placement import Precision

OURS = "megatrain_"
"""Prefix of the names of our implementations."""

BY_LENGTHS, BY_MASKS, BY_IMAGES = f"{OURS}documents", "sdpa", f"{OURS}flash"
"""Names of implementations; encoders pass lengths to those with "flash" in their names."""

BY_SINKS, BY_EAGER, BY_WINDOWS = f"{OURS}sinks", f"{OURS}eager", f"{OURS}windows"
"""BY_SINKS replaces "eager" in layers with sinks or soft caps, BY_EAGER in such layers of packed
rows; BY_WINDOWS replaces "sdpa" in layers with windows."""

MOST_WIDTH = 256
"""The largest width of a head in torch's flash kernels."""


class _Forward(local):
    """State of the forward that runs in this thread, for the functions that make masks."""

    has_lengths = False  # True: layers get documents' lengths, and need no masks of positions
    # tokens of a row, in a trial of rows that ranks share: masks that hide some are refused
    trial_tokens: int | None = None


FORWARD = _Forward()


def chosen_attention(name: str | None) -> str | None:
    """transformers' name of the attention that one of ours replaces; any other name as it is.

    Checkpoints have transformers' name, as no other program knows ours.
    """
    if name is None or not name.startswith(OURS):
        return name
    return "eager" if name in (BY_SINKS, BY_EAGER) else BY_MASKS


def attend(modules: list[nn.Module], name: str) -> None:
    """Set attention in the configurations of modules: an implementation of ours, or BY_MASKS."""
    with_sinks = any(has_sinks(m) for root in modules for m in root.modules())
    for config in _configs(modules):
        current = hf.attention_of(config)
        if current != BY_IMAGES and chosen_attention(current) == BY_MASKS:
            hf.set_attention(config, name)
        elif with_sinks and current in ("eager", BY_EAGER):
            hf.set_attention(config, BY_EAGER if name == BY_LENGTHS else "eager")


def _configs(modules: list[nn.Module]) -> list[PreTrainedConfig]:
    configs = (getattr(m, "config", None) for root in modules for m in root.modules())
    return list({id(c): c for c in configs if isinstance(c, PreTrainedConfig)}.values())


@contextmanager
def attending(modules: list[nn.Module], name: str) -> Iterator[None]:
    """Within this context modules attend as after `attend`."""
    before = [(config, hf.attention_of(config)) for config in _configs(modules)]
    try:
        attend(modules, name)
        yield
    finally:
        for config, attention in before:
            hf.set_attention(config, attention)


def attend_by_images(model: nn.Module) -> None:
    """Let encoders that attend to each image in a call of its own attend to all images in one.

    Their attention gets its own copy of the configuration: other code must not find the new name.
    """
    copies: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        takes_edges = "cu_seqlens" in inspect.signature(type(module).forward).parameters
        if takes_edges and config is not None and hf.attention_of(config) == BY_MASKS:
            module.config = copies.setdefault(id(config), copy.deepcopy(config))
            hf.set_attention(module.config, BY_IMAGES)


def has_sinks(module: nn.Module) -> bool:
    """True if a module is attention with a learnt logit (sink) for each head."""
    return isinstance(getattr(module, "sinks", None), Tensor)


def lengths_suffice(arguments: Mapping[str, Any]) -> bool:
    """True if documents' lengths replace the mask that these arguments ask for."""
    # A mask of more than order, window and documents comes with use_vmap.
    return FORWARD.has_lengths and not arguments.get("use_vmap")


def attend_by_kernel(spec: ModelSpec, precision: Precision) -> None:
    """Let a model on a GPU attend by BY_SINKS or BY_WINDOWS, if layers have sinks, caps or windows.

    In fp32, which torch's flash kernel lacks, only layers with soft caps change.
    """
    model = spec.capture.model
    in_bf16 = precision != "fp32"
    if not hf.takes_flash_attention(model):
        return
    kinds = {id(layer.kind): layer.kind for layer in spec.layers}.values()
    modules = [module for kind in kinds for module in kind.module.modules()]
    special = [m for m in modules if _has_softcap(m) or (in_bf16 and has_sinks(m))]
    replaces_eager = bool(special) and all(map(_is_replaceable, special))
    module_configs = [module.config for module in modules if hasattr(module, "config")]
    for config in [model.config, model.config.get_text_config(), *module_configs]:
        has_windows = bool(getattr(config, "sliding_window", None))
        if replaces_eager and hf.attention_of(config) == "eager":
            hf.set_attention(config, BY_SINKS)
        if in_bf16 and has_windows and hf.attention_of(config) == BY_MASKS:
            hf.set_attention(config, BY_WINDOWS)


def takes_lengths(model: PreTrainedModel, *, fp32: bool) -> bool:
    """True if documents' lengths can replace a model's masks; `fp32`: it computes so on a GPU."""
    name = hf.attention_of(model.config)
    is_replaceable = not fp32 and (name == BY_SINKS or chosen_attention(name) == BY_MASKS)
    if name in ("eager", BY_EAGER):
        with_sinks = [module for module in model.modules() if has_sinks(module)]
        is_replaceable = bool(with_sinks) and all(map(_is_replaceable, with_sinks))
    return is_replaceable and hf.takes_flash_attention(model)


def _has_softcap(module: nn.Module) -> bool:
    return bool(getattr(module, "attn_logit_softcapping", None))


def _eager_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Any]] | None:
    """The eager attention in the file of a module's forward; None: there is none."""
    return inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")


def _is_replaceable(module: nn.Module) -> bool:
    """True if our kernels compute a module's attention: heads' width fits, without dropout."""
    width = getattr(module, "head_dim", None)
    fits = isinstance(width, int) and width % 8 == 0 and width <= MOST_WIDTH
    no_dropout = not getattr(module, "attention_dropout", 0.0)
    return (fits or _has_softcap(module)) and no_dropout and _eager_attention(module) is not None


def _mask_if_needed(make: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
    return None if lengths_suffice(kwargs) else make(*args, **kwargs)


def _attention_in_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    within_images: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention over `[B, H, T, D]`; keys and values may have fewer heads.

    Args: `within_images`: over patches `[1, H, N, D]`, which attend to all of the same image.
    """
    edges = cu_seq_lens_q
    window = None if within_images else options.get("sliding_window")
    if edges is not None and (within_images or attention_mask is None):
        if query.is_cuda and has_kernel(query, value, options):
            scale, causal = options.get("scaling"), not within_images
            return _varlen(query, key, value, edges, max_length_q, window or 0, scale, causal), None
        if within_images:
            lengths = edges.diff().tolist()
            images = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
            parts = (hf.sdpa_attention_forward(module, *qkv, None, **options)[0] for qkv in images)
            return torch.cat([*parts], dim=1), None
        attention_mask = document_mask(edges, query.shape[0], query.shape[2], window)
    out, _ = hf.sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return out, None


attention_within_images = partial(_attention_in_documents, within_images=True)


def has_kernel(query: Tensor, value: Tensor, options: Mapping[str, Any]) -> bool:
    """True if torch's flash kernel supports this attention; keys are as wide as queries."""
    plain = not options.get("dropout") and options.get("position_bias") is None
    width = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    fits = width % 8 == 0 and value.shape[-1] <= width <= MOST_WIDTH
    return plain and fits and half


def _varlen(query: Tensor, key: Tensor, value: Tensor, *how: Any) -> Tensor:
    """Attention by documents `[B, T, H, D of values]`; `how`: arguments of `flash_attention`."""
    rows, heads, tokens, width = query.shape
    value_width = value.shape[-1]
    padded = F.pad(value, (0, width - value_width)) if value_width < width else value
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, padded))
    out, _ = flash_attention(q, k, v, *how)
    return out.view(rows, tokens, heads, width)[..., :value_width]


def document_starts(position_ids: Tensor) -> Tensor:
    """True for tokens `[B, T]` that begin a document: whose position is not the next one."""
    return F.pad(position_ids.diff(dim=-1) != 1, (1, 0), value=True)


def row_edges(rows: int, tokens: int, device: torch.device) -> Tensor:
    """The edges of documents, if each row is one (`document_edges` of model/documents.py)."""
    return torch.arange(rows + 1, device=device, dtype=torch.int32) * tokens


def document_mask(edges: Tensor, rows: int, tokens: int, window: int | None) -> Tensor:
    """True if a token attends to another, `[B, 1, T, T]`; `edges`: as `document_edges` returns."""
    places = torch.arange(rows * tokens, device=edges.device, dtype=edges.dtype)
    document_BT = torch.searchsorted(edges, places, right=True).view(rows, 1, tokens)
    place_T = places[:tokens]
    distance_TT = place_T[:, None] - place_T[None]
    near_TT = (distance_TT >= 0) & (distance_TT < window) if window else distance_TT >= 0
    return (document_BT[..., :, None] == document_BT[..., None, :]) & near_TT


def _attention_with_sinks(
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
    """Attention over `[B, H, T, D]` with sinks or caps; keys and values may have fewer heads."""
    lengths = None  # of padded rows: `_lengths_or_mask` passes these, as int32, for a mask
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        lengths = attention_mask.flatten()
    elif attention_mask is not None:
        eager = _eager_attention(module)
        assert eager is not None  # see `_is_replaceable`
        return eager(module, query, key, value, attention_mask, scaling=scaling, **options)
    sinks = getattr(module, "sinks", None)
    sinks = None if sinks is None else sinks.to(query.dtype)  # None: a layer of another kind
    window = options.get("sliding_window") or 0
    cap = options.get("softcap") or 0.0
    width = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - width))  # values may be narrower
    heads = (x.transpose(1, 2) for x in (query, key, value))
    out, _ = causal_attention(
        *heads, sinks, cu_seq_lens_q, max_length_q, window, scaling, cap, lengths
    )
    return out[..., :width], None


def _lengths_or_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of `eager_mask`; None: only order, window and documents hide tokens.

    For rows padded at their end it is their lengths `[B, 1, 1, 1]`, int32, if every token's window
    has a token that is no padding. The last token's window begins last, at `tokens - local_size`.
    """
    if lengths_suffice(kwargs) or hf.is_causal_alone(kwargs):
        return None
    padding = kwargs.get("attention_mask")
    if padding is not None and hf.is_causal_alone({**kwargs, "attention_mask": None}):
        lengths = padding.sum(1, dtype=torch.int32)
        tokens = padding.shape[1]
        least_length = max(1, tokens + 1 - (kwargs.get("local_size") or tokens))
        is_at_end = (padding.bool().int().diff(dim=1) <= 0).all()
        if bool(is_at_end & (lengths >= least_length).all()):
            return lengths[:, None, None, None]
    return hf.eager_mask(*args, **kwargs)


def _attention_in_windows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`sdpa_attention_forward`; with the empty mask of `_window_mask`, attention in a window."""
    if attention_mask is None or attention_mask.numel():
        return hf.sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    window = attention_mask.shape[2]  # tokens
    if has_kernel(query, value, options) and query.shape[-1] == value.shape[-1]:
        heads = (x.transpose(1, 2) for x in (query, key, value))
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        out, _ = causal_attention(*heads, None, None, 0, window, scale)
        return out, None
    rows, _, tokens, _ = query.shape
    mask = document_mask(row_edges(rows, tokens, query.device), rows, tokens, window)
    return hf.sdpa_attention_forward(module, query, key, value, mask, **options)


def _window_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of `sdpa_mask`; for a sliding window alone an empty tensor `[1, 1, window, 0]`.

    `_attention_in_windows` reads the window's width from its shape.
    """
    window, config = kwargs.get("local_size"), kwargs.get("config")
    slides = window == getattr(config, "sliding_window", None)  # else attention in chunks
    if window and slides and window < kwargs["kv_length"] and hf.is_causal_alone(kwargs):
        return torch.empty(1, 1, window, 0, dtype=torch.bool, device=kwargs["device"])
    return hf.sdpa_mask(*args, **kwargs)


for _name, _attend, _make_mask in (
    (BY_LENGTHS, _attention_in_documents, partial(_mask_if_needed, hf.sdpa_mask)),
    (BY_IMAGES, attention_within_images, hf.sdpa_mask),
    (BY_SINKS, _attention_with_sinks, _lengths_or_mask),
    (BY_EAGER, _attention_with_sinks, partial(_mask_if_needed, hf.eager_mask)),
    (BY_WINDOWS, _attention_in_windows, _window_mask),
):
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, _make_mask)


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
        sinks: a logit of each head `[H]`, which the sums include; None: no sinks.
        edges: ends of documents in the rows laid end to end, int32; None: each row is one.
        longest: tokens of the longest document.
        window: tokens to which a token attends, itself included; 0: all before it.
        cap: of logits, `cap * tanh(logit / cap)`; 0: none.
        lengths: tokens of each row that are no padding, int32; None: all.
    """
    if query.is_cuda and not cap and lengths is None and query.dtype != torch.float32:
        q, k, v = (_laid_out(x, edges) for x in (query, key, value))
        plain, sums = flash_attention(q, k, v, edges, longest, window, scale)
    else:
        seen = Seen(*_sight(query, edges, longest, window, lengths), scale, cap)
        plain, sums_BTH = attend_in_chunks(query, key, value, seen)
        plain = _laid_out(plain, edges)
        sums = _laid_out(sums_BTH, edges).transpose(-2, -1).contiguous()
    if sinks is None:
        return plain.view(query.shape), sums
    with_sinks = torch.logaddexp(sums, sinks.float()[:, None])
    share = (sums - with_sinks).exp().transpose(-2, -1).unsqueeze(-1)
    return (plain * share).to(query.dtype).contiguous().view(query.shape), with_sinks.contiguous()


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
    sums: Tensor,
    longest: int,
    window: int,
    scale: float,
    cap: float = 0.0,
    lengths: Tensor | None = None,
) -> list[Tensor]:
    """Gradients of queries, keys, values, sinks if any; `out`, `sums`: of `causal_attention`."""
    leaves = [query, key, value]
    if query.is_cuda and not cap and lengths is None and query.dtype != torch.float32:
        g, q, k, v, result = (_laid_out(x, edges) for x in (gradient, query, key, value, out))
        gradients = [
            *flash_attention_backward(g, q, k, v, result, sums, edges, longest, window, scale)
        ]
    else:
        seen = Seen(*_sight(query, edges, longest, window, lengths), scale, cap)
        sums_BTH = _by_token(sums, query)
        gradients = gradients_in_chunks(gradient, query, key, value, out, sums_BTH, seen)
    if sinks is not None:
        shares_BTH = (sinks.float() - _by_token(sums, query)).exp()
        product_BTH = (gradient.float() * out.float()).sum(-1)
        sinks_gradient = -(shares_BTH * product_BTH).sum((0, 1))
        leaves, gradients = [*leaves, sinks], [*gradients, sinks_gradient]
    pairs = zip(gradients, leaves, strict=True)
    return [gradient_of.to(x.dtype).contiguous().view(x.shape) for gradient_of, x in pairs]


@_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Any, *_: Any) -> Any:
    return [x.new_empty(x.shape) for x in (query, key, value, sinks) if x is not None]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *saved, ctx.longest, ctx.window, ctx.scale, ctx.cap, lengths = inputs
    ctx.save_for_backward(*saved, *output, lengths)


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *saved, lengths = ctx.saved_tensors
    options = ctx.longest, ctx.window, ctx.scale, ctx.cap, lengths
    gradients = _backward(gradient.contiguous(), *saved, *options)
    four = [*gradients, None][:4]  # of query, key, value and sinks; None: there are no sinks
    return *four, *[None] * 6  # edges and options have no gradients


causal_attention.register_autograd(_gradients, setup_context=_save)


def _laid_out(rows: Tensor, edges: Tensor | None) -> Tensor:
    """Rows `[B, T, ...]`; with edges of documents end to end, `[B T, ...]`."""
    return rows if edges is None else rows.flatten(0, 1)


def _by_token(sums: Tensor, query: Tensor) -> Tensor:
    """Sums `[B, H, T]`, or `[H, B T]` of documents, as `[B, T, H]`."""
    rows, tokens, heads, _ = query.shape
    return sums.transpose(-2, -1).reshape(rows, tokens, heads)


def _sight(
    query: Tensor, edges: Tensor | None, longest: int, window: int, lengths: Tensor | None
) -> tuple[Tensor, Tensor, int]:
    """The fields `first_BT`, `last_BT` and `reach` of `Seen`."""
    rows, tokens = query.shape[:2]
    if edges is None:
        edges, longest = row_edges(rows, tokens, query.device), tokens
    reach = min(window or longest, longest)
    # The index of a token in the rows laid end to end, and its place in its row.
    index_BT = torch.arange(rows * tokens, device=query.device, dtype=torch.int32).view(rows, -1)
    place_T = index_BT[0]
    document_BT = torch.searchsorted(edges, index_BT, right=True, out_int32=True) - 1
    document_start_BT = edges[document_BT] - index_BT + place_T
    first_BT = document_start_BT.maximum(place_T + 1 - reach)
    last_BT = place_T.expand(rows, tokens)
    last_BT = last_BT if lengths is None else last_BT.minimum(lengths[:, None] - 1)
    return first_BT, last_BT, reach
