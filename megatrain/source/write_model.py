"""A model as a folder: of Hugging Face's layout, or its adapter alone in PEFT's."""

import logging
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.checkpoint import Checkpoint, masters
from megatrain.compat import peft
from megatrain.errors import InputError
from megatrain.model.adapters import Values, adapted, merged_into_base, plain, require_held
from megatrain.model.companions import Companions
from megatrain.model.export import write_adapter, write_weights
from megatrain.model.weights import carried_tensors, lazy_weights, stored_types
from megatrain.source.base import Base
from megatrain.source.base_reference import carried, whole_masters
from megatrain.source.buffers import Untrained
from megatrain.source.load_weights import read_adapter
from megatrain.source.source import open_source
from megatrain.source.state_io import open_model, read_untrained, saved_companions, saved_dtype

_log = logging.getLogger(__name__)


def write_model(
    folder: Path,
    model: PreTrainedModel,
    masters: Values,
    untrained: Untrained,
    *,
    dtype: torch.dtype | None,
    source_dtype: torch.dtype,
    beside: Companions,
    merged: bool = False,
    base: Base = "bf16",
) -> None:
    """Write the model; of one with an adapter that alone, in float32, or with `merged` the whole.

    Args:
        model: tells configuration, names and shapes.
        masters: functions that give each parameter's exact values, by name.
        dtype: of all floating tensors; None: `source_dtype`, and what is not trained as it came.
        base: how its frozen linear layers are kept; a warning says so.

    Raises:
        InputError: `merged` of a model without an adapter, or of one that cannot be merged; the
            folder is the base of the adapter.
        RunFailed: it cannot be written; nothing is left behind.
    """
    found = adapted(model)
    if found is None and merged:
        raise InputError("the model has no adapter that could be merged; leave merged out")
    if found is not None and peft.is_base(folder, found.configs[found.active]):
        raise InputError(
            f"{folder}: is the base of the adapter, which would be lost; give another folder"
        )
    if found is not None and not merged:
        write_adapter(folder, model, masters, dtype=dtype or torch.float32, beside=beside)
        return
    if base != "bf16":
        _log.warning("frozen linear layers are written as their %s values, not as they came", base)
    values, as_came = {**masters, **untrained.values}, untrained.as_came(dtype)
    if found is not None:
        whole, held = merged_into_base(model, values), found.held
        unchanged = {n for n in held if n in values and whole[held[n]] is values[n]}
        as_came = {held[n]: each for n, each in as_came.items() if n in unchanged}
        model, values = found.base, whole
    write_weights(
        folder,
        model,
        values,
        dtype=dtype or source_dtype,
        as_came=as_came,
        beside=beside,
        carried=untrained.carried,
    )


def write_saved(
    checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None = None, *, merged: bool = False
) -> None:
    """Write a checkpoint's model into `folder`: one parameter in memory at a time, and no engine.

    Args:
        dtype: of all floating tensors; None: that of the model that the run began with.
        merged: of a model with an adapter the whole, not the adapter alone.

    Raises:
        InputError: as `write_model`; or the adapter's folder could not hold all that was trained.
    """
    model = open_model(checkpoint)
    if not merged:
        require_held(model)
    values = whole_masters(checkpoint, model) if merged else masters(checkpoint)
    untrained = read_untrained(checkpoint, model)
    if merged or adapted(model) is None:
        untrained.carried = carried(checkpoint, model)
    write_model(
        folder,
        model,
        values,
        untrained,
        dtype=dtype,
        source_dtype=saved_dtype(checkpoint),
        beside=saved_companions(checkpoint),
        merged=merged,
        base=checkpoint.settings.base,
    )


def write_merged(
    adapter: Path, folder: Path, dtype: torch.dtype | None = None, base_model: str | None = None
) -> None:
    """Write the model that an adapter's folder and its base make, one parameter in memory at once.

    Args:
        dtype: of all floating tensors; None: that of the base.
        base_model: where the base is; None: where the adapter says.

    Raises:
        InputError: the adapter or its base cannot be read, or cannot be merged.
    """
    source = open_source(adapter, base_model=base_model)
    base, own, untrained = plain(source.model), dict[str, Tensor](), Untrained()
    if source.saved is not None:
        whole, untrained = masters(source.saved), read_untrained(source.saved, base)
        untrained.carried = carried(source.saved, base)
    else:
        assert source.folder is not None
        whole = lazy_weights(source.folder, base)
        untrained.dtypes = stored_types(source.folder, base)
        untrained.carried = carried_tensors(source.folder, base)
    read_adapter(source, own.__setitem__)
    names = source.names
    values = {names.get(name, name): read for name, read in whole.items()}
    values |= {name: partial(Tensor.detach, value) for name, value in own.items()}
    found = adapted(source.model)
    unused = set() if found is None else {found.names[name] for name in found.replaced}
    needed = (name for name, _ in source.model.named_parameters() if name not in unused)
    if missing := [name for name in needed if name not in values]:
        raise InputError(f"{adapter}: its base has no {missing[0]!r}; complete the base")
    untrained.dtypes = {names.get(n, n): each for n, each in untrained.dtypes.items()}
    write_model(
        folder,
        source.model,
        values,
        untrained,
        dtype=dtype,
        source_dtype=source.dtype,
        beside=source.companions,
        merged=True,
    )
