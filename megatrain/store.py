"""Where state rests: the planes of every tile in host memory, and their versions.

The optimizer's rule says which planes there are, and their bytes (optim/rule.py). The plane of
gradients belongs to the sink (engine/sink.py).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain import kernels
from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE
from megatrain.errors import InputError
from megatrain.optim import Plane, Rule, tile_planes
from megatrain.tile import Entry, TileLayout
from megatrain.units import align

# Planes of different tiles start on pages of their own.
_PAGE = 4096


@dataclass(frozen=True)
class Span:
    """`numel` elements of a tile's planes from `start` on, found at `at` in what is streamed."""

    start: int
    at: int
    numel: int


@dataclass(eq=False)
class Tile:
    """One tile's planes in host memory, all with the offsets of its layout.

    Attributes:
        planes: all that the tile keeps.
        weights: what is streamed: bf16, or the fp32 master itself when computing in fp32.
        remainder: int16; `fp32 master = (weights << 16) + remainder`. None in fp32.
        states: what the optimizer's rule keeps, in its order.
        resident: whether all of it rests on the device, where it is used and updated.
        version: updates applied or on their way.
        updated: event of the newest update; None when there is nothing to wait for.
        let_go: makes the update wait until nobody else needs the planes as they are (a save that
            is going on); None: nobody does. Called once, before the update is put on its stream.
    """

    index: int
    layout: TileLayout
    planes: Mapping[Plane, Buffer]
    resident: bool = False
    version: int = 0
    updated: Any = None
    let_go: Callable[[], None] | None = None
    begins = ends = True  # as a portion of itself (engine/portion.py)

    def __post_init__(self) -> None:
        named = {plane.name: buffer for plane, buffer in self.planes.items()}
        self.weights, self.remainder = named["weights"], named.get("remainder")
        masters = ("weights", "remainder")
        self.states = {p: buffer for p, buffer in self.planes.items() if p.name not in masters}

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def whole(self) -> "Tile":
        """The tile that this is, or is a portion of."""
        return self

    @property
    def spans(self) -> list[Span]:
        """What of the planes is streamed together: all."""
        return [Span(0, 0, self.layout.numel)]

    @property
    def state(self) -> list[Buffer]:
        """The planes that only the update touches."""
        return [buffer for buffer in self.planes.values() if buffer is not self.weights]

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
        high, low = (torch.empty_like(p, device="cpu") if self.resident else p
                     for p in (weights, remainder))  # fmt: skip
        kernels.split(flat.float(), high, low, threads=threads)
        if self.resident:
            weights.copy_(high)
            remainder.copy_(low)

    def read_master(self, entry: Entry, threads: int = 1) -> Tensor:
        """A copy of a parameter's fp32 master, on the CPU."""
        place = slice(entry.offset, entry.offset + entry.numel)
        if self.remainder is None:
            return self.weights.data[place].to("cpu", torch.float32, copy=True).view(entry.shape)
        weights = self.weights.data[place].cpu()
        master = torch.empty(entry.numel, dtype=torch.float32)
        remainder = self.remainder.data[place].cpu()
        kernels.join(weights, remainder, master, threads=threads)
        return master.view(entry.shape)


class Store:
    """All tiles of a model. Planes of one kind share one host range, so pinning is one call."""

    def __init__(
        self,
        device: Device,
        layouts: Sequence[TileLayout],
        dtype: torch.dtype,
        *,
        rule: Rule | None,
        resident: Collection[str] = (),
    ) -> None:
        """Allocate zeroed planes.

        Args:
            rule: of the optimizer; None: for inference, weights alone.
            resident: names of the tiles that rest on the device.

        Raises:
            DoesNotFit: the memory is not to be had.
            InputError: `resident` has a name that no tile has.
        """
        unknown = set(resident) - {layout.name for layout in layouts}
        if unknown:
            raise InputError(
                f"placement.resident: the model has no tile {min(unknown)!r}; it has "
                f"{', '.join(layout.name for layout in layouts)}"
            )
        found: list[dict[Plane, Buffer]] = [{} for _ in layouts]
        for plane in tile_planes(rule, dtype):
            lengths, pinned = [plane.numel(t) for t in layouts], plane.name == "weights"
            buffers = planes(
                device, plane.name, layouts, lengths, plane.dtype, pinned=pinned, resident=resident
            )
            for own, buffer in zip(found, buffers, strict=True):
                own[plane] = buffer
        self.tiles = [
            Tile(i, layout, found[i], layout.name in resident) for i, layout in enumerate(layouts)
        ]

    def entries(self) -> Iterator[tuple[Tile, Entry]]:
        """Every parameter with its tile."""
        for tile in self.tiles:
            for entry in tile.layout.entries:
                yield tile, entry

    def bytes_by_plane(self) -> dict[str, int]:
        """Host bytes of each plane, over all tiles; all that the rule keeps is `moments`."""
        totals = {"weights": 0, "remainder": 0, "moments": 0}
        for tile in self.tiles:
            if not tile.resident:
                totals["weights"] += tile.weights.data.nbytes
                totals["remainder"] += tile.remainder.data.nbytes if tile.remainder else 0
                totals["moments"] += sum(state.data.nbytes for state in tile.states.values())
        return totals


def planes(
    device: Device,
    plane: str,
    layouts: Sequence[TileLayout],
    lengths: Sequence[int],
    dtype: torch.dtype,
    *,
    pinned: bool = False,
    resident: Collection[str] = (),
) -> list[Buffer]:
    """A buffer per tile: pieces of one host range, or device memory of their own if `resident`.

    The sink makes its gradient slabs the same way.
    """
    step = _PAGE // dtype.itemsize
    on_host = [0 if t.name in resident else n for t, n in zip(layouts, lengths, strict=True)]
    room = device.host(plane, sum(align(n, step) for n in on_host), dtype, pinned=pinned)
    buffers, offset = [], 0
    for layout, length in zip(layouts, lengths, strict=True):
        if layout.name in resident:
            buffer = device.empty(f"{layout.name} {plane}", length, dtype)
            device.run(COMPUTE, f"clear {buffer.name}", buffer.data.zero_, writes=[buffer])
            buffers.append(buffer)
            continue
        buffers.append(Buffer(f"{layout.name} {plane}", room.data[offset : offset + length]))
        offset += align(length, step)
    return buffers
