"""Caches of keys and values: if a model works with one, its size, and reuse in a chat.

Short trials of the model show the first two, and whether padding changes its logits.
"""

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from megatrain.base.units import gib
from megatrain.compat.transformers import DynamicLayer
from megatrain.device import Device, free_bytes
from megatrain.errors import DoesNotFit, MegatrainError, first_line

_TRIED = (2, 3)  # tokens of the prompts whose caches are compared

# For each layer: bytes of a row at both lengths, and the most tokens that it keeps.
_Layers = list[tuple[int, int, int | None]]
_known: WeakKeyDictionary[PreTrainedModel, _Layers | None] = WeakKeyDictionary()

log = logging.getLogger(__name__)


def takes_cache(model: PreTrainedModel) -> bool:
    """True if the model computes with a cache; tried once for a model.

    A cache of states alone does not count its tokens, and masks of some families ask for the count;
    others do not compute with one at all.
    """
    return _layers_of(model) is not None


def cache_bytes(model: PreTrainedModel, rows: int, tokens: int) -> int:
    """Bytes that the model's cache takes of `rows` rows of `tokens` tokens.

    Measured once for a model, by two short prompts: what a layer keeps of a token is the same of
    each, up to its window. The largest layer counts twice, since a cache grows into a new one.
    """
    sizes = []
    for first, second, window in _layers_of(model) or []:
        kept = min(tokens, window or tokens)
        sizes.append(rows * (first + (second - first) * (kept - _TRIED[0])))
    return sum(sizes) + max(sizes, default=0)


def check_cache(
    device: Device, model: PreTrainedModel, rows: int, tokens: int, past: Any = None
) -> None:
    """Raises DoesNotFit unless the device has room for the cache; `past` is allocated already."""
    taken = sum(num_bytes for num_bytes, _ in _layers(past))
    needed, free = cache_bytes(model, rows, tokens) - taken, free_bytes(device)
    if needed > free:
        raise DoesNotFit(
            f"the keys and values of {rows} prompts of {tokens} tokens take {gib(needed)}, and "
            f"{gib(free)} are free; take fewer prompts at once, shorter ones, or fewer new tokens"
        )


def _layers_of(model: PreTrainedModel) -> _Layers | None:
    """The cache of each layer; None: the model does not compute with a cache."""
    if model not in _known:
        try:
            outputs = (_next_token(model, [0] * n, 0, use_cache=True) for n in _TRIED)
            first, second = (_layers(output.past_key_values) for output in outputs)
            pairs = zip(first, second, strict=True)
            _known[model] = [(a, b, window) for (a, window), (b, _) in pairs]
        except (torch.OutOfMemoryError, MegatrainError):
            raise
        except Exception as error:  # of the model's code: a mask that asks states for their length
            log.info(
                "it generates with no cache of %s, every token is made of all before it anew: %s",
                model.config.model_type,
                first_line(error),
            )
            _known[model] = None
    return _known[model]


def _next_token(model: PreTrainedModel, ids: list[int], padding: int, **options: bool) -> Any:
    """The output of `generate` for one token after `ids`, the first `padding` of them masked."""
    row = torch.tensor([ids], device=model.device)
    mask = (torch.arange(len(ids), device=model.device) >= padding).long()[None]
    return model.generate(
        row,
        attention_mask=mask,
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )


def _layers(cache: Any) -> list[tuple[int, int | None]]:
    """Bytes and sliding window (None: none) of each layer of a cache."""
    if cache is None:
        return []
    layers = getattr(cache, "layers", [cache])
    return [
        (_held(getattr(layer, "__dict__", layer)), getattr(layer, "sliding_window", None))
        for layer in layers
    ]


def _held(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_held, value.values()))
    return sum(map(_held, value)) if isinstance(value, list | tuple) else 0


_PROMPT = (5, 7, 6, 9)  # ids that every vocabulary has
_PADDED = 3
_SHARE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the logits' spread: more is no rounding
_heeding: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def heeds_mask(model: PreTrainedModel) -> bool:
    """True if padding does not change a prompt's logits; tried once for a model.

    States and convolutions of some families include padding.
    """
    if model not in _heeding:
        plain, padded = _logits(model, 0), _logits(model, _PADDED)
        spread = float((plain - plain.mean()).abs().max())
        share = _SHARE.get(model.dtype, 0.1)
        _heeding[model] = float((plain - padded).abs().max()) <= share * spread
    return _heeding[model]


def _logits(model: PreTrainedModel, padding: int) -> Tensor:
    ids, cached = [_PROMPT[0]] * padding + list(_PROMPT), takes_cache(model)
    return _next_token(model, ids, padding, use_cache=cached, output_logits=True).logits[0].float()


class Kept:
    """The cache of the last text, and that text's tokens.

    Kept only if each layer keeps every token: windows and states cannot be cut back to where a
    new text differs.
    """

    def __init__(self) -> None:
        self._ids: Sequence[int] = ()
        self._cache: Any = None

    def take(self, ids: Sequence[int]) -> Any:
        """The cache of the longest kept beginning of `ids`; None: nothing is kept.

        The caller changes the cache, so nothing is kept until `keep`.
        """
        cache, self._cache = self._cache, None
        if cache is None:
            return None
        pairs = enumerate(zip(ids, self._ids, strict=False))
        same = next((at for at, (new, old) in pairs if new != old), len(self._ids))
        length = cache.get_seq_length()
        same = min(same, len(ids) - 1, length)  # the last token's logits are needed
        if same == 0:
            return None
        if same < length:
            cache.crop(same - length)
        return cache

    def keep(self, ids: Sequence[int], cache: Any) -> None:
        """Keep a text's cache; `ids` are the tokens of its prompt and its reply."""
        whole = isinstance(cache, DynamicCache) and all(
            type(x) is DynamicLayer for x in cache.layers
        )
        self._ids, self._cache = ids, cache if whole else None
