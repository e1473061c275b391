"""Random initialisation as the model class defines it, one layer at a time."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.model.outline import Outline

Owners = dict[int, PreTrainedModel]
Place = tuple[type[nn.Module], str]  # a parameter by its module's class and its name there


def initialise(
    outline: Outline,
    device: torch.device,
    seed: Callable[[int], None],
    write: Callable[[str, Tensor], None],
    only: Iterable[str] | None = None,
) -> None:
    """Draw every parameter by the class's own `_init_weights` and hand it to `write`.

    Values are drawn in fp32 on `device`, which then holds one layer at a time; they are a function
    of the seeding and the kind of device. Normal distribution, scaled projections and all else are
    the model's own choice; what `_init_weights` leaves alone is as the constructor makes it.

    Args:
        seed: starts random numbers anew; called with the index of each part.
        write: takes each parameter's Hugging Face name and its CPU values, once.
        only: names to write; None for all.
    """
    model = outline.skeleton.model
    paths = {id(module): path for path, module in model.named_modules()}
    wanted = {name for name, _ in model.named_parameters()}
    wanted &= wanted if only is None else set(only)
    owners, parts = _owners(model), list(_parts(model, outline))
    left: dict[str, Place] = {}
    for index, part in enumerate(parts):
        # A tied parameter belongs to the module that has it under its first name.
        shells = [
            (module, name, parameter, f"{paths[id(module)]}.{name}".lstrip("."))
            for module in part
            for name, parameter in module.named_parameters(recurse=False)
        ]
        if wanted.isdisjoint(full for *_, full in shells):
            continue
        seed(index)
        _draw(part, owners, device)
        for module, name, parameter, full in shells:
            values, module._parameters[name] = module._parameters[name], parameter
            assert values is not None
            # A minimum is NaN if anything is; `isnan` would take a byte for each value.
            if full in wanted and values.numel() and values.amin().isnan():
                left[full] = (type(module), name)
            elif full in wanted:
                write(full, values.detach().cpu())
    if left:
        seed(len(parts))
        made = dict(_constructed(model, set(left.values()), device).named_parameters())
        for full in left:
            write(full, made[full].detach().cpu())


def _parts(model: PreTrainedModel, outline: Outline) -> Iterator[list[nn.Module]]:
    """Modules drawn together, children before parents: each layer, then every other module.

    A module whose `_init_weights` reaches down into its children is drawn with all of them.
    """
    inside: set[int] = set()
    for layer in outline.layers:
        members = list(_children_first(layer.module))
        inside.update(id(module) for module in members)
        yield members
    others = [module for module in _children_first(model) if id(module) not in inside]
    together: set[int] = set()
    owners = _owners(model)
    for module in reversed(others):  # parents first
        below = [m for m in _children_first(module) if id(m) not in inside]
        if id(module) not in together and _reaches(module, below[:-1], owners):
            together.update(id(m) for m in below)
            yield below
    yield from ([module] for module in others if id(module) not in together)


@torch.no_grad()
def _reaches(module: nn.Module, below: list[nn.Module], owners: Owners) -> bool:
    """Whether initialising `module` writes to parameters of its descendants (tried on meta)."""
    parameters = [p for m in below for p in m.parameters(recurse=False)]
    before = [p._version for p in parameters]
    owners[id(module)]._init_weights(module)
    return before != [p._version for p in parameters]


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _owners(model: PreTrainedModel) -> Owners:
    """The innermost PreTrainedModel around each module: its `_init_weights` applies."""
    owners: Owners = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            owners.update((id(inner), module) for inner in module.modules())
    return owners


@torch.no_grad()
def _draw(part: list[nn.Module], owners: Owners, device: torch.device) -> None:
    """Give the modules of `part` real parameters; NaN is left where the class sets nothing."""
    for module in part:
        for name, parameter in list(module.named_parameters(recurse=False)):
            # Tied ones are drawn apart, as transformers ties them after it has initialised them.
            values = torch.full(parameter.shape, torch.nan, device=device, dtype=torch.float32)
            module._parameters[name] = nn.Parameter(values)
    for module in part:
        owners[id(module)]._init_weights(module)


def _constructed(
    model: PreTrainedModel, places: Collection[Place], device: torch.device
) -> PreTrainedModel:
    """A new model of the same class; only parameters at `places` have values, all others none."""
    with device, _without_values(places):
        return type(model)(copy.deepcopy(model.config))


@contextmanager
def _without_values(places: Collection[Place]) -> Iterator[None]:
    """Parameters registered within the block, but for those at `places`, go to the meta device."""
    register = nn.Module.register_parameter

    def selective(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and (type(module), name) not in places:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = selective  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
