"""Where a model's bytes rest: by tile, plane and tier."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.checkpoint import saved_numel
from megatrain.forecast.workload import Workload
from megatrain.model.adapters import adapted
from megatrain.model.spec import ModelSpec
from megatrain.optim import PlaneKind, gradient_plane, tile_planes
from megatrain.placement import Placement
from megatrain.source.engine_setup import Model
from megatrain.store.store import Tier, resting
from megatrain.tile import TileKind

PLANES = tuple(kind.value for kind in PlaneKind)


@dataclass(frozen=True)
class TileBytes:
    """Equal tiles that rest in the same place.

    Attributes:
        name: `layer 2`, `layer 2 ... layer 27`, or `9 of layer 2 ... layer 27`.
        count: how many they are.
        parameters: of one.
        tier: `device` or `host`.
        disk: planes that rest on the disk instead.
        stays: whether the device keeps a copy of the weights.
        written: bytes that an update of one writes there.
        planes: bytes of one, by plane. Gradients that share room (no clipping) are in no tile.
        saved: bytes of each plane that a checkpoint holds of one; nothing of an adapter's base.
    """

    name: str
    count: int
    parameters: int
    tier: str
    planes: dict[str, int]
    saved: list[int]
    disk: tuple[str, ...] = ()
    stays: bool = False
    written: int = 0

    @property
    def total_bytes(self) -> int:
        return self.count * sum(self.planes.values())

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        own = {"saved", "written"}
        told = {name: value for name, value in vars(self).items() if name not in own}
        return {**told, "total_bytes": self.total_bytes}


def tile_bytes(spec: ModelSpec, placement: Placement, workload: Workload) -> list[TileBytes]:
    """All tiles of a training run, equal layers together."""
    layouts = Model.trained(spec, workload.rule).layouts
    kept, gradient = tile_planes(workload.rule, workload.dtype), gradient_plane(workload.dtype)
    found = adapted(spec.capture.model)
    frozen = [entry.name for layout in layouts for entry in layout.entries if entry.group is None]
    base_left_out = found is not None and all(name in found.held for name in frozen)
    groups: dict[tuple, list[int]] = {}
    for index, (layout, rests) in enumerate(zip(layouts, resting(placement, layouts), strict=True)):
        planes = dict.fromkeys(PLANES, 0)
        for plane in kept:
            planes[plane.kind.value] += plane.num_bytes(layout)
        stop = layout.trainable_numel if base_left_out else layout.numel
        saved = tuple(saved_numel(plane, layout, stop) * plane.dtype.itemsize for plane in kept)
        held = workload.clip and not workload.rule.directs(layout)
        if held or rests.gradient is Tier.DEVICE:
            planes[gradient.kind.value] = gradient.num_bytes(layout)
        own = "" if layout.kind is TileKind.LAYER else layout.name
        updated = (p for p in kept if layout.trainable_numel and rests.tier(p) is Tier.DISK)
        places = ((p, p.place(0, layout.trainable_numel).stop) for p in updated)
        written = sum(stop * p.dtype.itemsize for p, stop in places)
        if layout.numel:
            groups.setdefault((own, rests, tuple(planes.items()), saved, written), []).append(index)
    return [
        TileBytes(
            name=_together([layouts[i].name for i in same], same[-1] - same[0] + 1),
            count=len(same),
            parameters=layouts[same[0]].num_parameters,
            tier="device" if rests.weights is Tier.DEVICE else "host",
            planes=dict(planes),
            saved=list(saved),
            disk=tuple(name for name in PLANES if getattr(rests, name) is Tier.DISK),
            stays=rests.stays,
            written=written,
        )
        for (_, rests, planes, saved, written), same in groups.items()
    ]


def _together(names: Sequence[str], reach: int) -> str:
    """A name for equal tiles, the last of which is the `reach`-th from the first on."""
    named = " ... ".join(dict.fromkeys((names[0], names[-1])))
    return named if len(names) == reach else f"{len(names)} of {named}"


def by_tier(tiles: Sequence[TileBytes]) -> dict[str, dict[str, int]]:
    """Bytes of each plane on the device, the host and the disk."""
    told = {tier: dict.fromkeys(PLANES, 0) for tier in ("device", "host", "disk")}
    for tile in tiles:
        for plane, num_bytes in tile.planes.items():
            tier = "disk" if plane in tile.disk else tile.tier
            told[tier][plane] += tile.count * num_bytes
    return told
