"""Writes and reads what a checkpoint holds of an engine besides its tiles."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.checkpoint import BUFFERS, CARRIED, COMPUTED, MODEL, Checkpoint, Settings
from megatrain.compat.transformers import attention_of, experts_of, set_attention, set_experts
from megatrain.errors import InputError
from megatrain.model.adapters import adapted, restored
from megatrain.model.build import configs, empty_model, load_config
from megatrain.model.companions import Companions, read_files, write_companions
from megatrain.model.documents import chosen_attention
from megatrain.model.export import write_configs
from megatrain.model.safetensors_io import Described, Stored, read_header, write_shard
from megatrain.optim import NO_ADAFACTOR, RULES, Rule
from megatrain.placement import Placement
from megatrain.source.base_reference import left_out_names
from megatrain.source.buffers import Untrained, computed_buffers, persistent_buffers


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


SOURCE_DTYPES = {
    _name(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


def describe_optimizer(rule: Rule | None) -> dict[str, Any] | None:
    """A rule's name and settings as plain JSON values."""
    if rule is None:
        return None
    return {"name": rule.name} | {
        each.name: list(value) if isinstance(value := getattr(rule, each.name), tuple) else value
        for each in fields(rule)
    }


def documents(
    model: PreTrainedModel,
    dtype: torch.dtype,
    untrained: Untrained,
    beside: Companions,
    *,
    has_base: bool,
) -> Callable[[Path], None]:
    """Writes the model's configuration and companions and its buffers into a checkpoint.

    Args:
        has_base: the checkpoint leaves no base out, which would hold what is carried.
    """

    def write(folder: Path) -> None:
        write_configs(folder / MODEL, model, dtype)
        write_companions(folder / MODEL, beside)
        _write(folder / BUFFERS, untrained.buffers, Tensor.detach)
        _write(folder / COMPUTED, untrained.computed, Tensor.detach)
        _write(folder / CARRIED, untrained.carried if has_base else {}, Stored.values)

    return write


def _write(path: Path, tensors: Mapping[str, Any], value: Callable[[Any], Tensor]) -> None:
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    if names:
        described = [Described(n, tensors[n].dtype, tuple(tensors[n].shape)) for n in names]
        write_shard(path, described, (value(tensors[name]) for name in names))


def read_untrained(checkpoint: Checkpoint, model: PreTrainedModel) -> Untrained:
    """Read what was not trained from a checkpoint; copies all buffers into `model`.

    Raises:
        InputError: they are those of another model.
    """
    path = checkpoint.folder / BUFFERS
    header = read_header(path) if BUFFERS in checkpoint.manifest.files else []
    stored = {tensor.name: tensor for tensor in header}
    buffers = persistent_buffers(model)
    if {n: (each.dtype.is_floating_point, each.shape) for n, each in stored.items()} != {
        n: (each.is_floating_point(), tuple(each.shape)) for n, each in buffers.items()
    }:
        raise InputError(f"{path}: its buffers are not those of a {type(model).__name__}")
    values = {name: tensor.read() for name, tensor in stored.items()}
    for name, buffer in buffers.items():
        buffer.copy_(values[name])
    frozen = [p.name for t in checkpoint.manifest.tiles for p in t.parameters if p.group is None]
    others = checkpoint.settings.frozen_dtypes
    dtypes = {
        name: saved_dtype(checkpoint, others.get(name))
        for name in (*frozen, *left_out_names(checkpoint, model).values())
    }
    # Buffers that a class computes: another version of transformers, or a model that was made in
    # bf16, has others. Checkpoints of older versions have none.
    path, computed = checkpoint.folder / COMPUTED, computed_buffers(model)
    for tensor in read_header(path) if COMPUTED in checkpoint.manifest.files else ():
        if tensor.name not in computed or tensor.shape != tuple(computed[tensor.name].shape):
            raise InputError(f"{path}: {tensor.name!r} is no buffer of a {type(model).__name__}")
        model.get_buffer(tensor.name).copy_(tensor.read())
    return Untrained(values, dtypes=dtypes)


