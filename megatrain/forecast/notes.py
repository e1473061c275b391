"""Measurements of a model, kept in the user's cache folder by its configuration and versions.

A plan then builds no model: it reads the model's outline and the works of its parts from a JSON
file. A file that is damaged, or of other versions, is replaced.
"""

import hashlib
import json
import os
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

import megatrain
from megatrain.base.json_yaml import read_json
from megatrain.base.whole_files import user_cache, write_file
from megatrain.compat.torch import children_of, parameters_of
from megatrain.errors import InputError
from megatrain.forecast.op_counter import Shape
from megatrain.model.capture import Capture, Ref
from megatrain.model.layer_template import LayerTemplate
from megatrain.model.media import of_media
from megatrain.model.spec import Layer, ModelSpec, Structure
from megatrain.telemetry.host import package_versions
from megatrain.tile.formats import PACKINGS

Value = TypeVar("Value")

_PACKAGES = ("torch", "transformers", "peft", "causal_conv1d", "mamba_ssm", "kernels",
             "flash_linear_attention")  # fmt: skip


class Once:
    """Remembers values by key."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key; `make` returns it the first time."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


class _Layer(NamedTuple):
    name: str
    kind: int  # index of the layer's kind in `Outline.examples`
    inputs: list[Ref]
    parameters: list[str]


@dataclass
class Outline:
    """A model's structure without its code, from which `spec` makes a `ModelSpec` for counting."""

    # for each parameter: the name, the sizes, and True if the parameter requires gradients
    parameters: list[tuple[str, tuple[int, ...], bool]]
    norms: list[str]  # names of the LayerNorm modules, which updates treat apart
    examples: list[list[Shape | None]]  # outputs of each kind of layer for a tiny batch
    routed: list[bool]  # True for kinds of layers that have routers
    layers: list[_Layer]
    packed: dict[str, str]  # names of packings by parameter
    structure: Structure

    @classmethod
    def of(cls, spec: ModelSpec) -> "Outline":
        model = spec.capture.model
        kinds = {id(layer.kind): layer.kind for layer in spec.layers}
        numbers = {kind: number for number, kind in enumerate(kinds)}
        layers: list[_Layer] = []
        for layer in spec.layers:
            names = [name for name, _ in layer.module.named_parameters()]
            layers.append(_Layer(layer.name, numbers[id(layer.kind)], layer.inputs, names))
        structure = {field.name: getattr(spec, field.name) for field in fields(Structure)}
        structure["wide_in_bf16"] = spec.in_fp32(torch.bfloat16)
        return cls(
            parameters=[(n, tuple(p.shape), p.requires_grad) for n, p in model.named_parameters()],
            norms=[name for name, m in model.named_modules() if isinstance(m, nn.LayerNorm)],
            examples=[
                [Shape.of(value) if torch.is_tensor(value) else None for value in kind.example]
                for kind in kinds.values()
            ],
            routed=[kind.routes for kind in kinds.values()],
            layers=layers,
            packed={name: packing.name for name, packing in spec.packed.items()},
            structure=Structure(**structure),
        )

    def spec(self, config: Any) -> ModelSpec:
        """The `ModelSpec` of this outline: its parameters can be counted, its parts cannot run."""
        parameters = {
            name: nn.Parameter(torch.empty(sizes, device="meta"), requires_grad=trained)
            for name, sizes, trained in self.parameters
        }
        model = _module_with(parameters)
        children_of(model).update(  # optimizers ask for the names of LayerNorms
            {name: nn.LayerNorm(0, elementwise_affine=False) for name in self.norms}
        )
        model.config = config
        capture = SimpleNamespace(model=model, is_media=of_media)
        kinds: list[LayerTemplate] = []
        for example, routes in zip(self.examples, self.routed, strict=True):
            outputs = [None if shape is None else shape.empty() for shape in example]
            kinds.append(LayerTemplate(nn.Module(), example=outputs, routes=routes))
        layers: list[Layer] = []
        for name, kind, inputs, names in self.layers:
            module = _module_with({n: parameters[f"{name}.{n}"] for n in names})
            layers.append(Layer(name, module, kinds[kind], inputs))
        return ModelSpec(
            capture=cast(Capture, capture),
            layers=layers,
            trunk=None,
            packed={name: PACKINGS[packing] for name, packing in self.packed.items()},
            **vars(self.structure),
        )


def _module_with(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module with these parameters, whose names may have dots."""
    module = nn.Module()
    parameters_of(module).update(parameters)
    return module


class Notes(Once):
    """Measurements of a model, in memory and in a file."""

    def __init__(self, opened: Callable[[], ModelSpec], key: Mapping[str, Any] | None = None):
        """Args: `key`: all that measurements depend on, beside versions; None: no file is kept."""
        super().__init__()
        self.opened = cache(opened)  # opens the model once: a `ModelSpec` whose code can run
        self._file: Path | None = None
        self._values: dict[str, Any] = {}
        self._has_new_values = False
        if key is None:
            return
        with suppress(TypeError):  # a key that JSON cannot write has no file
            text = json.dumps(key, sort_keys=True, default=sorted)  # sets are written sorted
            name = hashlib.sha256(text.encode()).hexdigest()[:16]
            self._file = user_cache("models") / f"{name}.json"
            self._record = {"key": json.loads(text), "versions": versions()}
        with suppress(InputError, OSError, KeyError, TypeError, AttributeError):
            record = read_json(cast(Path, self._file))
            trusted = cast(Path, self._file).stat().st_uid == os.getuid()
            if trusted and all(record[name] == self._record[name] for name in self._record):
                self._values = {**record["values"]}

    def noted(self, kind: type[Value], key: tuple, make: Callable[[], Value]) -> Value:
        """The value of a key, of type `kind`: from memory, from the file, or by `make`."""

        def read_or_made() -> Value:
            if self._file is None:
                return make()
            name = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
            codec = _codec(cast(Any, kind))
            with suppress(KeyError, TypeError, ValueError):
                return cast(Value, codec.validate_json(self._values[name]))
            new = make()
            self._values[name] = codec.dump_json(new).decode()
            self._has_new_values = True
            return new

        return self.once(key, read_or_made)

    def spec(self, config: Any) -> ModelSpec:
        """The model's `ModelSpec`: made of the outline in the file, or else opened, with code."""
        outline = self.noted(Outline, ("outline",), lambda: Outline.of(self.opened()))
        return self.opened() if self._has_new_values or self._file is None else outline.spec(config)

    def keep(self) -> None:
        """Write new measurements to the file; if that fails, the next plan measures again."""
        if self._file is None or not self._has_new_values:
            return
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._file, json.dumps(self._record | {"values": self._values}))
            self._has_new_values = False


@cache
def _codec(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


@cache
def versions() -> dict[str, str | None]:
    """The versions of all packages that measurements depend on; megatrain's by its files."""
    files = sorted(Path(megatrain.__file__).parent.rglob("*.py"))
    stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    ours = hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]
    return package_versions(_PACKAGES) | {"megatrain": ours}
