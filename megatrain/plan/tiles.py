"""Where a model's bytes rest: by tile, plane and tier."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatrain.engine.opened import Model
from megatrain.forecast.workload import Workload
from megatrain.model.spec import ModelSpec
from megatrain.optim import Plane, PlaneKind, gradient_plane, tile_planes
from megatrain.placement import Placement
from megatrain.tile import TileKind, TileLayout

PLANES = tuple(kind.value for kind in PlaneKind)


@dataclass(frozen=True)
class TileBytes:
    """Equal tiles that rest in the same place.

    Attributes:
        name: `layer 2` or `layer 2 ... layer 27`.
        count: how many they are.
        parameters: of one.
        tier: `device` or `host`.
        planes: bytes of one, by plane. Gradients that share room (no clipping) are in no tile.
        saved: bytes of each plane that a checkpoint holds of one.
    """

    name: str
    count: int
    parameters: int
    tier: str
    planes: dict[str, int]
    saved: list[int]

    @property
    def total_bytes(self) -> int:
        return self.count * sum(self.planes.values())

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        told = {name: value for name, value in vars(self).items() if name != "saved"}
        return {**told, "total_bytes": self.total_bytes}


def tile_bytes(spec: ModelSpec, placement: Placement, workload: Workload) -> list[TileBytes]:
    """All tiles of a training run, equal layers that follow each other together."""
    layouts = [t for t in Model.trained(spec, workload.rule).layouts if t.numel]
    kept, gradient = tile_planes(workload.rule, workload.dtype), gradient_plane(workload.dtype)

    def found(layout: TileLayout) -> tuple[str, str, dict[str, int], list[int]]:
        tier = "device" if layout.name in placement.resident else "host"
        planes, saved = dict.fromkeys(PLANES, 0), [_bytes_of(plane, layout) for plane in kept]
        for plane, num_bytes in zip(kept, saved, strict=True):
            planes[plane.kind.value] += num_bytes
        if workload.clip or tier == "device":
            planes[gradient.kind.value] = _bytes_of(gradient, layout)
        return "" if layout.kind is TileKind.LAYER else layout.name, tier, planes, saved

    told = []
    for (_, tier, planes, saved), group in groupby(layouts, found):
        same = list(group)
        name = " ... ".join(dict.fromkeys((same[0].name, same[-1].name)))
        told.append(TileBytes(name, len(same), same[0].num_parameters, tier, planes, saved))
    return told


def _bytes_of(plane: Plane, layout: TileLayout) -> int:
    return plane.numel(layout) * plane.dtype.itemsize


def by_tier(tiles: Sequence[TileBytes]) -> dict[str, dict[str, int]]:
    """Bytes of each plane on the device and on the host."""
    return {
        tier: {
            plane: sum(tile.count * tile.planes[plane] for tile in tiles if tile.tier == tier)
            for plane in PLANES
        }
        for tier in ("device", "host")
    }
