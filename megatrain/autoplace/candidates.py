"""Candidates of a placement, and what each takes at least, told before a whole step is followed.

A candidate is rows of a micro-batch, slots, where boundaries wait, tokens of a head chunk, with
nothing resident and nothing kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

from megatrain.autoplace.first_tiles import FirstTiles, first_tiles
from megatrain.engine.tile_slice import least_split
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.needs import UNSUMMED
from megatrain.forecast.simulate import Forecast, torch_bytes
from megatrain.forecast.workload import Workload
from megatrain.machine import Machine, mapping_bytes
from megatrain.placement import Placement
from megatrain.tile import TileKind, TileLayout

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
# with the square of a row, so what computing a tile again costs is soon less than its. A boundary
# is large then, and leaves in less time than a layer takes: candidates with few slots take half the
# lanes.
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
    """The candidates of a workload."""

    forecasts: ForecastCache
    machine: Machine
    workload: Workload
    spilled: Mapping[str, Any] = field(default_factory=dict)  # what rests on a disk

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

    def families(self, rows: int, *, split: bool = False) -> list[list[Placement]]:
        """Candidates, the fastest first, the most sparing last: whole layers; for long rows, tiles.

        With `split`, the same with the head in slices, for when memory is short.
        """
        slice_bytes = self.slice_bytes if split else None
        if split and slice_bytes is None:
            return []
        least = -(-rows * self.workload.sequence_length // _CHUNKS)
        candidates = [
            Placement(**candidate, **self.spilled, compile=self.workload.compile)
            for candidate in _CANDIDATES
        ]
        whole = [
            replace(f, head_tokens=max(least, f.head_tokens), max_stream_bytes=slice_bytes)
            for f in candidates
        ]
        long = self.workload.sequence_length >= _LONG
        if long:
            lanes = [f.layer_input_lanes // (1 if f.slots == MOST_SLOTS else 2) for f in whole]
            whole = [replace(f, layer_input_lanes=n) for f, n in zip(whole, lanes, strict=True)]
        if not long:
            return [whole]
        tiled = [
            [replace(candidate, chunk_tokens=_TILE, save_attention=where) for candidate in whole]
            for where in _ATTENTION
        ]
        return [whole, *tiled]

    @cached_property
    def slice_bytes(self) -> int | None:
        """Bytes of the slices that the head can be streamed in.

        None: it is not so large; weights on a disk come as whole tiles.
        """
        if "disk_weights" in self.spilled:
            return None
        return least_split(self.forecasts.spec, self._layouts, self.workload.dtype.itemsize)

    @cached_property
    def tiles(self) -> FirstTiles:
        """The tiles in the order in which they come to rest on the device."""
        return first_tiles(self.forecasts, self.workload, Placement(**self.spilled))

    @property
    def _layouts(self) -> list[TileLayout]:
        return self.forecasts.model(self.workload).layouts

    def of(self, placement: Placement, rows: int) -> Forecast:
        """The forecast of a candidate."""
        return self.forecasts.of(self.machine, placement, self.workload, rows)

    def static_bytes(self, placement: Placement) -> tuple[int, int]:
        """Bytes on device and host without which a candidate cannot be, told at once.

        What a layer or the head computes with is left out.
        """
        needs = self.forecasts.needs(self.workload, placement)
        device = self.machine.device_context_bytes + mapping_bytes(sum(needs.host.values()))
        host = self.forecasts.least_host_bytes(self.machine, self.workload, placement)
        return device + sum(needs.device.values()), host

    def min_bytes(self, placement: Placement, rows: int) -> tuple[int, int]:
        """`static_bytes`, and what a layer or the head computes with."""
        device, host = self.static_bytes(placement)
        # Gradients that are not summed yet are among what is worked with.
        unsummed = self.forecasts.needs(self.workload, placement).device[UNSUMMED]
        entering = self.forecasts.measured(self.workload).entering(rows).values()
        lanes = 2 * placement.layer_input_lanes * (placement.layer_inputs == "host")
        device += lanes * max(shape.num_bytes for shape in entering)
        device += sum(torch_bytes({}, self.machine.device_context_bytes).values())
        return device + max(0, self._working_bytes(placement, rows) - unsummed), host

    def one_step_bytes(self, placement: Placement, rows: int) -> tuple[int, int]:
        """Bytes on device and host at the peak of a first step; later ones take hardly more."""
        found = self.forecasts.of(self.machine, placement, self.workload, rows, steps=1)
        return found.device_peak_bytes, found.host_peak_bytes

    def _working_bytes(self, placement: Placement, rows: int) -> int:
        """What a layer or the head computes with, beside the activations of all micro-batches.

        A layer has all that come in, and those that went out before its last (whole) micro-batch.
        Where boundaries wait on the device, these are instead of those that were read; so are the
        two of a split head's stages. A head frees one as the other comes; if it is split, it has
        fp32 gradients of all besides.
        """
        measured = self.forecasts.measured(self.workload, placement.chunk_tokens)
        layout = next(each for each in self._layouts if each.kind is TileKind.HEAD)
        for visit in range(len(self.forecasts.spec.layers)):
            measured.layer(visit, rows)  # whose results the head is given
        row_bytes = sum(shape.num_bytes for shape in measured.entering(rows).values()) // rows
        every, most = row_bytes * self.workload.rows, placement.max_stream_bytes
        split = most is not None and most < layout.numel * self.workload.dtype.itemsize
        before, read = row_bytes * (self.workload.rows // rows - 1) * rows, 2 * every * split
        beside, beside_head = (before, before) if placement.layer_inputs == "host" else (-read, 0)
        peaks = [every]
        if most is None:
            peaks.append(every + measured.head(layout, rows, placement.head_tokens).peak_bytes)
        elif split:
            table = layout.by_name[self.forecasts.spec.projection.names[0]]
            tokens = self.workload.rows * self.workload.sequence_length
            peaks.append(4 * tokens * prod(table.shape[1:]) + beside_head)
        works = measured.layer(0, rows).computed_twice
        peaks.append(every + beside + max(work.peak_bytes for work in works))
        return max(peaks)
