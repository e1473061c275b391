"""Optimizers: each rule is a file; `RULES` has them by the name that run files know."""

from megatrain.kernels.states import TileRange, UpdateOptions
from megatrain.optim.adafactor import Adafactor
from megatrain.optim.adamw import AdamW
from megatrain.optim.lion import Lion
from megatrain.optim.muon import Muon
from megatrain.optim.rule import (
    NO_DECAY,
    Part,
    Plane,
    PlaneKind,
    Rule,
    gradient_plane,
    is_number,
    moved_bytes,
    parameter_bytes,
    tile_planes,
)
from megatrain.optim.sgd import SGD
from megatrain.optim.streamed import StreamedOptimizer

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (AdamW, Lion, SGD, Muon, Adafactor)}

__all__ = [
    "NO_DECAY",
    "RULES",
    "SGD",
    "Adafactor",
    "AdamW",
    "Lion",
    "Muon",
    "Part",
    "Plane",
    "PlaneKind",
    "Rule",
    "StreamedOptimizer",
    "TileRange",
    "UpdateOptions",
    "gradient_plane",
    "is_number",
    "moved_bytes",
    "parameter_bytes",
    "tile_planes",
]
