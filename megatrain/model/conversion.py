"""Between a checkpoint's tensors and a model's parameters: transformers' own conversions.

Checkpoints on the hub keep the names and layouts they were published with, for example one tensor
per expert where the model class has one per layer. transformers describes the way between the two
as renamings and converters (transformers.core_model_loading); here they are planned from names and
shapes alone and then run for one parameter at a time, so that no second copy of the model exists.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.compat.transformers import (
    WeightConverter,
    WeightRenaming,
    conversions_of,
    dot_natural_key,
    get_model_conversion_mapping,
    rename_source_key,
    revert_weight_conversion,
    set_conversions,
)
from megatrain.errors import InputError, RunFailed
from megatrain.model.safetensors_io import Described, Stored


@dataclass
class Recipe:
    """How one target, or several from one converter, come out of stored tensors."""

    target: str  # with a converter: the name its outputs are derived from
    converter: WeightConverter | None
    sources: list[tuple[str, Stored]]  # (the converter's pattern, tensor)

    @property
    def working_bytes(self) -> int:
        """Memory while the target is built; merging needs the pieces and the result at once."""
        stored = sum(stored.num_bytes for _, stored in self.sources)
        return stored if self.converter is None else 2 * stored

    def build(self, model: PreTrainedModel, load: Callable[[Stored], Tensor]) -> dict[str, Tensor]:
        """The finished tensors under the model's names; `load` gives a stored one's values."""
        if self.converter is None:
            return {self.target: load(self.sources[0][1])}
        converter = deepcopy(self.converter)  # it collects tensors, and may be run again
        for pattern, stored in self.sources:
            converter.add_tensor(self.target, stored.name, pattern, load(stored))
        built = converter.convert(self.target, model=model, config=model.config)
        return {name: _one(value).contiguous() for name, value in built.items()}


def plan_load(
    model: PreTrainedModel, stored: Mapping[str, Stored]
) -> tuple[list[Recipe], list[tuple[str, Stored]]]:
    """Match stored tensors with the model's names, as transformers' loading does.

    Leaves the conversions that were used in `model._weight_conversions`, where transformers keeps
    them to give the checkpoint its own layout back when it is saved.

    Returns:
        All recipes; tensors without a place in the model, each behind the name that it would have
        there; several may become one.

    Raises:
        InputError: a tensor means a parameter that another tensor already gives.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [x for x in conversions if isinstance(x, WeightRenaming)]
    converters = [x for x in conversions if isinstance(x, WeightConverter)]
    by_pattern = {pattern: x for x in converters for pattern in x.source_patterns}
    names = model.state_dict()
    prefix = model.base_model_prefix

    recipes: dict[str, Recipe] = {}
    unexpected: list[tuple[str, Stored]] = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, names)
        if target not in names and name in names:
            target, pattern = rename_source_key(name, [], [], prefix, names)
        if target not in names:
            unexpected.append((target, stored[name]))
        else:
            converter = None if pattern is None else by_pattern[pattern]
            recipe = recipes.setdefault(target, Recipe(target, converter, []))
            if recipe.sources and (converter is None or recipe.converter is None):
                raise InputError(
                    f"{stored[name].file}: {name!r} is stored again under another name"
                )
            recipe.sources.append((pattern or "", stored[name]))
    set_conversions(model, [conversion for conversion in conversions if conversion.was_used()])
    return list(recipes.values()), unexpected


@dataclass(frozen=True)
class ExportBatch:
    """Checkpoint tensors that are made together.

    Attributes:
        inputs: the model's names, as `revert_weight_conversion` takes them.
        dtype: of inputs and outputs.
        outputs: what comes out, in the order in which `convert` returns it.
        converted: False where the tensor is only renamed.
    """

    inputs: tuple[str, ...]
    dtype: torch.dtype
    outputs: tuple[Described, ...]
    converted: bool

    def convert(self, model: PreTrainedModel, values: dict[str, Tensor]) -> list[Tensor]:
        """The outputs' values, computed from the inputs' values."""
        if not self.converted:
            return list(values.values())
        converted = revert_weight_conversion(model, values)
        return [_one(converted[output.name]) for output in self.outputs]


def plan_export(model: PreTrainedModel, metas: Mapping[str, Tensor]) -> list[ExportBatch]:
    """How the model's tensors become those of a checkpoint in the layout it has on the hub.

    Args:
        model: tells the conversions.
        metas: a meta tensor of shape and dtype for each name that is to be saved.

    Raises:
        RunFailed: transformers' conversion cannot be done one parameter at a time.
    """
    whole = revert_weight_conversion(model, dict(metas))
    name_of = {id(meta): name for name, meta in metas.items()}
    batches = [
        ExportBatch((name_of[id(meta)],), meta.dtype, (_describe(name, meta),), converted=False)
        for name, meta in whole.items()
        if id(meta) in name_of
    ]
    renamed = {name for batch in batches for name in batch.inputs}
    remaining = {name: meta for name, meta in metas.items() if name not in renamed}
    for group in _groups(model, remaining):
        # Parameters that are merged share a dtype; the widest loses nothing.
        dtype = max((metas[name].dtype for name in group), key=lambda dtype: dtype.itemsize)
        values = {name: metas[name].to(dtype) for name in group}
        converted = revert_weight_conversion(model, values)
        outputs = tuple(_describe(name, _one(value)) for name, value in converted.items())
        batches.append(ExportBatch(group, dtype, outputs, converted=True))
    planned = sorted((output.name, output.shape) for batch in batches for output in batch.outputs)
    if planned != sorted((name, tuple(_one(meta).shape)) for name, meta in whole.items()):
        raise RunFailed(
            f"{type(model).__name__} cannot be exported layer by layer: transformers converts "
            "its weights all at once; save a checkpoint instead"
        )
    return batches


def _groups(model: PreTrainedModel, names: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Names that one converter takes together."""
    conversions = conversions_of(model)
    if conversions is None:  # transformers' rule for a model that was never loaded
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    converters = [
        conversion.reverse_transform()
        for conversion in reversed(conversions)
        if isinstance(conversion, WeightConverter)
    ]
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(names, key=dot_natural_key):
        matches = (converter.rename_source_key(name) for converter in converters)
        groups[next((to for to, pattern in matches if pattern is not None), name)].append(name)
    return [tuple(group) for group in groups.values()]


def _describe(name: str, meta: Tensor) -> Described:
    return Described(name, meta.dtype, tuple(meta.shape))


def _one(value: Tensor | list[Tensor]) -> Tensor:
    return value[0] if isinstance(value, list) else value
