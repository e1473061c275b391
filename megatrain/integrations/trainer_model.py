"""A Trainer's model: loaded by TRL's arguments, then replaced by a stand-in without weights."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from inspect import getattr_static, signature
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import transformers
from torch import nn

from megatrain.api import Engine
from megatrain.compat.gguf import is_gguf, unpacked_folder
from megatrain.compat.peft import has_adapter, is_peft_model, without_wrapper
from megatrain.compat.transformers import MULTIMODAL_CLASSES, task_of
from megatrain.data import load_tokenizer
from megatrain.errors import InputError
from megatrain.integrations.heeded import REFUSED, refuse
from megatrain.source.source import adapter_folder

_FACTS = bool | int | float | str | None  # types of attributes that a stand-in has


def refuse_weights(name: str, *_: Any, **__: Any) -> NoReturn:
    """Raises InputError: the weights are the engine's."""
    raise InputError(
        f"{name} of a StreamedTrainer's model: weights, gradients and modules are the engine's; "
        "change the model before you make the trainer, and rates in optimizer.param_groups"
    )


class StreamedParameter:
    """Stands for weights in `model.parameters()`: has their count, and refuses all other uses."""

    def __init__(self, count: int, requires_grad: bool) -> None:
        vars(self).update(_count=count, requires_grad=requires_grad)

    def numel(self) -> int:
        return self._count

    def __getattr__(self, name: str) -> Any:
        refuse_weights(f"parameters() ({name})")

    def __setattr__(self, name: str, value: object) -> None:
        refuse_weights(f"parameters() ({name})")


class ModelStandIn:
    """Has the attributes that a Trainer reads of its model; refuses all others of a model."""

    main_input_name = "input_ids"
    _modules = None  # Accelerate's unwrap_model then returns the stand-in
    _names: set[str]  # of the model's attributes
    _counts: dict[tuple[bool, bool], int]
    _generates: bool

    def __init__(self, model: Any, *, generates: bool = True) -> None:
        """Args: `model`: the model of the engine; no reference to it is kept."""
        if not hasattr(model, "named_modules"):
            refuse_weights("a copy")
        inner = without_wrapper(model)
        forward = partial(refuse_weights, "forward")
        forward.__signature__ = signature(inner.forward)  # type: ignore[attr-defined]
        names = {*dir(model), *dir(inner)}
        static = {name: getattr_static(inner, name, refuse_weights) for name in names}
        vars(self).update({n: v for n, v in static.items() if isinstance(v, _FACTS)})
        counts = {key: model.num_parameters(*key) for key in product((False, True), repeat=2)}
        vars(self).update(dtype=inner.dtype, name_or_path=inner.name_or_path, forward=forward)
        vars(self).update(training=True, _names=names, _counts=counts, _generates=generates)

    def open(self, engine: Engine, save: Callable[..., None], dropped: Callable[[], None]) -> None:
        """Stand for an engine's model from now on; `dropped` is called as `zero_grad`."""
        # A Trainer sets token ids in both: in a copy of config; in generation_config, for exports.
        vars(self).update(config=deepcopy(engine.config), zero_grad=lambda *_: dropped())
        vars(self).update(save_pretrained=save)
        if self._generates:
            vars(self).update(generation_config=engine.generation_config)

    def take_the_place_of(self, *models: Any) -> None:
        """Make models this stand-in: what reads or changes their own weights would go unheeded."""
        for model in models:
            object.__setattr__(model, "__class__", ModelStandIn)
            object.__setattr__(model, "__dict__", vars(self))

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        refuse_weights("forward")

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("_names", ()) and name[:2] != "__":
            refuse_weights(name)
        raise AttributeError(f"the model of a StreamedTrainer has no {name}; use trainer.engine")

    def __setattr__(self, name: str, value: object) -> None:
        refuse_weights(name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_weights("a copy")

    def train(self, mode: bool = True) -> "ModelStandIn":
        vars(self).update(training=mode)
        return self

    def eval(self) -> "ModelStandIn":
        return self.train(False)

    def parameters(self, recurse: bool = True) -> Iterator[StreamedParameter]:
        """Two stand-ins with counts: one for all trained weights, one for all others."""
        trained = self.num_parameters(only_trainable=True)
        yield StreamedParameter(trained, True)
        yield StreamedParameter(self.num_parameters() - trained, False)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        return self._counts[only_trainable, exclude_embeddings]

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Does nothing: the placement chooses which activations are recomputed."""

    activation_checkpointing_enable = gradient_checkpointing_enable


class Wrapped:
    """The stand-in as the Trainer's wrapped model, which Accelerate does not wrap again."""

    def __init__(self, model: ModelStandIn) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def open_model(model: Any, args: Any, options: dict[str, Any], *, scores: bool) -> Any:
    """The given model; or the model of a name, loaded together with its tokenizer.

    Args:
        args: its `model_init_kwargs` are used to load the model, but for `device_map`.
        options: the Trainer's; a `processing_class` may be added.
        scores: True if the model needs a head that scores rows.
    """
    kwargs = dict(getattr(args, "model_init_kwargs", None) or {})
    if options.get("quantization_config") or kwargs.pop("quantization_config", None):
        refuse("quantization_config", REFUSED["options"]["quantization_config"])
    if isinstance(model, transformers.PreTrainedModel) or is_peft_model(model):
        inner = without_wrapper(model)
        if has_adapter(model) and inner is model:
            refuse("a model with add_adapter", "give a PeftModel, or the base and peft_config")
        if not scores and task_of(inner) != "CAUSAL_LM":
            refuse(
                f"a {type(inner).__name__}",
                "a score of rows needs trl's RewardTrainer, and classes a run file "
                "(loss.name: sequence_classification or token_classification)",
            )
        if kwargs:
            refuse("args.model_init_kwargs", "load the model with them, and give the model")
        return model
    if isinstance(model, ModelStandIn):
        refuse("the model of another StreamedTrainer", "train() that one, or load what it saves")
    if not isinstance(model, str | Path):
        raise InputError("StreamedTrainer needs a transformers model, its hub id or folder")
    if adapter_folder(model) is not None:
        refuse("an adapter's folder", "give PeftModel.from_pretrained(..., is_trainable=True)")
    model = unpacked_folder(Path(model)) if is_gguf(model) else model
    kwargs.pop("device_map", None)
    trusted = getattr(args, "trust_remote_code", False)
    kwargs = {"dtype": "auto", "trust_remote_code": trusted} | kwargs
    named = {name: kwargs[name] for name in ("revision", "trust_remote_code") if name in kwargs}
    config = transformers.AutoConfig.from_pretrained(model, **named)
    multimodal = MULTIMODAL_CLASSES.get(config.model_type)
    if multimodal in (config.architectures or ()) and not scores:  # TRL loads its processor
        return getattr(transformers, str(multimodal)).from_pretrained(model, **kwargs)
    if options.get("processing_class") is None:
        options["processing_class"] = load_tokenizer(model, **named)
    if scores:
        transformers.set_seed(args.seed)  # a head that the files lack is random
        return transformers.AutoModelForSequenceClassification.from_pretrained(
            model, num_labels=1, **kwargs
        )
    return transformers.AutoModelForCausalLM.from_pretrained(model, **kwargs)


def without_dropout(model: Any) -> None:
    """Switch dropout off in configurations as well, as TRL's `disable_dropout` does in modules."""
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
