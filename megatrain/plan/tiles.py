"""Where a model's bytes rest: by tile, plane and tier."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.engine.opened import Model
from megatrain.forecast.workload import Workload
from megatrain.model.spec import ModelSpec
from megatrain.optim import gradient_plane, tile_planes
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
    """All tiles of a training run, equal neighbours together."""
    layouts = [t for t in Model.trained(spec, workload.rule).layouts if t.numel]
    found: list[TileBytes] = []
    first = ""
    for layout in layouts:
        tier = "device" if layout.name in placement.resident else "host"
        own_gradient = workload.clip or tier == "device"
        kept = _kept_bytes(layout, workload)
        planes, saved = _shown(kept, layout, workload, own_gradient), list(kept.values())
        last = found[-1] if found else None
        one = TileBytes(layout.name, 1, layout.num_parameters, tier, planes, saved)
        if last is None or not _alike(last, one):
            found.append(one)
            first = layout.name
            continue
        name = f"{first} ... {layout.name}"
        found[-1] = TileBytes(name, last.count + 1, one.parameters, tier, planes, saved)
    return found


def _kept_bytes(layout: TileLayout, workload: Workload) -> dict[str, int]:
    """Bytes of each plane of one tile but the gradient."""
    planes = tile_planes(workload.rule, workload.dtype)
    return {plane.name: plane.numel(layout) * plane.dtype.itemsize for plane in planes}


def _shown(
    kept: dict[str, int], layout: TileLayout, workload: Workload, own_gradient: bool
) -> dict[str, int]:
    """Bytes of one tile as they are shown: all that the rule keeps is `moments`."""
    shown = dict.fromkeys(PLANES, 0)
    for name, num_bytes in kept.items():
        shown[name if name in PLANES else "moments"] += num_bytes
    if own_gradient:
        gradient = gradient_plane(workload.dtype)
        shown["gradient"] = gradient.numel(layout) * gradient.dtype.itemsize
    return shown


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
