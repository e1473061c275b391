"""Tiles back from a checkpoint whose optimizer kept its state in another form."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from megatrain.checkpoint.manifest import Checkpoint
from megatrain.checkpoint.read import read_planes, read_tiles
from megatrain.device import Buffer
from megatrain.optim import Rule
from megatrain.store import Tile
from megatrain.tile.layout import ALIGNMENT, MOST_ELEMENTS

_log = logging.getLogger(__name__)

# Elements converted at a time: what is made meanwhile stays small.
_PIECE = ALIGNMENT << 15


def read_converted(
    checkpoint: Checkpoint, tiles: Sequence[Tile], threads: int, saved: Rule, rule: Rule
) -> None:
    """`read_tiles` where `saved` is the checkpoint's rule and `rule` that of `tiles`.

    One tile's state at a time is in host memory besides.

    Raises:
        InputError: as `read_tiles`; or `rule` can make nothing of what `saved` has kept.
    """
    _log.warning(
        "%s: the optimizer's state is converted (%s), so the run does not go on exactly as it "
        "would have",
        checkpoint.folder,
        ", ".join(f"{n} {was} to {now}" for n, was, now in _differences(saved, rule)),
    )
    masters = [
        replace(tile, planes={p: b for p, b in tile.planes.items() if p not in tile.states})
        for tile in tiles
    ]
    read_tiles(checkpoint, masters, threads)
    for tile, master in zip(tiles, masters, strict=True):
        tile.version = master.version
        kept = {
            plane: Buffer(plane.name, torch.zeros(plane.numel(tile.layout), dtype=plane.dtype))
            for plane in saved.state_planes
        }
        read_planes(checkpoint, replace(tile, planes={**master.planes, **kept}), kept, threads)
        for start in range(0, tile.layout.trainable_numel, _PIECE):
            stop = min(start + _PIECE, tile.layout.trainable_numel)
            there = tile.weights.data.device
            with ExitStack() as writing:
                rule.take_over(
                    saved,
                    [b.data[plane.place(start, stop)].to(there) for plane, b in kept.items()],
                    [
                        writing.enter_context(b.writing(plane.place(start, stop)))
                        for plane, b in tile.states.items()
                    ],
                    at=tile.index * MOST_ELEMENTS + start,
                    step=tile.version,
                )


def _differences(saved: Rule, rule: Rule) -> list[tuple[str, str, str]]:
    if saved.name != rule.name:
        return [("name", saved.name, rule.name)]
    both = [(name, getattr(saved, name), getattr(rule, name)) for name in rule.choices]
    return [each for each in both if each[1] != each[2]]
