"""Keys and values of a talk so far, so that its next turn begins where the last one ended."""

from collections.abc import Sequence
from typing import Any

from transformers import DynamicCache

from megatrain.compat.transformers import DynamicLayer


class Kept:
    """The cache of the last text, and the tokens that it is of.

    Only where each layer keeps every token: windows and states cannot be taken back to where a
    template goes on otherwise.
    """

    def __init__(self) -> None:
        self._ids: Sequence[int] = ()
        self._cache: Any = None

    def take(self, ids: Sequence[int]) -> Any:
        """The cache of as much of the beginning of `ids` as there is; None: of nothing.

        Whoever takes it changes it: nothing is kept until `keep`.
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
        """Keep the cache of a text that was made; `ids` are those of its prompt and its own."""
        whole = isinstance(cache, DynamicCache) and all(
            type(x) is DynamicLayer for x in cache.layers
        )
        self._ids, self._cache = ids, cache if whole else None
