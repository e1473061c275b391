"""Describes all of a module but its weights by values that can be compared.

Two layers with equal signatures compute the same function of their weights and buffers. Objects
that cannot be proven equal differ: one of an unknown type is equal to itself alone.
"""

import enum
import functools
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.compat.torch import buffers_of, children_of, parameters_of, version_of

# transformers numbers its layers for the key-value cache, which training does not use. Kinds of
# layers ignore the number unless the layer's forward reads it, which `probe` tries.
INDEX_ATTRIBUTES = ("layer_idx", "layer_id")

_VALUES = (int, str, bool, bytes, type(None))
_ATOMS: tuple[type, ...] = (type, ModuleType, CodeType, BuiltinFunctionType, enum.Enum)
_ATOMS += (torch.dtype, torch.device, logging.Logger)
_CONTAINERS = (list, tuple, torch.Size, dict, OrderedDict, set, frozenset)
_LIBRARIES = ("torch", "transformers", "peft", "megatrain")  # keep no state in functions' globals
_SMALL = 1 << 16  # tensors of no more values are compared by value
_HEAP_TYPE = 1 << 9  # the flag of a class made by Python code (Py_TPFLAGS_HEAPTYPE)


@dataclass(frozen=True, eq=False)
class Is:
    """Compares an object by identity, and keeps it alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Is) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Reader:
    """Describes objects, and all that they hold, by values that can be compared."""

    def __init__(
        self, root: nn.Module, *, left_out: Collection[str] = (), by_identity: bool = False
    ) -> None:
        """A reader of the module `root`.

        Args:
            left_out: names of modules' attributes to ignore.
            by_identity: True: another object in the place of an equal one is a difference.
        """
        from megatrain.compat.transformers import MODULE_MARKS

        self._left_out = {*vars(nn.Module()), *MODULE_MARKS, *left_out}
        self._by_identity = by_identity
        self._registered = {id(parameter) for parameter in root.parameters()}
        self._seen: dict[int, tuple[int, Any]] = {}
        self.strays: list[Tensor] = []  # weights in objects that no module of `root` has registered
        self.reads_dictionaries = False  # True if a function reads attributes by way of `__dict__`

    def of(self, value: Any) -> Any:
        """A value that describes an object: equal descriptions mean equal objects."""
        kind = type(value)
        if kind in _VALUES:
            return kind, value
        if kind in (float, complex):
            return kind, repr(value)  # -0.0 is not 0.0 here
        if isinstance(value, _ATOMS):
            return Is(value)
        if isinstance(value, nn.Parameter):
            self.strays.append(value)
        if isinstance(value, Tensor) and self._by_identity:
            return Is(value), None if value.is_inference() else version_of(value)
        if isinstance(value, Tensor):
            return value_of(value)
        return self._met(value) or (kind, self._inside(value))

    def _met(self, value: Any) -> Any:
        """The description of an object that has been met before; None: the object is new."""
        if id(value) not in self._seen:
            self._seen[id(value)] = len(self._seen), value
            return None
        return Is(value) if self._by_identity else ("again", self._seen[id(value)][0])

    def _inside(self, value: Any) -> Any:
        """A description of all that an object holds."""
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, functools.partial):
            return tuple(map(self.of, (value.func, value.args, value.keywords, vars(value))))
        builtin = {base for base in type(value).__mro__ if not base.__flags__ & _HEAP_TYPE}
        if not builtin <= {object, *_CONTAINERS}:
            return Is(value)  # an extension's object may have state that Python cannot see
        names: list[str] = []
        for base in type(value).__mro__:
            slots = vars(base).get("__slots__", ())
            names += [slots] if isinstance(slots, str) else slots
        attributes = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return self._items(value), self._named(attributes | getattr(value, "__dict__", {}))

    def _items(self, value: Any) -> Any:
        if isinstance(value, dict):
            return tuple((self.of(key), self.of(item)) for key, item in value.items())
        if isinstance(value, (set, frozenset)):
            return frozenset(map(self.of, value))
        return tuple(map(self.of, value)) if isinstance(value, (list, tuple)) else None

    def _named(self, values: dict[str, Any]) -> tuple:
        return tuple((name, self.of(values[name])) for name in sorted(values))

    def _function(self, function: FunctionType) -> tuple:
        """A description of a function's code, and of the state that the code may read."""
        cells = function.__closure__ or ()
        is_of_library = (function.__module__ or "").split(".")[0] in _LIBRARIES
        names = () if is_of_library else _names(function.__code__)
        self.reads_dictionaries |= not {"__dict__", "vars"}.isdisjoint(names)
        state = {n: v for n in names if _may_be_state(v := function.__globals__.get(n))}
        return (
            Is(function.__code__),
            Is(function.__globals__),
            self._named(state),
            self.of(function.__defaults__),
            self.of(function.__kwdefaults__),
            tuple(None if cell == CellType() else self.of(cell.cell_contents) for cell in cells),
            self._named({k: v for k, v in vars(function).items() if k != "__wrapped__"}),
        )

    def _module(self, module: nn.Module) -> tuple:
        for parameter in parameters_of(module).values():
            if parameter is not None and id(parameter) not in self._registered:
                self.strays.append(parameter)
        # Templates get each layer's weights and buffers: values do not count, but shapes and ties.
        weights: list[Any] = []
        for name, tensor in [*parameters_of(module).items(), *buffers_of(module).items()]:
            description = None
            if tensor is not None:
                unvalued = type(tensor), tuple(tensor.shape), tensor.requires_grad
                description = self._met(tensor) or unvalued
            weights.append((name, description))
        children = tuple((name, self.of(child)) for name, child in children_of(module).items())
        return tuple(self.attributes(module)), tuple(weights), children

    def attributes(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """Descriptions of a module's plain attributes, by name, and of those of a user's class."""
        self._met(module)
        for name in sorted(vars(module).keys() - self._left_out):
            yield name, self.of(vars(module)[name])
        for cls in type(module).__mro__:
            if cls.__module__.split(".")[0] in (*_LIBRARIES, "builtins", "abc", "typing"):
                continue
            of_class = {
                name: value
                for name, value in vars(cls).items()
                if (name[:2] != "__" or name == "__call__")
                and (_may_be_state(value) or isinstance(value, FunctionType))
            }
            yield cls.__qualname__, self._named(of_class)


def value_of(tensor: Tensor) -> Any:
    """A tensor's dtype, shape and values; the identity of a large one."""
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
    is_small = is_plain and tensor.numel() <= _SMALL
    if not (tensor.is_meta or is_small):
        return Is(tensor)
    flat = tensor.detach().contiguous().view(-1)
    data = b"" if tensor.is_meta else bytes(flat.cpu().view(torch.uint8).tolist())
    return tensor.dtype, tuple(tensor.shape), tensor.device, tensor.requires_grad, data


def _may_be_state(value: Any) -> bool:
    kinds = {*_VALUES, float, *_CONTAINERS, Tensor} - {type(None)}
    return type(value) in kinds or isinstance(value, nn.Module)


def _names(code: CodeType) -> set[str]:
    """The names of globals and attributes that code uses, inner functions included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*map(_names, inner))