def open_model(
    checkpoint: Checkpoint,
    *,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The checkpoint's model without its weights, frozen where it was.

    Raises:
        InputError: transformers makes another model of its configuration.
    """
    settings, folder = checkpoint.settings, checkpoint.model_folder
    config = load_config(folder, trust_remote_code=trust_remote_code)
    # config.json does not say which code computes; the outer parts first: they set the inner, too.
    for path, part in configs(config):
        set_attention(part, settings.attn_implementation.get(path))
        set_experts(part, settings.experts_implementation.get(path))
    model = empty_model(
        config, trust_remote_code=trust_remote_code, attn_implementation=attn_implementation
    )
    if type(model).__name__ != settings.model_class:
        raise InputError(
            f"{folder / 'config.json'}: transformers makes a {type(model).__name__} of it, and the "
            f"checkpoint is of a {settings.model_class}, which cannot be rebuilt"
        )
    if settings.adapter is not None:
        model = restored(model, settings.adapter)
    frozen, parameters = set(settings.frozen), dict(model.named_parameters())
    if unknown := frozen - parameters.keys():
        raise InputError(f"{checkpoint.folder}: its frozen parameter {min(unknown)!r} is unknown")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in frozen)
    return model


def saved_companions(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files beside the model's configuration in a checkpoint: all of them were checked."""
    names = [name for name in checkpoint.manifest.files if name.startswith(f"{MODEL}/")]
    inner = {name.removeprefix(f"{MODEL}/"): checkpoint.folder / name for name in names}
    return read_files({n: path for n, path in inner.items() if n != "config.json"})


def saved_dtype(checkpoint: Checkpoint, name: str | None = None) -> torch.dtype:
    """The dtype of the model's source, or of this name. Raises InputError."""
    name = name or checkpoint.settings.dtype
    if name not in SOURCE_DTYPES:
        raise InputError(f"{checkpoint.folder}: its dtype {name!r} is unknown")
    return SOURCE_DTYPES[name]


def saved_optimizer(checkpoint: Checkpoint, **wanted: Any) -> Rule | None:
    """The checkpoint's optimizer rule, with those of its choices that are not None.

    Raises:
        InputError: the rule is unknown, or has no such choice.
    """
    if checkpoint.settings.optimizer is None:
        return None
    settings = dict(checkpoint.settings.optimizer)
    name = settings.pop("name", None)
    if name == "adafactor":
        raise InputError(f"{checkpoint.folder}: trained with Adafactor. {NO_ADAFACTOR}")
    rule = RULES.get(name) if isinstance(name, str) else None
    known = set() if rule is None else {each.name for each in fields(rule)}
    # Checkpoints of older versions do not have the choices.
    if rule is None or not known - rule.choices.keys() <= settings.keys() <= known:
        raise InputError(f"{checkpoint.folder}: its optimizer is none that is known")
    for choice, value in wanted.items():
        if value is not None and choice not in rule.choices:
            raise InputError(f"{choice} is {value!r}, but {name} has no such choice; leave it out")
        settings |= {} if value is None else {choice: value}
    return rule(**settings)


def resumed_placement(
    checkpoint: Checkpoint, wanted: Placement | Literal["auto"] | None, device: str
) -> Placement | Literal["auto"]:
    """The placement to go on with; None takes the saved one where the kind of device is the same.

    Raises:
        InputError: the saved one has choices that are unknown here.
    """
    if wanted is not None:
        return wanted
    saved = checkpoint.settings.placement
    if checkpoint.settings.device != device:
        return "auto"
    unknown = saved.keys() - set(Placement.names())
    if unknown or not isinstance(saved.get("resident"), list):
        raise InputError(
            f"{checkpoint.folder}: its placement is of another version "
            f"({', '.join(sorted(unknown)) or 'resident'}); give one: placement='auto'"
        )
    return Placement(**saved | {"resident": tuple(saved["resident"])})


def check_precision(checkpoint: Checkpoint, wanted: str | None) -> Any:
    """The precision to go on with, which is the saved one. Raises InputError."""
    saved = checkpoint.settings.precision
    if wanted not in (None, saved):
        raise InputError(
            f"precision is {wanted!r}, but {checkpoint.folder} was trained in {saved!r}, which "
            "cannot change on the way; leave it out, or export the model and start from it"
        )
    return saved


def settings_of(
    model: PreTrainedModel, dtype: torch.dtype, untrained: Untrained, **rest: Any
) -> Settings:
    """All that a checkpoint says of an engine; `dtype` is that of the model's source."""
    attention = {path: chosen_attention(attention_of(part)) for path, part in configs(model.config)}
    experts = {path: experts_of(part) for path, part in configs(model.config)}
    if untrained.rounded:
        dtype = torch.bfloat16  # an export of the checkpoint claims no bits that are not there
        untrained = Untrained()
    others = {name: each for name, each in untrained.dtypes.items() if each != dtype}
    return Settings(
        dtype=_name(dtype),
        frozen_dtypes={name: _name(each) for name, each in others.items()},
        model_class=type(model).__name__,
        attn_implementation={path: name for path, name in attention.items() if name},
        experts_implementation={path: name for path, name in experts.items() if name},
        frozen=tuple(n for n, p in model.named_parameters() if not p.requires_grad),
        adapter=None if (found := adapted(model)) is None else found.as_json(),
        **rest,
    )
