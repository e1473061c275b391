"""Reads what a checkpoint holds of an engine besides its tiles."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.checkpoint import Checkpoint
from megatrain.checkpoint.manifest import BUFFERS, COMPUTED, MODEL
from megatrain.compat.transformers import set_attention, set_experts
from megatrain.errors import InputError
from megatrain.model.adapters import restored
from megatrain.model.build import configs, empty_model, load_config
from megatrain.model.companions import read_files
from megatrain.model.safetensors_io import Stored, read_header
from megatrain.optim import NO_ADAFACTOR, RULES, Rule
from megatrain.placement import Placement
from megatrain.source.base_reference import left_out_names

_EXPORTED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SOURCE_DTYPES = _EXPORTED | {"float64": torch.float64}


@dataclass
class Untrained:
    """The parts of a model's source that no step changes: exports give them back bit for bit.

    Attributes:
        buffers: persistent buffers by name, on the CPU; the model computes with copies that have
            the dtypes of the run's precision.
        computed: buffers that no file of weights has, which the class computes when it is made.
        dtypes: of frozen parameters, by name, as they came; values rest in the tiles.
        carried: tensors of the source's files that the model's class has no place for.
        rounded: the tiles hold fewer bits of some of these than came.
    """

    buffers: dict[str, Tensor] = field(default_factory=dict)
    computed: dict[str, Tensor] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    carried: Mapping[str, Stored] = field(default_factory=dict)
    rounded: bool = False

    @property
    def values(self) -> dict[str, Callable[[], Tensor]]:
        """A function for each buffer that returns it, as exports need."""
        return {name: partial(Tensor.detach, buffer) for name, buffer in self.buffers.items()}

    def as_came(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """Dtypes of tensors that an export in `dtype` (None: any) writes unchanged."""
        parameters = self.dtypes if dtype is None else {}
        return parameters | {name: buffer.dtype for name, buffer in self.buffers.items()}

    def export_dtype(self, dtype: torch.dtype | str | None) -> torch.dtype | None:
        """The dtype of an export, which may be given by its name.

        Raises InputError: unknown dtype, or not bf16 where the tiles hold only bf16 bits.
        """
        chosen = _EXPORTED.get(dtype) if isinstance(dtype, str) else dtype
        if chosen not in _EXPORTED.values() and dtype is not None:
            raise InputError(f"dtype is {dtype!r}; it must be float32, bfloat16, float16 or None")
        if self.rounded and chosen != torch.bfloat16:
            raise InputError(
                "an engine without an optimizer in bf16 has rounded its weights; export with "
                "dtype=torch.bfloat16, or open the model with precision='fp32'"
            )
        return chosen


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that belong to the model's weights, by name."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def computed_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that do not belong to the weights, on the CPU, by name."""
    saved = persistent_buffers(model)
    return {n: b.cpu().contiguous() for n, b in model.named_buffers() if n not in saved}


def read_untrained(checkpoint: Checkpoint, model: PreTrainedModel) -> Untrained:
    """Read a checkpoint's untrained tensors; copies all buffers into `model`.

    Raises InputError: they are those of another model.
    """
    stored, buffers = _stored(checkpoint, BUFFERS), persistent_buffers(model)
    if {n: (tensor.dtype.is_floating_point, tensor.shape) for n, tensor in stored.items()} != {
        n: (tensor.is_floating_point(), tuple(tensor.shape)) for n, tensor in buffers.items()
    }:
        raise InputError(
            f"{checkpoint.folder / BUFFERS}: its buffers are not those of a {type(model).__name__}"
        )
    values = {name: tensor.read() for name, tensor in stored.items()}
    for name, buffer in buffers.items():
        buffer.copy_(values[name])
    # Another version of transformers, or a model that was made in bf16, computes others.
    computed = computed_buffers(model)
    for name, tensor in _stored(checkpoint, COMPUTED).items():
        if name not in computed or tensor.shape != tuple(computed[name].shape):
            raise InputError(
                f"{checkpoint.folder / COMPUTED}: {name!r} is no buffer of a {type(model).__name__}"
            )
        model.get_buffer(name).copy_(tensor.read())
    return Untrained(values, dtypes=frozen_types(checkpoint, model))


