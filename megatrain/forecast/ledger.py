"""Memory by what it is for: what is taken now, and what was when most was."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from megatrain.base.units import align
from megatrain.compat.torch import memory_of

ACTIVATIONS, WORKING_SET, KEPT_GRAPHS = "activations", "working set", "kept graphs"
KEPT_ATTENTION = "kept attention"

_STEP = 256  # bytes: tensors begin at multiples, on the device and where they wait on the host


class Held:
    """Memory that is taken until nobody refers to it any more; it has no data."""

    __slots__ = ("_ledger", "_place", "_taken", "nbytes")
    dtype = torch.uint8

    def __init__(self, ledger: "Ledger", place: str, num_bytes: int, taken: int) -> None:
        self._ledger, self._place, self.nbytes, self._taken = ledger, place, num_bytes, taken

    def __del__(self) -> None:
        self._ledger.add_bytes(self._place, -self._taken)

    @property
    def shape(self) -> tuple[int]:
        """As of a tensor of bytes."""
        return (self.nbytes,)

    def contiguous(self) -> "Held":
        """As of a tensor."""
        return self


class Ledger:
    """Bytes by place, now (`live`) and when most were alive (`peak_live`)."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, int] = {}
        self.peak_live: Counter[str] = Counter()
        self.total_bytes = self.peak_bytes = 0
        self._known: dict[int, Any] = {}  # what tells their end, by storage

    def hold(self, place: str, num_bytes: int, taken: int | None = None) -> Any:
        """Memory that counts as long as somebody refers to it; stands for a tensor.

        Args: `taken`: bytes that count; None: all.
        """
        taken = num_bytes if taken is None else taken
        self.add_bytes(place, taken)
        self.took(0)
        return Held(self, place, num_bytes, taken)

    def made(self, tensor: Tensor, place: str, num_bytes: int | None = None) -> Tensor:
        """Count a tensor as long as its storage lives; `num_bytes`: not as many as it has."""
        storage, key = tensor.untyped_storage(), memory_of(tensor)
        if key not in self._known:
            size = align(storage.nbytes() if num_bytes is None else num_bytes, _STEP)
            self.add_bytes(place, size)
            self._known[key] = ref(storage, partial(self._gone, key, place, size))
            self.took(0)
        return tensor

    def _gone(self, key: int, place: str, num_bytes: int, _: Any) -> None:
        self._known.pop(key, None)
        self.add_bytes(place, -num_bytes)

    def add_bytes(self, place: str, num_bytes: int) -> None:
        """So many more bytes are alive; negative: fewer."""
        self.live[place] = self.live.get(place, 0) + num_bytes
        self.total_bytes += num_bytes

    @contextmanager
    def more(self, place: str, num_bytes: int) -> Iterator[None]:
        """Within this context so many more bytes are alive; negative: fewer."""
        self.add_bytes(place, num_bytes)
        yield
        self.add_bytes(place, -num_bytes)

    def took(self, num_bytes: int, beside: int = 0, place: str = WORKING_SET) -> None:
        """Note that so many bytes more were alive for a moment, `beside` so many of `place`."""
        if self.total_bytes + num_bytes + beside > self.peak_bytes:
            self.peak_bytes = self.total_bytes + num_bytes + beside
            self.peak_live = Counter(self.live)
            self.peak_live[WORKING_SET] += num_bytes
            self.peak_live[place] += beside
