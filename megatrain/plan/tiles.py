"""Where a model's bytes rest: by tile, plane and tier."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.engine.assemble import tile_layouts
from megatrain.model.outline import Outline
from megatrain.optim import AdamW, StreamedOptimizer
from megatrain.placement import Placement
from megatrain.tile import TileLayout

PLANES = ("weights", "remainder", "moments", "gradient")


@dataclass(frozen=True)
class TileBytes:
    """Equal tiles that rest in the same place.

    Attributes:
        name: `layer 2` or `layer 2 ... layer 27`.
        count: how many they are.
        parameters: of one.
        tier: `device` or `host`.
        planes: bytes of one, by plane. Gradients that share slabs (no clipping) are in no tile.
    """

    name: str
    count: int
    parameters: int
    tier: str
    planes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return self.count * sum(self.planes.values())

    @property
    def saved_planes(self) -> list[int]:
        """Bytes of each plane that a checkpoint holds of them."""
        moment = self.planes["moments"] // 2
        return self.count * [self.planes["weights"], self.planes["remainder"], moment, moment]

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**vars(self), "total_bytes": self.total_bytes}


def tile_bytes(
    outline: Outline, placement: Placement, *, precision: str, clip: bool
) -> list[TileBytes]:
    """All tiles of a training run, equal neighbours together."""
    optimizer = StreamedOptimizer(AdamW(), outline.skeleton.model)
    layouts = [t for t in tile_layouts(outline, optimizer.group_of()) if t.numel]
    found: list[TileBytes] = []
    first = ""
    for layout in layouts:
        tier = "device" if layout.name in placement.resident else "host"
        planes = plane_bytes(layout, precision=precision, own_gradient=clip or tier == "device")
        last = found[-1] if found else None
        one = TileBytes(layout.name, 1, layout.num_parameters, tier, planes)
        if last is None or not _alike(last, one):
            found.append(one)
            first = layout.name
            continue
        name = f"{first} ... {layout.name}"
        found[-1] = TileBytes(name, last.count + 1, one.parameters, tier, planes)
    return found


def plane_bytes(layout: TileLayout, *, precision: str, own_gradient: bool) -> dict[str, int]:
    """Bytes of one tile. Frozen parameters have weights and remainder only."""
    split = precision == "bf16"
    element = 2 if split else 4
    return {
        "weights": layout.numel * element,
        "remainder": layout.numel * 2 if split else 0,
        "moments": layout.trainable_numel * 8,
        "gradient": layout.trainable_numel * element if own_gradient else 0,
    }


def by_tier(tiles: Sequence[TileBytes]) -> dict[str, dict[str, int]]:
    """Bytes of each plane on the device and on the host."""
    return {
        tier: {
            plane: sum(tile.count * tile.planes[plane] for tile in tiles if tile.tier == tier)
            for plane in PLANES
        }
        for tier in ("device", "host")
    }


def _alike(one: TileBytes, other: TileBytes) -> bool:
    """Layers only: the embedding and the head are told apart even where they are equal."""
    layers = one.name.startswith("layer ") and other.name.startswith("layer ")
    return layers and (one.tier, one.planes) == (other.tier, other.planes)
