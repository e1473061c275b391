"""The model of a checkpoint as a Hugging Face folder."""

from pathlib import Path

import torch

from megatrain.checkpoint import Checkpoint, masters
from megatrain.model.export import write_weights
from megatrain.source.state_io import open_model, read_untrained, saved_companions, saved_dtype


def write_saved(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a checkpoint's model into `folder`: one parameter in memory at a time, and no engine.

    Args:
        dtype: of all floating tensors; None: that of the model that the run began with.
    """
    model = open_model(checkpoint)
    untrained = read_untrained(checkpoint, model)
    values, as_came = masters(checkpoint) | untrained.values, untrained.as_came(dtype)
    chosen, beside = dtype or saved_dtype(checkpoint), saved_companions(checkpoint)
    write_weights(folder, model, values, dtype=chosen, as_came=as_came, beside=beside)
