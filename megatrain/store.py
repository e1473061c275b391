"""Where state rests: the planes of every tile in host memory, and their versions.

Bytes per parameter: bf16 compute 2 (weights) + 2 (remainder) + 8 (moments); fp32 compute 4 + 8.
The gradient plane belongs to the sink (engine/sink.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain import kernels
from megatrain.device import Buffer, Device
from megatrain.tile import Entry, TileLayout
from megatrain.units import align

# Planes of different tiles start on pages of their own.
_PAGE = 4096


@dataclass(eq=False)
class Tile:
    """One tile's planes in host memory, all with the offsets of its layout.

    Attributes:
        weights: what is streamed: bf16, or the fp32 master itself when computing in fp32.
        remainder: int16; `fp32 master = (weights << 16) + remainder`. None in fp32.
        moments: first and second moment, fp32, of the trainable prefix. None without optimizer.
        version: updates applied or on their way.
        updated: event of the newest update; None when there is nothing to wait for.
    """

    index: int
    layout: TileLayout
    weights: Buffer
    remainder: Buffer | None
    moments: tuple[Buffer, Buffer] | None
    version: int = 0
    updated: Any = None

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def state(self) -> list[Buffer]:
        """The planes that only the update touches."""
        return [b for b in (self.remainder, *(self.moments or ())) if b is not None]

    def write_master(self, entry: Entry, values: Tensor, threads: int = 1) -> None:
        """Set one parameter's master from CPU `values` of its shape, any float dtype."""
        flat = values.detach().contiguous().view(-1)
        weights = self.weights.data[entry.offset : entry.offset + entry.numel]
        if self.remainder is None or flat.dtype == torch.bfloat16:
            weights.copy_(flat)  # a bf16 value is its own master: the remainder is zero
            if self.remainder is not None:
                self.remainder.data[entry.offset : entry.offset + entry.numel].zero_()
            return
        remainder = self.remainder.data[entry.offset : entry.offset + entry.numel]
        kernels.split(flat.float(), weights, remainder, threads=threads)

    def read_master(self, entry: Entry, threads: int = 1) -> Tensor:
        """A parameter's fp32 master `[*entry.shape]`; a view of the plane when computing in fp32."""
        weights = self.weights.data[entry.offset : entry.offset + entry.numel]
        if self.remainder is None:
            return weights.view(entry.shape)
        master = torch.empty(entry.numel)
        remainder = self.remainder.data[entry.offset : entry.offset + entry.numel]
        kernels.join(weights, remainder, master, threads=threads)
        return master.view(entry.shape)


class Store:
    """All tiles of a model. Planes of one kind share one host range, so pinning is one call."""

    def __init__(
        self, device: Device, layouts: Sequence[TileLayout], dtype: torch.dtype, *, train: bool
    ) -> None:
        """Allocate zeroed planes; with `train`, also remainders and moments.

        Raises:
            DoesNotFit: the host memory is not to be had.
        """
        split = train and dtype == torch.bfloat16
        full = [layout.numel for layout in layouts]
        prefix = [layout.trainable_numel for layout in layouts]
        weights = planes(device, "weights", layouts, full, dtype, pinned=True)
        remainders = planes(device, "remainder", layouts, full, torch.int16) if split else None
        first = planes(device, "first moment", layouts, prefix, torch.float32) if train else None
        second = planes(device, "second moment", layouts, prefix, torch.float32) if train else None
        self.tiles = [
            Tile(
                i,
                layout,
                weights[i],
                remainders[i] if remainders else None,
                (first[i], second[i]) if first and second else None,
            )
            for i, layout in enumerate(layouts)
        ]

    def entries(self) -> Iterator[tuple[Tile, Entry]]:
        """Every parameter with its tile."""
        for tile in self.tiles:
            for entry in tile.layout.entries:
                yield tile, entry

    def bytes_by_plane(self) -> dict[str, int]:
        """Host bytes of each plane, over all tiles."""
        totals = {"weights": 0, "remainder": 0, "moments": 0}
        for tile in self.tiles:
            totals["weights"] += tile.weights.data.nbytes
            totals["remainder"] += tile.remainder.data.nbytes if tile.remainder else 0
            totals["moments"] += sum(moment.data.nbytes for moment in tile.moments or ())
        return totals


def planes(
    device: Device,
    plane: str,
    layouts: Sequence[TileLayout],
    lengths: Sequence[int],
    dtype: torch.dtype,
    *,
    pinned: bool = False,
) -> list[Buffer]:
    """One host range cut into a buffer per tile; the sink cuts its gradient slabs the same way."""
    step = _PAGE // dtype.itemsize
    room = device.host(plane, sum(align(n, step) for n in lengths), dtype, pinned=pinned)
    buffers, offset = [], 0
    for layout, length in zip(layouts, lengths, strict=True):
        buffers.append(Buffer(f"{layout.name} {plane}", room.data[offset : offset + length]))
        offset += align(length, step)
    return buffers
