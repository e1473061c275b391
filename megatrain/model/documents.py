"""Attention within the documents of packed rows, or images of a batch, without a mask.

Made for transformers' models as one of its implementations of attention, in the place of "sdpa".
Where documents end is told as transformers tells it to flash attention, by arguments that a model
hands on to its layers (`cu_seq_lens_q`): on a GPU the variable-length kernel takes them, elsewhere
each call makes the mask that "sdpa" would be given. Encoders that get the patches of all images as
one row tell in the same way where images, or windows of them, end.
Legend: B rows, T tokens of a row, H heads, D width of a head.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from megatrain.compat.torch import flash_attention, mark_dynamic
from megatrain.compat.transformers import (
    attention_of,
    eager_mask,
    sdpa_attention_forward,
    sdpa_mask,
    set_attention,
)
from megatrain.errors import explained
from megatrain.loss import IGNORED
from megatrain.model.media import of_media

Value = TypeVar("Value")

OURS = "megatrain_"
"""Prefix of the names of implementations that stand for the one by masks."""

BY_LENGTHS, BY_MASKS, BY_IMAGES = f"{OURS}documents", "sdpa", f"{OURS}flash"
"""Names of implementations; encoders tell lengths to those with "flash" in their names."""

BY_SINKS, BY_EAGER, BY_WINDOWS = f"{OURS}sinks", f"{OURS}eager", f"{OURS}windows"
"""Those of model/causal_attention.py: for layers with sinks or soft caps in the place of "eager",
also of rows that are told documents alone, for layers with windows in the place of "sdpa"."""

MOST_WIDTH = 256
"""Of a head, in torch's flash kernels."""
_LEAST_LONGEST = 4096  # tokens; blocks of shorter documents that have no token cost next to nothing

TOLD: ContextVar[bool] = ContextVar("TOLD", default=False)
"""True while a forward runs that attends by lengths, and makes no masks of positions."""


def is_packed(micro: Mapping[str, Tensor]) -> bool:
    """True if documents are kept apart: positions `[B, T]` start anew, and there is no mask.

    Where an attention mask is given, even one of ones, transformers heeds that alone.
    """
    return "attention_mask" not in micro and starts_anew(micro)


def starts_anew(micro: Mapping[str, Tensor]) -> bool:
    """True if positions `[B, T]` start anew within a row."""
    return "position_ids" in micro and bool(document_starts(micro["position_ids"])[:, 1:].any())


def document_starts(position_ids: Tensor) -> Tensor:
    """True for tokens `[B, T]` that begin a document: their positions do not count on."""
    goes_on = position_ids.diff(dim=-1) == 1
    return F.pad(~goes_on, (1, 0), value=True)


def document_edges(position_ids: Tensor) -> Tensor:
    """Places in all rows `[B, T]`, end to end, where documents begin, and the end of the last."""
    starts = document_starts(position_ids).flatten().nonzero()[:, 0]
    return F.pad(starts, (0, 1), value=position_ids.numel())


