"""Refuses trainers' classes, options and settings that would not be honoured."""

from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields
from inspect import Parameter, getattr_static, signature, unwrap
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatrain.base.json_yaml import read_yaml
from megatrain.base.shipped import shipped
from megatrain.errors import InputError

_LOSSES = str(shipped("docs/losses.md"))
_USES = read_yaml(Path(__file__).with_name("taken.yaml"))
NAMES = {
    kind: {use: frozenset(names.split()) for use, names in uses.items() if use != "refused"}
    for kind, uses in _USES.items()
}
"""Names of trainers' methods, attributes, arguments and options, by their use (taken.yaml)."""
REFUSED: dict[str, dict[str, str]] = {
    kind: {n: why.replace("docs/losses.md", _LOSSES) for n, why in uses.get("refused", {}).items()}
    for kind, uses in _USES.items()
}
"""What to do about each refused name, by kind."""

CLASSES = {"Trainer", "_BaseTrainer", "SFTTrainer", "DPOTrainer", "RewardTrainer"}

_SHORT = bool | int | float | str | None  # types of settings whose values an error shows
_REPLACED = "the engine takes its place and never calls it; leave it out"
_UNKNOWN = "this version of MegaTrain does not know it; leave it out"
_SET_BY_TRAINER = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id")


def refuse(name: str, reason: str) -> NoReturn:
    """Raises InputError: `name` would not be honoured."""
    raise InputError(f"StreamedTrainer cannot heed {name}: {reason}")


def check_class(kind: type, mixed_in: type) -> None:
    """Raises InputError: the trainer's class cannot be supported.

    The class derives from another trainer of transformers or TRL, or a subclass or patch overrides
    a method that decides a step. Args: `mixed_in`: `StreamedTrainer`, which may override all.
    """
    library = _library(kind)
    trainers = [c for c in library if any(base.__name__ == "Trainer" for base in c.__mro__)]
    trainer = next((c for c in trainers if c.__name__ not in CLASSES), None)
    if trainer is not None or not library:
        page = shipped("docs/losses.md")
        remedy = f"take Trainer, SFTTrainer, DPOTrainer or RewardTrainer; others: {page}"
        refuse((trainer or kind).__name__, remedy)
    for name in decisive_methods(kind):
        owner = next(c for c in kind.__mro__ if c is not mixed_in and name in vars(c))
        method = vars(owner)[name]
        made_in = getattr(unwrap(method) if callable(method) else method, "__module__", None)
        if not _of_library(made_in or owner.__module__):
            remedy = _REPLACED if name in NAMES["methods"]["replaced"] else _UNKNOWN
            refuse(f"{owner.__name__}.{name}", REFUSED["methods"].get(name, remedy))


def decisive_methods(kind: type) -> tuple[str, ...]:
    """The names of a library's trainer that no subclass or patch may override."""
    names = {name for owner in _library(kind) for name in vars(owner)}
    names -= NAMES["methods"]["heeded"] | NAMES["methods"]["no_meaning"]
    return tuple(sorted(name for name in names if not name.startswith("__")))


def by_name(
    made_by: Callable[..., None], arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A trainer's arguments after the model, turned into options by their names in `made_by`."""
    parameters = signature(made_by).parameters
    if any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters.values()):
        return arguments, options
    names = [*parameters][1:]  # the first is the model
    return (), dict(zip(names, arguments, strict=False)) | options


def check_options(kind: type, options: dict[str, Any]) -> None:
    """Raises InputError: a trainer gets an option that is not honoured."""
    names = {name for owner in _library(kind) for name in signature(owner.__init__).parameters}  # type: ignore[misc]
    for name in sorted(names - NAMES["options"]["heeded"] - {"self", "model"}):
        if options.get(name) not in (None, (None, None)):
            refuse(name, REFUSED["options"].get(name, _UNKNOWN))


def check_arguments(args: Any) -> None:
    """Raises InputError: an argument is set that is not honoured, or is unknown."""
    library = next((c for c in type(args).__mro__ if _of_library(c.__module__)), None)
    if library is None:
        return
    listed = frozenset[str]().union(*NAMES["arguments"].values())
    for field in fields(library):
        factory = field.default_factory
        default = field.default if factory is MISSING else factory()
        value: Any = getattr(args, field.name, default)
        is_empty = value is None or value is False or (hasattr(value, "__len__") and not len(value))
        is_unset = value == default or (is_empty and not default)
        is_bf16 = field.name == "bf16_full_eval" and args.bf16
        if not (field.name in listed or is_unset or is_bf16):
            refuse(f"args.{field.name}", REFUSED["arguments"].get(field.name, _UNKNOWN))


def check_unchanged(trainer: Any, mixed_in: type, settings: dict[str, Any]) -> None:
    """Raises InputError: the trainer's class or one of its `settings` (`decisive`) has changed."""
    check_class(type(trainer), mixed_in)
    _check_accelerator(trainer.accelerator)
    if torch.is_autocast_enabled(trainer.args.device.type):
        refuse("torch.autocast around the trainer", "set args.bf16")
    for name, value in decisive(trainer).items():
        old = settings.get(name)
        if value is not old and value != old:
            are_short = isinstance(old, _SHORT) and isinstance(value, _SHORT)
            shown = f" (it was {old!r}, and is {value!r})" if are_short else ""
            refuse(f"{name}, changed since the trainer was made{shown}", "make another trainer")


def decisive(trainer: Any) -> dict[str, Any]:
    """Copies of the settings that decide a trainer's steps, by name."""
    values = vars(trainer)
    argument_names = NAMES["arguments"]["fixed"] | REFUSED["arguments"].keys()
    args = {f"args.{name}": getattr(trainer.args, name, None) for name in sorted(argument_names)}
    fixed = sorted(NAMES["attributes"]["fixed"])
    attributes = {name: values[name] for name in fixed if name in values}
    # methods that this trainer alone has, set on the object
    methods = {name: values[name] for name in decisive_methods(type(trainer)) if name in values}
    config = trainer.model.config.get_text_config(decoder=True).to_dict()
    model = {f"model.config.{n}": value for n, value in config.items() if n not in _SET_BY_TRAINER}
    all_settings = args | attributes | methods | model | {"engine_options": trainer.engine_options}
    accumulation = "accelerator.gradient_accumulation_steps"
    all_settings[accumulation] = trainer.accelerator.gradient_accumulation_steps
    return {n: copy(v) if isinstance(v, list | dict) else v for n, v in all_settings.items()}


def _check_accelerator(accelerator: Any) -> None:
    """Raises InputError: a method of the accelerator, or of its class, has been replaced."""
    for name in dir(type(accelerator)):
        method = getattr_static(accelerator, name)
        if name[0] == "_" or not callable(method):
            continue
        if not _of_library(getattr(unwrap(method), "__module__", None) or ""):
            refuse(f"accelerator.{name}, replaced", _REPLACED)


def _library(kind: type) -> list[type]:
    """The base classes of a trainer that are transformers' or TRL's."""
    return [owner for owner in kind.__mro__ if _of_library(owner.__module__)]


def _of_library(module: str) -> bool:
    return module.partition(".")[0] in ("transformers", "trl", "accelerate")
