"""Documents of packed rows: positions that start anew, and where documents begin and end.

Legend: B rows, T tokens of a row.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from megatrain.compat.torch import mark_dynamic
from megatrain.errors import explained
from megatrain.loss import IGNORED
from megatrain.model.media import of_media

_LEAST_LONGEST = 4096  # tokens; blocks of shorter documents that have no token cost next to nothing


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
