"""Loads a Trainer's model by its hub id or folder, as TRL's arguments say."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    set_seed,
)

from megatrain.compat.peft import is_peft_model
from megatrain.compat.transformers import MULTIMODAL_CLASSES, scores_rows
from megatrain.data import load_tokenizer
from megatrain.errors import InputError
from megatrain.integrations.heeded import refuse
from megatrain.integrations.taken import REFUSED_OPTIONS


def opened(model: Any, args: Any, options: dict[str, Any], *, scores: bool) -> Any:
    """The model given, or loaded by its name, then also its tokenizer.

    Args:
        args: their `model_init_kwargs` say how to load; `device_map` has no meaning here.
        options: the Trainer's; a `processing_class` may be added.
        scores: the model needs a head that scores rows.

    Raises:
        InputError: it is no model, or one with another head; or arguments say how to load one that
            is loaded; or it would be quantised.
    """
    kwargs = dict(getattr(args, "model_init_kwargs", None) or {})
    if options.get("quantization_config") or kwargs.pop("quantization_config", None):
        refuse("quantization_config", REFUSED_OPTIONS["quantization_config"])
    if isinstance(model, PreTrainedModel) or is_peft_model(model):
        if not scores and scores_rows(model.get_base_model() if is_peft_model(model) else model):
            refuse(
                f"a {type(model).__name__}", "a model that scores rows needs trl's RewardTrainer"
            )
        if kwargs:
            refuse("args.model_init_kwargs", "load the model with them, and give the model")
        return model
    if not isinstance(model, str | Path):
        raise InputError("StreamedTrainer needs a transformers model, its hub id or folder")
    kwargs.pop("device_map", None)
    kwargs = {
        "dtype": "auto",
        "trust_remote_code": getattr(args, "trust_remote_code", False),
    } | kwargs
    named = {name: kwargs[name] for name in ("revision", "trust_remote_code") if name in kwargs}
    config = AutoConfig.from_pretrained(model, **named)
    multimodal = MULTIMODAL_CLASSES.get(config.model_type)
    if multimodal in (config.architectures or ()) and not scores:  # TRL finds its processor
        return getattr(transformers, str(multimodal)).from_pretrained(model, **kwargs)
    if options.get("processing_class") is None:
        options["processing_class"] = load_tokenizer(model, **named)
    if scores:
        set_seed(args.seed)  # a head that the files lack is random
        return AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, **kwargs)
    return AutoModelForCausalLM.from_pretrained(model, **kwargs)


@contextmanager
def changed(args: Any, **values: Any) -> Iterator[None]:
    """Within this context these arguments, if `args` has them, have other values."""
    before = {name: getattr(args, name) for name in values if hasattr(args, name)}
    for name in before:
        setattr(args, name, values[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)


def without_dropout(model: Any) -> None:
    """Switch dropout off in configurations, too, as TRL's `disable_dropout` does in modules.

    Raises InputError: a layer has dropout outside of a module, which TRL leaves on.
    """
    for name, module in model.named_modules():
        for setting, value in vars(module).items():
            if "drop" in setting and isinstance(value, float) and value > 0:
                refuse(
                    f"args.disable_dropout, which leaves {name}.{setting} at {value}",
                    f"load the model with {setting}=0.0 (model_init_kwargs), or set "
                    "disable_dropout=False",
                )
    for config in (model.config, *getattr(model, "peft_config", {}).values()):
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
                setattr(config, name, 0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # where TRL says 0
        for name in getattr(module, "lora_dropout", {}):  # as PEFT makes it without dropout
            module.lora_dropout[name] = nn.Identity()
