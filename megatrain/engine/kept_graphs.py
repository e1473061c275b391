"""How many layers keep their graphs, where steps are not foreseen: measured in the first ones."""

import logging
import math
from typing import Any

from megatrain.errors import InputError
from megatrain.units import gib

_log = logging.getLogger(__name__)

# Of the device's memory; the rest is for the driver, fragmentation and other processes.
_USABLE = 0.93


class KeptGraphs:
    """Says before each step how many layers keep their graphs, from what steps have taken.

    The first step keeps none and the second one; their peaks give the cost of a token with and
    without a kept layer.
    """

    def __init__(self, num_layers: int, total_bytes: int) -> None:
        self._num_layers = num_layers
        self._limit = int(total_bytes * _USABLE)
        self._plain: tuple[int, int] | None = None  # peak bytes, tokens of that step
        self._graph_bytes_per_token = 0.0
        self._last = 0

    def choose(self, num_tokens: int) -> int:
        """Layers that keep their graphs in a step of `num_tokens`."""
        self._last = self._fitting(num_tokens)
        return self._last

    def _fitting(self, num_tokens: int) -> int:
        if self._plain is None:
            return 0
        peak, tokens = self._plain
        spare = self._limit - peak * max(1.0, num_tokens / tokens)
        if not self._graph_bytes_per_token:
            return 1 if spare > self._limit / 4 else 0
        fitting = int(spare / (self._graph_bytes_per_token * num_tokens))
        return max(0, min(self._num_layers, fitting))

    def note(self, num_tokens: int, peak_bytes: int) -> None:
        """What the step just done took at its peak."""
        if self._plain is None:
            self._plain = (peak_bytes, num_tokens)
        elif self._last == 1 and not self._graph_bytes_per_token:
            # A graph that adds less than this to the peak lived where something else lives later.
            least = self._limit / 1000
            added = max(peak_bytes - self._plain[0], least)
            self._graph_bytes_per_token = added / num_tokens
            _log.info(
                "placement: a kept layer takes %s, so %d keep their graphs",
                gib(added),
                self._fitting(num_tokens),
            )

    def as_dict(self) -> dict[str, Any]:
        """What has been measured, as plain JSON values."""
        return {"limit": self._limit, "plain": self._plain, "last": self._last,
                "graph_bytes_per_token": self._graph_bytes_per_token}  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with what `as_dict` gave, so that the choices are those of that run.

        Raises:
            InputError: it was made by another version.
        """
        try:
            plain = state["plain"]
            self._plain = None if plain is None else (int(plain[0]), max(int(plain[1]), 1))
            self._limit, self._last = int(state["limit"]), int(state["last"])
            self._graph_bytes_per_token = float(state["graph_bytes_per_token"])
            if min(self._limit, self._last, *(self._plain or ())) < 0:
                raise ValueError("a negative number")
            if not 0 <= self._graph_bytes_per_token < math.inf:
                raise ValueError("no number of bytes")
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise InputError(f"the checkpoint's measurements cannot be read ({error})") from error
