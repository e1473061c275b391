"""Random initialisation as the model class defines it, one layer at a time."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.model.outline import Outline


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
    the model's own choice.

    Args:
        seed: starts random numbers anew; called with the index of each part.
        write: takes each parameter's Hugging Face name and its CPU values.
        only: names to write; None for all.
    """
    model = outline.skeleton.model
    names = {id(p): name for name, p in model.named_parameters()}
    owners = _owners(model)
    wanted = None if only is None else set(only)
    for index, part in enumerate(_parts(model, outline)):
        shells = [
            (module, name, parameter)
            for module in part
            for name, parameter in module.named_parameters(recurse=False)
        ]
        if not shells or (wanted is not None and not wanted & {names[id(p)] for _, _, p in shells}):
            continue
        seed(index)
        _draw(part, shells, owners, device)
        for module, name, parameter in shells:
            full = names.get(id(parameter))
            if full is not None and (wanted is None or full in wanted):
                write(full, module._parameters[name].detach().cpu())  # type: ignore[union-attr]
            module._parameters[name] = parameter


def _parts(model: PreTrainedModel, outline: Outline) -> Iterator[list[nn.Module]]:
    """Modules drawn together, children before parents: each layer, then every other module."""
    inside: set[int] = set()
    for layer in outline.layers:
        members = list(_children_first(layer.module))
        inside.update(id(module) for module in members)
        yield members
    for module in _children_first(model):
        if id(module) not in inside:
            yield [module]


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _owners(model: PreTrainedModel) -> dict[int, PreTrainedModel]:
    """The innermost PreTrainedModel around each module: its `_init_weights` applies."""
    owners: dict[int, PreTrainedModel] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            owners.update((id(inner), module) for inner in module.modules())
    return owners


@torch.no_grad()
def _draw(
    part: list[nn.Module],
    shells: list[tuple[nn.Module, str, nn.Parameter]],
    owners: dict[int, PreTrainedModel],
    device: torch.device,
) -> None:
    made: dict[int, nn.Parameter] = {}
    for module, name, parameter in shells:
        if id(parameter) not in made:
            # Zeros, not whatever memory holds: a class may leave some of its parameters alone.
            values = torch.zeros(parameter.shape, device=device)
            made[id(parameter)] = nn.Parameter(values)
        module._parameters[name] = made[id(parameter)]
    for module in part:
        owners[id(module)]._init_weights(module)
