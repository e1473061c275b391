"""A model to generate with: resident where it fits, else streamed from host memory."""

import logging

from megatrain.api import Engine
from megatrain.autoplace.fits import limits
from megatrain.base.units import gib
from megatrain.checkpoint import Checkpoint
from megatrain.compat.transformers import scores_rows
from megatrain.device import free_bytes, open_device
from megatrain.errors import InputError
from megatrain.generate.resident import Resident
from megatrain.model.build import loaded_types
from megatrain.placement import Precision
from megatrain.source.engine_setup import DTYPES
from megatrain.source.source import open_source

# Of the memory that is free: so much may weights take, the rest is for the work and the cache.
_SHARE = 0.85

log = logging.getLogger(__name__)


def open_model(
    model: Checkpoint | str,
    *,
    precision: Precision = "bf16",
    device: str | None = None,
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    base_model: str | None = None,
) -> Engine | Resident:
    """A model of a checkpoint, a folder or a hub id; whoever opens it closes it.

    Args:
        device: None: the GPU if there is one.
        device_memory, host_memory, base_model: as `Engine` takes them.

    Raises:
        InputError: it cannot be read.
        DoesNotFit: host memory cannot hold it.
    """
    opened = open_device(device)
    device_limit, host_limit = limits(device_memory, host_memory)
    opened.limit(device_limit, host_limit)
    source = open_source(model, base_model=base_model)
    if scores_rows(source.model):
        raise InputError(f"{model}: its model gives scores of rows, and no texts")
    types = loaded_types(source.model, DTYPES[precision])
    needed = sum(p.numel() * types[n].itemsize for n, p in source.model.named_parameters())
    free = free_bytes(opened, host_limit)
    if needed <= _SHARE * free:
        return Resident(source, opened, DTYPES[precision])
    log.info(
        "the model takes %s and %s are free: its layers are streamed from host memory",
        gib(needed), gib(free),
    )  # fmt: skip
    return Engine(
        model,
        precision=precision,
        device=opened,
        device_memory=device_memory,
        host_memory=host_memory,
        base_model=base_model,
    )
