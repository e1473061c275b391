"""Which frozen weights are kept in fewer bytes than bf16 (`base` of an engine or a run file)."""

from typing import Literal

from torch import nn

from megatrain.errors import InputError
from megatrain.model.adapters import adapted
from megatrain.model.float8 import ROUTERS
from megatrain.model.spec import ModelSpec
from megatrain.tile.packed import BASES, WeightFormat

Base = Literal["bf16", "fp8", "nf4"]


def packed_weights(spec: ModelSpec, base: Base, *, frozen: bool = False) -> dict[str, WeightFormat]:
    """How the matrices of the layers' linear modules are kept that are not trained, by name.

    Routers and what is no nn.Linear are kept as they are, as are embeddings and heads.

    Args:
        frozen: nothing is trained, whatever requires gradients.

    Raises:
        InputError: there is no such matrix, or no such base.
    """
    if base == "bf16":
        return {}
    if base not in BASES:
        raise InputError(f"base is {base!r}; it must be bf16, {' or '.join(BASES)}")
    packing, found = BASES[base], adapted(spec.capture.model)
    held = None if found is None else found.held
    names = [
        f"{layer.name}.{path}.weight"
        for layer in spec.layers
        for path, module in layer.module.named_modules()
        if type(module) is nn.Linear
        and ROUTERS.isdisjoint(path.split("."))
        and packing.takes(module.weight.shape)
        and (frozen or not module.weight.requires_grad)
    ]
    if left := {name: packing for name in names if held is None or name in held}:
        return left
    raise InputError(
        f"base is {base!r}, but no linear module of the layers is frozen; give an adapter"
    )
