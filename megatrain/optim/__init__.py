"""Optimizers: `RULES` has each rule, a subclass of `Rule`, by the name that run files know."""

from megatrain.kernels.states import TileRange, UpdateOptions
from megatrain.optim.muon import Muon
from megatrain.optim.pointwise import SGD, AdamW, Lion
from megatrain.optim.rule import (
    NO_DECAY,
    Plane,
    PlaneKind,
    Rule,
    gradient_plane,
    is_number,
    moved_bytes,
    parameter_bytes,
    tile_planes,
)
from megatrain.optim.streamed import StreamedOptimizer

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (AdamW, Lion, SGD, Muon)}

NO_ADAFACTOR = (
    "Adafactor has been given up: use AdamW with states: int8 (8.1 bytes a parameter), and with "
    "master: 24 (7.1)"
)
