"""Checkpoints: a run's exact state on disk, written while training goes on."""

from megatrain.checkpoint.files import put_right
from megatrain.checkpoint.manifest import (
    BaseReference,
    Checkpoint,
    Settings,
    as_json,
    is_checkpoint,
    mark,
    open_checkpoint,
    require_replaceable,
    rotate,
    verify,
    whole_checkpoints,
)
from megatrain.checkpoint.read import masters
from megatrain.checkpoint.saver import Contents, Saver, Saving
