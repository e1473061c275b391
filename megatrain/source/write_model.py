"""Writes a model's folder, and the files of a checkpoint beside its tiles.

The folder has Hugging Face's layout, or PEFT's if it has an adapter alone.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatrain.checkpoint import BaseReference, Checkpoint, Settings, masters
from megatrain.checkpoint.manifest import BUFFERS, CARRIED, COMPUTED, MODEL, is_checkpoint, mark
from megatrain.compat import peft
from megatrain.compat.transformers import attention_of, configs, experts_of
from megatrain.errors import InputError
from megatrain.model.adapters import Values, adapted, merged_into_base, plain, require_held
from megatrain.model.attention import chosen_attention
from megatrain.model.companions import write_companions
from megatrain.model.export import write_adapter, write_configs, write_weights
from megatrain.model.safetensors_io import write_shard
from megatrain.model.weights import WeightPlan
from megatrain.parallel.distributed import Ranks
from megatrain.placement import Placement
from megatrain.source import state_io
from megatrain.source.load_weights import read_adapter
from megatrain.source.source import EngineSetup, Source, open_source
from megatrain.tile import Entry

_log = logging.getLogger(__name__)


def write_documents(folder: Path, source: Source, *, carries: bool) -> None:
    """Write the model's configuration, companions and buffers into a checkpoint.

    Args: `carries`: write carried tensors, too; not if the checkpoint leaves their base out.
    """
    write_configs(folder / MODEL, source.model, source.dtype)
    write_companions(folder / MODEL, source.companions)
    buffers, computed = source.untrained.buffers, source.untrained.computed
    carried = source.untrained.carried if carries else {}
    _write(folder / BUFFERS, buffers, buffers.__getitem__)
    _write(folder / COMPUTED, computed, computed.__getitem__)
    blanks = {name: tensor.blank() for name, tensor in carried.items()}
    _write(folder / CARRIED, blanks, lambda name: carried[name].read())


def _write(path: Path, blanks: Mapping[str, Tensor], value: Callable[[str], Tensor]) -> None:
    """Write tensors with the dtypes and shapes of `blanks`, the widest dtype first, if any."""
    names = sorted(blanks, key=lambda name: -blanks[name].dtype.itemsize)
    if names:
        write_shard(path, {name: blanks[name] for name in names}, map(value, names))


def settings_of(
    opened: EngineSetup, steps: int, placement: Placement, entries: Iterable[Entry], folder: Path
) -> Settings:
    """The settings that a checkpoint in `folder` saves of an engine after `steps` steps.

    All ranks call this. `entries`: of all tiles.
    """
    source, rule, optimizer = opened.source, opened.model.rule, opened.model.optimizer
    model, dtype, types = source.model, source.dtype, source.untrained.dtypes
    if source.untrained.rounded:  # exports of the checkpoint have no more bits than bf16
        dtype, types = torch.bfloat16, {}
    attention = {path: chosen_attention(attention_of(part)) for path, part in configs(model.config)}
    experts = {path: experts_of(part) for path, part in configs(model.config)}
    adapters, optimizer_settings = adapted(model), None
    if rule is not None:
        choices = {choice.name: getattr(rule, choice.name) for choice in fields(rule)}
        optimizer_settings = {"name": rule.name, **choices}
    return Settings(
        dtype=str(dtype).removeprefix("torch."),
        frozen_dtypes={n: str(t).removeprefix("torch.") for n, t in types.items() if t != dtype},
        model_class=type(model).__name__,
        attn_implementation={path: name for path, name in attention.items() if name},
        experts_implementation={path: name for path, name in experts.items() if name},
        frozen=tuple(n for n, p in model.named_parameters() if not p.requires_grad),
        adapter=None if adapters is None else adapters.as_json(),
        base=source.base,
        optimizer=optimizer_settings,
        steps=steps,
        seed=opened.seed,
        precision=opened.precision,
        max_grad_norm=opened.max_grad_norm,
        device=opened.device.kind,
        placement=placement.as_dict(),
        groups=() if optimizer is None else tuple(optimizer.saved_groups()),
        num_steps=0 if optimizer is None else optimizer.num_steps,
        left_out=_base_reference(source, entries, folder, opened.ranks),
    )


def _base_reference(
    source: Source, entries: Iterable[Entry], folder: Path, ranks: Ranks
) -> BaseReference | None:
    """A reference to the base that a checkpoint of an adapter leaves out; None: it saves the base.

    A base that is a checkpoint of ours is marked, so that no rotation removes it. All ranks call
    this, and get the same result. The checkpoint's `folder` may replace that of the base.
    """
    adapters, origin = adapted(source.model), source.origin
    frozen = [entry for entry in entries if entry.group is None]
    reference = None
    if origin and adapters and all(entry.name in adapters.base_names for entry in frozen):
        packed = {e.name: e.packed.name for e in frozen if e.packed and e.needs_unpacking}
        checksum = origin.fingerprint(entry.name for entry in frozen)
        if origin.revision is not None or _will_stay(Path(origin.path), folder):
            origin.carried = origin.carried or state_io.fingerprint(source.untrained.carried)
            reference = BaseReference(
                origin.path, origin.revision, checksum, packed, origin.carried
            )
    references = ranks.all_gather_object(reference)
    return references[0] if all(references) else None


def _will_stay(base: Path, folder: Path) -> bool:
    """True if a base exists and will neither be replaced by `folder` nor removed."""
    if not base.exists() or base.resolve() == folder.resolve():
        return False
    try:
        if is_checkpoint(base):
            mark(base)
    except OSError:  # it cannot be marked, so it may be removed
        return False
    return True


def write_model(
    folder: Path, source: Source, masters: Values, *, dtype: torch.dtype | None, merged: bool
) -> None:
    """Write the model of a source; of a model with an adapter the adapter alone, unless `merged`.

    Args:
        masters: functions that return each parameter's exact values, by name.
        dtype: of all floating tensors; None: the source's, with untrained tensors unchanged, and
            float32 for an adapter.
    """
    model, untrained, companions = source.model, source.untrained, source.companions
    adapters = adapted(model)
    if adapters is None and merged:
        raise InputError("the model has no adapter that could be merged; leave merged out")
    if adapters is not None and peft.is_base(folder, adapters.config):
        raise InputError(
            f"{folder}: is the base of the adapter, which would be lost; give another folder"
        )
    values = {**masters, **untrained.values}
    if adapters is not None and not merged:
        write_adapter(folder, model, values, dtype=dtype or torch.float32, beside=companions)
        return
    if source.base not in ("bf16", "folder"):
        text = "frozen linear layers were rounded to %s when read, and are written so"
        _log.warning(text, source.base)
    as_came = untrained.as_came(dtype)
    if adapters is not None:
        merged_values = merged_into_base(model, values)
        names = {**adapters.base_names, **adapters.copies}
        unchanged = {n for n in names if n in values and merged_values.get(names[n]) is values[n]}
        as_came = {names[n]: source_dtype for n, source_dtype in as_came.items() if n in unchanged}
        model, values = adapters.base, merged_values
    dtype, carried = dtype or source.dtype, untrained.carried
    write_weights(
        folder, model, values, dtype=dtype, as_came=as_came, beside=companions, carried=carried
    )


def write_saved(
    saved: Checkpoint | Path,
    out: Path,
    dtype: torch.dtype | None = None,
    *,
    merged: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Write a model to the folder `out` from its files, one parameter in memory at a time.

    Args:
        saved: a checkpoint, or the folder of an adapter.
        dtype: of all floating tensors; None: that of the model with which the run began.
        merged: write the whole model, with its adapter merged, and not the adapter alone.
        trust_remote_code: run code that the model's folder brings.
    """
    resumes = isinstance(saved, Checkpoint)
    source = open_source(saved, resumes=resumes, trust_remote_code=trust_remote_code)
    model, stored, names = source.model, source.stored, source.names
    assert stored is not None
    if not merged:
        require_held(model)
    elif isinstance(stored, Checkpoint) and not source.grows:
        state_io.require_same_base(stored, model)
    else:
        source.require_base()
    base = plain(model) if source.grows else model
    if isinstance(stored, Checkpoint):
        values = state_io.whole_masters(stored, model) if merged else masters(stored)
        source.untrained = state_io.read_untrained(stored, base)
    else:
        values = state_io.stored_values(stored, base)
        source.untrained = state_io.Untrained(dtypes=WeightPlan(stored, base).types)
    types, adapter = source.untrained.dtypes, dict[str, Tensor]()
    source.untrained.dtypes = {names.get(n, n): source_dtype for n, source_dtype in types.items()}
    if merged or adapted(model) is None:
        source.untrained.carried = state_io.carried(stored, base)
    read_adapter(source, adapter.__setitem__)
    values = {names.get(name, name): value for name, value in values.items()}
    values |= {name: partial(Tensor.detach, value) for name, value in adapter.items()}
    adapters = adapted(model)
    unused = set() if adapters is None else {adapters.names[name] for name in adapters.replaced}
    for name, _ in model.named_parameters() if merged else ():
        if name not in values and name not in unused:
            raise InputError(f"{saved}: its base has no {name!r}; complete the base")
    write_model(out, source, values, dtype=dtype, merged=merged)