def unpacked(micro: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Documents of packed rows `[B, T]` as padded rows of their own `[N, L]`; media as it is."""
    lengths = document_edges(micro["position_ids"]).diff().tolist()

    def rows(values: Tensor, padding: int) -> Tensor:
        return pad_sequence(values.flatten().split(lengths), True, padding)

    alone = {
        name: value if of_media(name) else rows(value, IGNORED if name == "labels" else 0)
        for name, value in micro.items()
        if name != "position_ids"
    }
    return alone | {"attention_mask": rows(torch.ones_like(micro["input_ids"]), 0)}


def packed_positions(model: nn.Module, micro: Mapping[str, Tensor]) -> Tensor:
    """The positions of packed rows that a model's forward takes: `[B, T]`, or `[4, B, T]`.

    Models that place images in time, height and width (M-RoPE) take the positions of text, which
    say where documents begin, and three more: what `get_rope_index` gives for each document alone.

    Raises InputError: the model has no positions for these documents.
    """
    places = micro["position_ids"]
    modules = (module for module in model.modules() if hasattr(module, "get_rope_index"))
    index: Any = getattr(next(modules, None), "get_rope_index", None)
    if index is None:
        return places
    if not any(map(of_media, micro)):
        return places.expand(4, -1, -1)
    alone, names = unpacked(micro), inspect.signature(index).parameters
    problem = "packed rows with images or sounds: the model has no positions for these documents"
    with explained(problem, "train them without packing (data.packing: false)"):
        of_media_3NL, _ = index(**{name: alone[name] for name in names if name in alone})
    of_media_3BT = of_media_3NL[:, alone["attention_mask"].bool()].view(-1, *places.shape)
    return torch.cat([places[None], of_media_3BT])


def length_arguments(position_ids: Tensor, device: torch.device) -> dict[str, Any]:
    """Arguments of a model's forward: where documents of rows `[B, T]` begin, the longest's length.

    Layers are compiled once for any number of documents, but anew for each length of the longest.
    So that length is rounded up to a power of two, `_LEAST_LONGEST` at least.
    """
    edges = document_edges(position_ids).to(torch.int32)
    longest = max(1 << (int(edges.diff().max()) - 1).bit_length(), _LEAST_LONGEST)
    longest = min(longest, position_ids.shape[1])
    edges = edges.to(device)
    mark_dynamic(edges)
    return {
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def chosen_attention(name: str | None) -> str | None:
    """The attention that a model was opened with, for the one that replaces it in training.

    Checkpoints name the former: no other program knows the latter.
    """
    if name is None or not name.startswith(OURS):
        return name
    return "eager" if name in (BY_SINKS, BY_EAGER) else BY_MASKS


def attend(modules: list[nn.Module], name: str) -> None:
    """Have modules attend by another implementation of ours, or by masks, in place."""
    parts = [m for root in modules for m in root.modules()]
    with_sinks = any(map(has_sinks, parts))
    configs = (getattr(m, "config", None) for m in parts)
    for config in {id(c): c for c in configs if isinstance(c, PreTrainedConfig)}.values():
        current = attention_of(config)
        if current != BY_IMAGES and chosen_attention(current) == BY_MASKS:
            set_attention(config, name)
        elif with_sinks and current in ("eager", BY_EAGER):
            set_attention(config, BY_EAGER if name == BY_LENGTHS else "eager")


def attend_by_images(model: nn.Module) -> None:
    """Have encoders that else attend to each image alone attend to all in one call, in place.

    Their attention gets a configuration of its own: no other may name what code looks for a kernel.
    """
    ours: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        takes_edges = "cu_seqlens" in inspect.signature(type(module).forward).parameters
        if takes_edges and config is not None and attention_of(config) == BY_MASKS:
            module.config = ours.setdefault(id(config), copy.deepcopy(config))
            set_attention(module.config, BY_IMAGES)


def has_sinks(module: nn.Module) -> bool:
    """True for attention with a learnt logit of each head."""
    return isinstance(getattr(module, "sinks", None), Tensor)


@contextmanager
def set_to(value: Value, variable: ContextVar[Value]) -> Iterator[None]:
    """Within this context a variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def are_told(arguments: Mapping[str, Any]) -> bool:
    """True if layers are told documents by lengths, in place of a mask of these arguments."""
    # An extra mask, beside order, window and documents, comes with use_vmap.
    return TOLD.get() and not arguments.get("use_vmap")


def _mask(make: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
    return None if are_told(kwargs) else make(*args, **kwargs)


def _attention(
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
    """Attention over `[B, H, T, D]`; fewer heads of keys and values are shared.

    Args: `within_images`: over patches `[1, H, N, D]`, of which those of an image see each other.
    """
    edges, window = cu_seq_lens_q, None if within_images else options.get("sliding_window")
    if edges is not None and (within_images or attention_mask is None):
        if query.is_cuda and has_kernel(query, value, options):
            causal, scale = not within_images, options.get("scaling")
            return _varlen(query, key, value, edges, max_length_q, window or 0, scale, causal), None
        if within_images:
            lengths = edges.diff().tolist()
            images = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
            each = (sdpa_attention_forward(module, *image, None, **options)[0] for image in images)
            return torch.cat([*each], dim=1), None
        attention_mask = document_mask(edges, query.shape[0], query.shape[2], window)
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return out, None


attention_within_images = partial(_attention, within_images=True)


def has_kernel(query: Tensor, value: Tensor, options: Mapping[str, Any]) -> bool:
    """True if torch's flash kernel attends so, with keys as wide as queries `[B, H, T, D]`."""
    plain = not options.get("dropout") and options.get("position_bias") is None
    width, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    fits = width % 8 == 0 and value.shape[-1] <= width <= MOST_WIDTH
    return plain and fits and half


def _varlen(query: Tensor, key: Tensor, value: Tensor, *how: Any) -> Tensor:
    """`[B, T, H, D of values]`; further arguments as of `flash_attention`."""
    rows, heads, tokens, width = query.shape
    short = width - value.shape[-1]
    padded = F.pad(value, (0, short)) if short else value
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, padded))
    out, _ = flash_attention(q, k, v, *how)
    return out.view(rows, tokens, heads, width)[..., : width - short]


def row_edges(rows: int, tokens: int, device: torch.device) -> Tensor:
    """`document_edges` of rows that are one document each."""
    return torch.arange(rows + 1, device=device, dtype=torch.int32) * tokens


def document_mask(edges: Tensor, rows: int, tokens: int, window: int | None) -> Tensor:
    """`[B, 1, T, T]` bools: the tokens that each token sees."""
    at = torch.arange(rows * tokens, device=edges.device, dtype=edges.dtype)
    document_BT = torch.searchsorted(edges, at, right=True).view(rows, 1, tokens)
    place_T = at[:tokens]
    back_TT = place_T[:, None] - place_T[None]
    near_TT = (back_TT >= 0) & (back_TT < window) if window else back_TT >= 0
    return (document_BT[..., :, None] == document_BT[..., None, :]) & near_TT


AttentionInterface.register(BY_LENGTHS, _attention)
AttentionMaskInterface.register(BY_LENGTHS, partial(_mask, sdpa_mask))
AttentionMaskInterface.register(BY_EAGER, partial(_mask, eager_mask))
AttentionInterface.register(BY_IMAGES, attention_within_images)
AttentionMaskInterface.register(BY_IMAGES, sdpa_mask)
