"""Host memory for what waits from the forward to the backward, where a step needs more than before.

Graphs and attention results can be computed again; a host that is full cannot be helped. So a step
that is too large for them goes without.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from megatrain.base.units import gib
from megatrain.engine.assemble import host_bytes, kept_offload
from megatrain.engine.batch import Batch
from megatrain.engine.step import Parts
from megatrain.parallel.distributed import Ranks
from megatrain.placement import Planned
from megatrain.store.store import Store
from megatrain.telemetry.host import host_available_bytes

_log = logging.getLogger(__name__)

_KEPT = "host_kept_bytes"
_OTHERS = ("host_rows_bytes", "host_boundaries_bytes")  # which a step cannot do without

# What a step takes by the tokens of another is not exact, and the process grows a little.
_CAUTION = 1.05


class HostMemoryGuard:
    """Decides before each step whether host memory suffices for tensors that layers save there."""

    def __init__(
        self,
        store: Store,
        parts: Parts,
        limit_bytes: int | None,
        planned: Planned | None,
        alike: Ranks,
    ) -> None:
        """Args:
        limit_bytes: host memory that the process may take in all; None: what the machine allows.
        planned: a step that has room; None: the first step is measured.
        alike: ranks that must decide alike, since they exchange tensors within layers.
        """
        self._held, self._limit, self._alike = partial(host_bytes, store, parts), limit_bytes, alike
        self._offload, self._planned = kept_offload(parts), planned
        self._most_tokens, self._warned, self._warned_larger = 0, False, False
        self._seen: dict[str, tuple[int, int]] = {}  # bytes, for so many tokens
        if planned is not None:
            tokens = planned.tokens_per_step
            self._seen = {name: (planned.host_bytes[name], tokens) for name in (_KEPT, *_OTHERS)}

    def holds(self, batch: Batch) -> bool:
        """True if the placement was chosen for steps as large; else a warning says so, once."""
        largest = max(micro.inputs["input_ids"].numel() for micro in batch.micro)
        planned = self._planned
        if planned is None or planned.holds(batch.num_tokens, largest):
            return True
        if planned.graphs and not self._warned_larger:
            self._warned_larger = True
            _log.warning(
                "A step of %d tokens, at most %d at once, is larger than the placement was chosen "
                "for (%d, %d), so layers are computed again in its backward; give the engine the "
                "largest tokens_per_step (of all ranks) and micro_batch",
                batch.num_tokens, largest, planned.tokens_per_step, planned.micro_batch_tokens,
            )  # fmt: skip
        return False

    @contextmanager
    def of(self, num_tokens: int) -> Iterator[bool]:
        """Around a step: True if the host has room for what layers save of `num_tokens` tokens."""
        if self._offload is None:
            yield True
            return
        has_room = all(self._alike.all_gather_object(self._has_room(num_tokens)))
        yield has_room
        if num_tokens >= self._most_tokens:
            self._most_tokens, held = num_tokens, self._held()
            for name in (_KEPT, *_OTHERS) if has_room else _OTHERS:
                self._seen[name] = held[name], num_tokens

    def release(self) -> None:
        """Free, between two steps, the host and device memory of tensors saved on the host."""
        if self._offload is not None:
            self._offload.release()

    def _has_room(self, num_tokens: int) -> bool:
        held = self._held()
        more = {
            name: max(0, num_bytes * num_tokens // tokens - held[name])
            for name, (num_bytes, tokens) in self._seen.items()
        }
        wanted = _CAUTION * sum(more.values())
        available = host_available_bytes(self._limit) if wanted else 0
        if wanted <= available:
            return True
        if wanted - _CAUTION * more[_KEPT] > available:
            self.release()
        if not self._warned:
            self._warned = True
            _log.warning(
                "The host has no room for what should wait there in a step of %d tokens (%s more "
                "are wanted, %s are left): in steps that are too large it is computed again",
                num_tokens, gib(wanted), gib(available),
            )  # fmt: skip
        return False
