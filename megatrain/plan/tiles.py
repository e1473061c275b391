"""The bytes of a model by tile, plane and tier, and a step's use of a disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.checkpoint import saved_numel
from megatrain.forecast.workload import Workload
from megatrain.model.adapters import adapted
from megatrain.model.spec import ModelSpec
from megatrain.optim import PlaneKind, gradient_plane, tile_planes
from megatrain.placement import Placement
from megatrain.source.source import Model
from megatrain.store.store import Tier, resting
from megatrain.tile import TileKind

TERABYTE = 10**12  # as drives are sold
PLANES = tuple(kind.value for kind in PlaneKind)


@dataclass(frozen=True)
class TileBytes:
    """Equal tiles that rest in the same place.

    Attributes:
        name: `layer 2`, `layer 2 ... layer 27`, or `9 of layer 2 ... layer 27`.
        count: number of these tiles.
        parameters: number in one tile.
        tier: `device` or `host`.
        disk: planes that rest on the disk instead.
        stays: True if the device keeps a copy of the weights.
        written: bytes that an update of one tile writes to the disk.
        planes: bytes of one tile, by plane. Gradients that share room (no clipping) do not count.
        saved: bytes of one tile in a checkpoint, by plane; none of an adapter's base.
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
        """Plain data, for `--json`."""
        hidden = ("saved", "written")
        values = {name: value for name, value in vars(self).items() if name not in hidden}
        return {**values, "total_bytes": self.total_bytes}


def tile_bytes(spec: ModelSpec, placement: Placement, workload: Workload) -> list[TileBytes]:
    """All tiles of a training run, equal layers together."""
    layouts = Model.trained(spec, workload.rule).layouts
    kept, gradient = tile_planes(workload.rule, workload.dtype), gradient_plane(workload.dtype)
    adapter = adapted(spec.capture.model)
    frozen = [entry.name for layout in layouts for entry in layout.entries if entry.group is None]
    base_left_out = adapter is not None and all(name in adapter.held for name in frozen)
    groups: dict[tuple, list[int]] = {}
    for index, (layout, rests) in enumerate(zip(layouts, resting(placement, layouts), strict=True)):
        planes = dict.fromkeys(PLANES, 0)
        for plane in kept:
            planes[plane.kind.value] += plane.num_bytes(layout)
        stop = layout.trainable_numel if base_left_out else layout.numel
        saved = tuple(saved_numel(plane, layout, stop) * plane.dtype.itemsize for plane in kept)
        waits = workload.clip and not workload.rule.directs(layout)
        if waits or rests.gradient is Tier.DEVICE:
            planes[gradient.kind.value] = gradient.num_bytes(layout)
        name = "" if layout.kind is TileKind.LAYER else layout.name
        updated = (p for p in kept if layout.trainable_numel and rests.tier(p) is Tier.DISK)
        places = ((p, p.place(0, layout.trainable_numel).stop) for p in updated)
        written = sum(stop * p.dtype.itemsize for p, stop in places)
        if layout.numel:
            groups.setdefault((name, rests, tuple(planes.items()), saved, written), []).append(
                index
            )
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
    """A name for equal tiles; the last one is the `reach`-th from the first on."""
    named = " ... ".join(dict.fromkeys((names[0], names[-1])))
    return named if len(names) == reach else f"{len(names)} of {named}"


def by_tier(tiles: Sequence[TileBytes]) -> dict[str, dict[str, int]]:
    """Bytes of each plane on the device, the host and the disk."""
    tiers = {tier: dict.fromkeys(PLANES, 0) for tier in ("device", "host", "disk")}
    for tile in tiles:
        for plane, num_bytes in tile.planes.items():
            tier = "disk" if plane in tile.disk else tile.tier
            tiers[tier][plane] += tile.count * num_bytes
    return tiers


def terabytes_a_day(num_bytes: float, seconds: float) -> float:
    """Terabytes written in a day of steps that write `num_bytes` in `seconds`."""
    return num_bytes / TERABYTE * 86400 / seconds


def disk_use(
    tiles: Sequence[TileBytes], seconds: float, endurance_terabytes: float | None, passes: int = 1
) -> dict[str, Any] | None:
    """A disk's use by a step of `seconds`, for `--json`; None: nothing rests on a disk.

    Each update reads and writes trained planes; sweeps read the weights.

    Args:
        endurance_terabytes: the drive's TBW (total written); None: unknown.
    """
    num_bytes = sum(tile.count * tile.planes[plane] for tile in tiles for plane in tile.disk)
    written = sum(tile.count * tile.written for tile in tiles)
    weights = sum(tile.count * tile.planes["weights"] for tile in tiles if "weights" in tile.disk)
    if not num_bytes:
        return None
    a_day = terabytes_a_day(written, seconds)
    return {
        "num_bytes": num_bytes,
        "read_bytes_a_step": written + 2 * passes * weights,
        "written_bytes_a_step": written,
        "written_terabytes_a_day": a_day,
        "endurance_terabytes": endurance_terabytes,
        "days_to_wear": endurance_terabytes / a_day if endurance_terabytes and written else None,
    }
