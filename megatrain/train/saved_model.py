"""The model of a checkpoint as a Hugging Face folder."""

from pathlib import Path

import torch

from megatrain.checkpoint import Checkpoint, masters
from megatrain.source.exported import write_model
from megatrain.source.state_io import open_model, read_untrained, saved_companions, saved_dtype


def write_saved(
    checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None = None, *, merged: bool = False
) -> None:
    """Write a checkpoint's model into `folder`: one parameter in memory at a time, and no engine.

    Args:
        dtype: of all floating tensors; None: that of the model that the run began with.
        merged: of a model with an adapter the whole, not the adapter alone.
    """
    model = open_model(checkpoint)
    write_model(
        folder,
        model,
        masters(checkpoint),
        read_untrained(checkpoint, model),
        dtype=dtype,
        source_dtype=saved_dtype(checkpoint),
        beside=saved_companions(checkpoint),
        merged=merged,
    )
