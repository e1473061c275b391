"""Checkpoints: a run's exact state on disk, written while training goes on."""

from megatrain.checkpoint.convert import read_converted
from megatrain.checkpoint.files import put_right
from megatrain.checkpoint.folders import (
    is_checkpoint,
    mark,
    newest_whole,
    offering_another,
    open_checkpoint,
    require_replaceable,
    rotate,
    verify,
    whole_checkpoints,
)
from megatrain.checkpoint.manifest import (
    BUFFERS,
    CARRIED,
    COMPUTED,
    MODEL,
    BaseReference,
    Checkpoint,
    Settings,
    as_json,
)
from megatrain.checkpoint.masters import masters
from megatrain.checkpoint.read import read_tiles
from megatrain.checkpoint.saver import Contents, Saver, Saving
from megatrain.checkpoint.snapshot import saved_numel
from megatrain.checkpoint.staging_blocks import spare_bytes_of, useful_bytes
