"""Random initialisation by the model's class, one layer at a time."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.base.seeds import derived_seed
from megatrain.compat.torch import TorchDispatchMode, parameters_of, version_of
from megatrain.compat.transformers import initialise as initialise_module
from megatrain.errors import InputError
from megatrain.model.spec import ModelSpec

Owners = dict[int, PreTrainedModel]

# Values for which one generator makes random numbers: 32 MiB, 40 ms of a core.
_PIECE = 1 << 23

# The most pieces of a part (of 2**39 values). torch's generator takes 32 bits of a seed.
_PART_SEEDS = 1 << 16

_DRAWING = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


def initialise(
    spec: ModelSpec,
    seed: int,
    write: Callable[[str, Tensor], None],
    only: Iterable[str],
    *,
    threads: int,
    convert: Callable[[str, Tensor], Tensor] = lambda _, values: values,
    alike: bool = False,
) -> None:
    """Initialise every parameter by the class's own `_init_weights`, and pass it to `write`.

    Values are made in fp32 in host memory, one layer at a time, and depend neither on the device
    nor on the number of `threads`. torch's default generator is seeded.

    Args:
        write: takes each parameter's name and its values, once.
        only: names to write; others, such as those of buffers, are passed over.
        convert: `write` gets `convert(name, values)` in place of the values.
        alike: for measurements: a layer like the one before gets that layer's values.

    Raises InputError: `_init_weights` does not set a parameter; only its constructor does.
    """
    model = spec.capture.model
    paths = {id(module): path for path, module in model.named_modules()}
    names = {name for name, _ in model.named_parameters()}.intersection(only)
    owners = _owners(model)
    drawn_kinds: list[Any] = []  # module classes, names and shapes of the parameters of `values`
    values: list[Tensor | None] = []
    for index, part in enumerate(list(_parts(model, spec))):
        # A tied parameter belongs to the module that has it under its first name.
        shells = [
            _Shell(module, name, parameter, f"{paths[id(module)]}.{name}".lstrip("."))
            for module in part
            for name, parameter in module.named_parameters(recurse=False)
        ]
        if names.isdisjoint(shell.full_name for shell in shells):
            continue
        kinds = [(type(shell.module), shell.name, shell.parameter.shape) for shell in shells]
        if not alike or kinds != drawn_kinds:
            drawn_kinds = kinds
            values.clear()
            torch.default_generator.manual_seed(derived_seed(seed, index))
            first_seed = derived_seed(seed) + index * _PART_SEEDS
            with ThreadPoolExecutor(threads) as pool, _InPieces(pool, first_seed):
                _draw(part, owners)
            values += (shell.put_back(convert) for shell in shells)
        for shell, drawn in zip(shells, values, strict=True):
            if shell.full_name not in names:
                continue
            if drawn is None:
                raise InputError(
                    f"the _init_weights of a {type(model).__name__} does not set "
                    f"{shell.full_name}; give the model's folder, or a model in memory "
                    "(AutoModelForCausalLM.from_config)"
                )
            write(shell.full_name, drawn)


class _Shell(NamedTuple):
    """A parameter without values, its module and its names there and in the model."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    full_name: str

    def put_back(self, convert: Callable[[str, Tensor], Tensor]) -> Tensor | None:
        """Put the parameter back in place of its drawn values.

        Returns `convert(full_name, values)`; None: `_init_weights` has not set all values.
        """
        parameters = parameters_of(self.module)
        values = parameters[self.name]
        parameters[self.name] = self.parameter
        assert values is not None
        # The minimum is NaN if any value is; `isnan` would take a byte for each value.
        is_unset = values.numel() and values.amin().isnan()
        return None if is_unset else convert(self.full_name, values.detach())


def most_drawn_at_once(spec: ModelSpec) -> int:
    """The number of values in the largest part, which `initialise` has in memory at once."""
    return max(
        sum(p.numel() for module in part for p in module.parameters(recurse=False))
        for part in _parts(spec.capture.model, spec)
    )


class _InPieces(TorchDispatchMode):
    """Fills large tensors with random numbers in many threads, each piece by its own generator."""

    def __init__(self, pool: ThreadPoolExecutor, seed: int) -> None:
        super().__init__()
        self._pool, self._seeds = pool, count(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _DRAWING or args[0].numel() <= _PIECE or not args[0].is_contiguous():
            return func(*args, **kwargs)

        def draw(piece: Tensor, seed: int) -> None:
            generator = torch.Generator().manual_seed(seed & (2**32 - 1))
            func(piece, *args[1:], **kwargs | {"generator": generator})

        list(self._pool.map(draw, args[0].detach().view(-1).split(_PIECE), self._seeds))
        return args[0]


def _parts(model: PreTrainedModel, spec: ModelSpec) -> Iterator[list[nn.Module]]:
    """Modules to initialise together, children first: each layer, then every other module."""
    in_layers: set[int] = set()
    for layer in spec.layers:
        members = list(_children_first(layer.module))
        in_layers.update(id(module) for module in members)
        yield members
    outer = [module for module in _children_first(model) if id(module) not in in_layers]
    together: set[int] = set()  # modules initialised with the module around them
    owners = _owners(model)
    for module in reversed(outer):  # parents first
        if id(module) in together:
            continue
        members = [m for m in _children_first(module) if id(m) not in in_layers]
        parameters = [p for m in members[:-1] for p in m.parameters(recurse=False)]
        versions = [version_of(p) for p in parameters]
        with torch.no_grad():
            initialise_module(owners[id(module)], module)  # on the meta device, to try
        if versions != [version_of(p) for p in parameters]:  # it writes to inner parameters
            together.update(id(m) for m in members)
            yield members
    yield from ([module] for module in outer if id(module) not in together)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _owners(model: PreTrainedModel) -> Owners:
    """The innermost PreTrainedModel around each module, whose `_init_weights` applies to it."""
    owners: Owners = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            owners.update((id(inner), module) for inner in module.modules())
    return owners


@torch.no_grad()
def _draw(part: list[nn.Module], owners: Owners) -> None:
    """Initialise modules with new parameters; NaN stays where the class sets nothing."""
    for module in part:
        for name, parameter in list(module.named_parameters(recurse=False)):
            # Tied parameters get values of their own: transformers ties them afterwards.
            values = torch.full(parameter.shape, torch.nan, dtype=torch.float32)
            parameters_of(module)[name] = nn.Parameter(values)
    for module in part:
        initialise_module(owners[id(module)], module)
