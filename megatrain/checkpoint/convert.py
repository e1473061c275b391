"""Tiles back from a checkpoint whose optimizer kept its state in another form."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from megatrain.checkpoint.manifest import Checkpoint
from megatrain.checkpoint.read import read_planes, read_tiles
from megatrain.device import Buffer
from megatrain.kernels.reference import join_block, split_block
from megatrain.optim import Plane, PlaneKind, Rule
from megatrain.store.store import Tile
from megatrain.tile.layout import ALIGNMENT, MOST_ELEMENTS

_log = logging.getLogger(__name__)

# Elements converted at a time: what is made meanwhile stays small.
_PIECE = ALIGNMENT << 15


def read_converted(
    checkpoint: Checkpoint, tiles: Sequence[Tile], threads: int, saved: Rule, rule: Rule
) -> None:
    """`read_tiles` where `saved` is the checkpoint's rule and `rule` that of `tiles`.

    What is converted of one tile at a time is in host memory besides.

    Raises:
        InputError: as `read_tiles`; or `rule` can make nothing of what `saved` has kept.
    """
    _log.warning(
        "%s: the optimizer's state is converted (%s), so the run does not go on exactly as it "
        "would have",
        checkpoint.folder,
        ", ".join(f"{n} {was} to {now}" for n, was, now in _differences(saved, rule)),
    )
    same_states = saved.state_planes == rule.state_planes

    def is_same(plane: Plane) -> bool:
        if plane.kind is PlaneKind.REMAINDER:
            return plane.dtype == saved.remainder
        return plane.kind is not PlaneKind.STATE or same_states

    alike = [
        replace(tile, planes={p: b for p, b in tile.planes.items() if is_same(p)}) for tile in tiles
    ]
    read_tiles(checkpoint, alike, threads)
    for tile, read in zip(tiles, alike, strict=True):
        tile.version = read.version
        states = () if same_states else saved.state_planes
        others = [p for p in tile.planes if p.kind is PlaneKind.REMAINDER and not is_same(p)]
        remainders = [replace(plane, dtype=saved.remainder) for plane in others]
        kept = {
            plane: Buffer(plane.name, torch.zeros(plane.numel(tile.layout), dtype=plane.dtype))
            for plane in (*states, *remainders)
        }
        read_planes(checkpoint, replace(tile, planes={**read.planes, **kept}), kept, threads)
        for plane in remainders:
            _convert_masters(tile, kept.pop(plane).data)
        if not same_states:
            _convert_states(tile, saved, rule, kept)


def _convert_masters(tile: Tile, old: Tensor) -> None:
    """Masters of a tile, whose weights are read already, from another remainder."""
    assert tile.remainder is not None
    for start in range(0, len(old), _PIECE):
        part = slice(start, start + _PIECE)
        with tile.remainder.writing(part) as remainder:
            high = tile.weights.values(part).to(remainder.device)
            master = torch.empty_like(high, dtype=torch.float32)
            join_block(high, old[part].to(high.device), master)
            split_block(master, high, remainder)
            with tile.weights.writing(part) as weights:
                weights.copy_(high)


def _convert_states(tile: Tile, saved: Rule, rule: Rule, kept: Mapping[Plane, Buffer]) -> None:
    for start in range(0, tile.layout.trainable_numel, _PIECE):
        stop = min(start + _PIECE, tile.layout.trainable_numel)
        with ExitStack() as writing:
            own = [
                writing.enter_context(b.writing(plane.place(start, stop)))
                for plane, b in tile.states.items()
            ]
            there = own[0].device
            rule.take_over(
                saved,
                [b.data[plane.place(start, stop)].to(there) for plane, b in kept.items()],
                own,
                at=tile.index * MOST_ELEMENTS + start,
                step=tile.version,
            )


def _differences(saved: Rule, rule: Rule) -> list[tuple[str, str, str]]:
    if saved.name != rule.name:
        return [("name", saved.name, rule.name)]
    both = [(name, getattr(saved, name), getattr(rule, name)) for name in rule.choices]
    return [each for each in both if each[1] != each[2]]
