"""Candidates of a placement: nothing is resident and nothing kept, until memory is left for it.

A candidate is rows of a micro-batch, slots, where layer inputs wait, tokens of a head chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from megatrain.autoplace.first_tiles import FirstTiles, first_tiles
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.workload import Workload
from megatrain.placement import Placement

# From the fastest to the most sparing.
_CANDIDATES: tuple[dict[str, Any], ...] = (
    {"slots": 3, "head_tokens": 8192},
    {"slots": 3, "head_tokens": 8192, "layer_inputs": "host"},
    {"slots": 2, "head_tokens": 2048},
    {"slots": 2, "head_tokens": 2048, "layer_inputs": "host"},
    {"slots": 2, "head_tokens": 2048, "layer_inputs": "host", "layer_input_lanes": 2},
    {"slots": 2, "head_tokens": 512, "gradient_lanes": 2, "keep_rows": False},
    {
        "slots": 2,
        "head_tokens": 512,
        "gradient_lanes": 2,
        "keep_rows": False,
        "layer_inputs": "host",
        "layer_input_lanes": 2,
    },
)
MOST_SLOTS: int = _CANDIDATES[0]["slots"]

# From so many tokens a row on, layers may run in tiles, with attention's results kept: it grows
# with the square of a row, so what computing a tile again costs is soon less than its. A layer
# input is large then, and leaves in less time than a layer takes: candidates with few slots take
# half the lanes.
_LONG, _TILE = 16384, 8192
_ATTENTION: tuple[Literal["device", "host", "none"], ...] = ("device", "host", "none")

# Tokens of a micro-batch, at most. With the largest no overhead of a call counts any more; the
# small ones are for rows shorter than they are.
_TOKENS = (49152, *(2**power for power in range(15, -1, -1)))

# Of micro-batches of passes: enough to keep a large GPU busy.
_FEW = 16384

_CHUNKS = 64  # of a micro-batch in the head, at most: forecasts count each operation


@dataclass(frozen=True)
class Candidates:
    """The candidates of a workload; `spilled`: what of the placement rests on a disk."""

    forecasts: ForecastCache
    workload: Workload
    spilled: Mapping[str, Any] = field(default_factory=dict)

    def sizes(self) -> list[int]:
        """Rows that a micro-batch may have, largest first."""
        workload = self.workload
        if workload.micro_batch is not None:
            return [workload.micro_batch]
        most = (max(1, tokens // workload.sequence_length) for tokens in _TOKENS)
        # As few micro-batches as hold all rows, and as even as they can be.
        return sorted(
            {-(-workload.rows // -(-workload.rows // rows)) for rows in most}, reverse=True
        )

    def sizes_in_passes(self) -> list[int]:
        """Rows of a micro-batch to try in several passes, where few graphs wait at once."""
        few = [rows for rows in self.sizes() if rows * self.workload.sequence_length <= _FEW]
        return self.sizes() if self.workload.micro_batch is not None else few[:2]

    def families(self, rows: int) -> list[list[Placement]]:
        """Candidates, the fastest first, the most sparing last; for long rows also in tiles."""
        least = -(-rows * self.workload.sequence_length // _CHUNKS)
        long, whole = self.workload.sequence_length >= _LONG, list[Placement]()
        for choices in _CANDIDATES:
            base = Placement(**choices, **self.spilled, compile=self.workload.compile)
            lanes = base.layer_input_lanes // (2 if long and base.slots < MOST_SLOTS else 1)
            whole.append(
                replace(
                    base,
                    head_tokens=max(least, base.head_tokens),
                    layer_input_lanes=lanes,
                )
            )
        tiled = [
            [replace(candidate, chunk_tokens=_TILE, save_attention=where) for candidate in whole]
            for where in _ATTENTION
            if long
        ]
        return [whole, *tiled]

    @cached_property
    def tiles(self) -> FirstTiles:
        """The tiles in the order in which they come to rest on the device."""
        return first_tiles(self.forecasts, self.workload, Placement(**self.spilled))