def frozen_types(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, torch.dtype]:
    """The dtypes of frozen parameters in the model's source, by name."""
    frozen = [p.name for p in checkpoint.manifest.parameters if p.group is None]
    frozen += left_out_names(checkpoint, model).values()
    others = checkpoint.settings.frozen_dtypes
    return {name: saved_dtype(checkpoint, others.get(name)) for name in frozen}


def _stored(checkpoint: Checkpoint, name: str) -> dict[str, Stored]:
    """The tensors of a file of a checkpoint, which may not have it."""
    header = read_header(checkpoint.folder / name) if name in checkpoint.manifest.files else []
    return {tensor.name: tensor for tensor in header}


def open_model(
    checkpoint: Checkpoint, *, trust_remote_code: bool = False, **code: Any
) -> PreTrainedModel:
    """The checkpoint's model without weights; the same parameters are frozen.

    Raises InputError: transformers makes another model of its configuration.
    """
    settings, folder = checkpoint.settings, checkpoint.model_folder
    config = load_config(folder, trust_remote_code=trust_remote_code)
    # config.json does not say which code computes; the outer parts first: they set the inner, too.
    for path, part in configs(config):
        set_attention(part, settings.attn_implementation.get(path))
        set_experts(part, settings.experts_implementation.get(path))
    model = empty_model(config, trust_remote_code=trust_remote_code, **code)
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
    """The files beside the model's configuration in a checkpoint; their bytes are checked."""
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
    """The checkpoint's optimizer rule.

    Args:
        wanted: choices that it must have; None: any.

    Raises InputError: the rule is unknown, or has other choices.
    """
    if checkpoint.settings.optimizer is None:
        return None
    settings = dict(checkpoint.settings.optimizer)
    name = str(settings.pop("name", None))
    if name == "adafactor":
        raise InputError(f"{checkpoint.folder}: trained with Adafactor. {NO_ADAFACTOR}")
    rule = RULES.get(name)
    known = set() if rule is None else {setting.name for setting in fields(rule)}
    if rule is None or settings.keys() != known:
        raise InputError(f"{checkpoint.folder}: its optimizer is none that is known")
    for choice, value in wanted.items():
        if value not in (None, settings.get(choice)):
            raise InputError(
                f"{choice} is {value!r}, but {checkpoint.folder} was trained with "
                f"{settings.get(choice)!r}, which cannot change on the way; leave it out"
            )
    return rule(**settings)


def resumed_placement(
    checkpoint: Checkpoint, wanted: Placement | Literal["auto"] | None, device: str
) -> Placement | Literal["auto"]:
    """The placement to go on with; None takes the saved one where the kind of device is the same.

    Raises InputError: the saved one has choices that are unknown here.
    """
    if wanted is not None:
        return wanted
    saved = checkpoint.settings.placement
    if checkpoint.settings.device != device:
        return "auto"
    try:
        return Placement(**saved | {"resident": tuple(saved["resident"])})
    except (LookupError, TypeError) as error:
        raise InputError(
            f"{checkpoint.folder}: its placement is of another version ({error}); give one: "
            "placement='auto'"
        ) from error


def check_precision(checkpoint: Checkpoint, wanted: str | None) -> Any:
    """The precision to go on with, which is the saved one. Raises InputError."""
    saved = checkpoint.settings.precision
    if wanted not in (None, saved):
        raise InputError(
            f"precision is {wanted!r}, but {checkpoint.folder} was trained in {saved!r}, which "
            "cannot change on the way; leave it out, or export the model and start from it"
        )
    return saved
