"""A model's structure, and its weights from where they are to their place."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.base.json_yaml import read_json
from megatrain.checkpoint import Checkpoint, is_checkpoint, open_checkpoint
from megatrain.compat import peft
from megatrain.compat.transformers import MULTIMODAL_CLASSES, scores_rows
from megatrain.errors import InputError
from megatrain.model.adapters import adapted, noted, plain, with_new_adapter
from megatrain.model.build import empty_model, load_config, loaded_types, scoring
from megatrain.model.companions import Companions, companions, set_generation
from megatrain.model.probe import spec
from megatrain.model.quantised import quantised_base
from megatrain.model.rebuilt import emptied
from megatrain.model.routers import ask_for
from megatrain.model.spec import ModelSpec
from megatrain.model.weights import resolve_model, source_dtype, stored_packings, stored_types
from megatrain.source.base import Base, packed_weights
from megatrain.source.base_reference import (
    Origin,
    left_out_names,
    no_adapter,
    origin_of,
    place_of,
    say_if_changed,
    with_base,
)
from megatrain.source.buffers import Untrained, persistent_buffers
from megatrain.source.state_io import open_model, saved_companions, saved_dtype
from megatrain.tile.packed import PACKINGS, WeightFormat


@dataclass
class Source:
    """A model's structure, and where its weights come from: one of the last three, or drawn.

    Attributes:
        dtype: of the weights, in which exports are written.
        resumes: the optimizer's state is that of `saved`, too.
        untrained: see there; `fill` puts in what comes from the source.
        companions: files of the folder or checkpoint that exports and checkpoints have as well.
        origin: where the base of adapters was read; None: checkpoints have all of it.
        lost: what neither a checkpoint nor an export would have of the model; None: nothing.
        base: how frozen linear layers are kept; a checkpoint's own, where its state is taken.
        alike: what is drawn is drawn once for all layers that are alike.
        grows: adapters are put on a source that has none: they are drawn, or those of
            `adapter_folder`.
        structures: what `structure` has found, by whether the model is trained.
    """

    model: PreTrainedModel
    dtype: torch.dtype
    folder: Path | None = None
    given: PreTrainedModel | None = None
    saved: Checkpoint | None = None
    resumes: bool = False
    untrained: Untrained = field(default_factory=Untrained)
    companions: Companions = field(default_factory=dict)
    origin: Origin | None = None
    lost: str | None = None
    base: Base = "bf16"
    alike: bool = False
    grows: bool = False
    adapter_folder: Path | None = None
    structures: dict[bool, ModelSpec] = field(default_factory=dict)

    @property
    def copied(self) -> PreTrainedModel | None:
        """The given model, if it has weights; None: they are read, or drawn."""
        real = self.given is not None and not next(self.given.parameters()).is_meta
        return self.given if real else None

    @property
    def names(self) -> Mapping[str, str]:
        """The model's names of what the source calls otherwise."""
        found = adapted(self.model)
        return found.names if self.grows and found is not None else {}

    def check_base(self, *, merged: bool) -> None:
        """Warn of a base that is not as it was read, where an adapter alone is written."""
        if adapted(self.model) is not None and not merged:
            say_if_changed(
                self.origin,
                "the adapter belongs to the weights that were read: write it merged, or put them "
                "back",
            )


@dataclass(frozen=True)
class Resumed:
    """A checkpoint whose optimizer state is taken, too, so that training goes on from it."""

    checkpoint: Checkpoint


@dataclass(frozen=True)
class Alike:
    """A configuration whose layers may all be drawn the same: for measurements of large shapes."""

    config: PreTrainedConfig


Opens: TypeAlias = (
    PreTrainedModel | PreTrainedConfig | Alike | Checkpoint | Resumed | Source | str | Path
)
"""All kinds of values that an engine opens."""


def open_source(
    model: Any,
    adapter: Any = None,
    base: Base = "bf16",
    router_aux_loss_coef: float | None = None,
    base_model: str | Path | None = None,
    *,
    scores: bool = False,
    **how: Any,
) -> Source:
    """Open a model like `open_plain`, or one that has, or is given, an adapter.

    Args:
        model: as `open_plain` takes it, a PeftModel, the folder of an adapter, or a source, which
            is returned as it is.
        adapter: a LoraConfig of PEFT, or its keys: what the model is trained with.
        base: how frozen linear layers are kept.
        router_aux_loss_coef: of the routers' loss; None: as the model's configuration says.
        base_model: where the base of the model's adapter is, if not where that says.
        scores: as for `open_plain`; an adapter that has a sequence head asks for it itself.

    Raises:
        InputError: as `open_plain`; PEFT refuses the adapter, or the model has one already.
    """
    if isinstance(model, Source):
        return model
    if peft.is_peft_model(model):
        if base_model is not None:
            raise InputError("a PeftModel has its base in it; leave base_model out")
        inner, configs, active = peft.unwrapped(model)
        source = open_plain(inner, **how)
        noted(source.model, configs, active)
    elif (folder := adapter_folder(model)) is not None:
        config, base_path = folder_adapter(folder, base_model)
        source = open_plain(base_path, **how | {"scores": scores or peft.of_scores(config)})
        if adapted(source.model) is not None:
            raise _not_merged(folder, base_path)
        source = _grown(source, config)
        source.adapter_folder = folder
        source.companions = {**source.companions, **companions(folder)}
    else:
        source = open_plain(_with_base(model, base_model), scores=scores, **how)
    if router_aux_loss_coef is not None:
        ask_for(source.model, router_aux_loss_coef)
    if source.saved is not None and source.resumes:
        source.base = source.saved.settings.base
    elif source.base == "bf16":
        source.base = base
    elif base not in ("bf16", source.base):
        raise InputError(f"base is {base!r}, but the model comes in {source.base}; leave base out")
    if adapter is None:
        return source
    if adapted(source.model) is not None or source.resumes:
        raise InputError(
            "the model has an adapter already; leave adapter out to go on with that one, or merge "
            "it first: megatrain export MODEL OUT --merged"
        )
    return _grown(source, _asked_for(adapter, model, scores=scores_rows(source.model)))


def _asked_for(adapter: Any, model: Any, *, scores: bool) -> Any:
    """The configuration of an adapter to come, which names the model as its base."""
    config = peft.lora_config(adapter) if isinstance(adapter, Mapping) else copy.copy(adapter)
    peft.check(config)
    if isinstance(model, str | Path | Checkpoint):
        model = model.folder if isinstance(model, Checkpoint) else model
        there = Path(model).expanduser()
        config.base_model_name_or_path = str(there.absolute() if there.exists() else model)
    return peft.scoring(config) if scores else config


def adapter_folder(model: Any) -> Path | None:
    """A folder of PEFT's, with an adapter; None: it is something else."""
    folder = Path(model).expanduser() if isinstance(model, str | Path) else None
    return folder if folder is not None and (folder / peft.CONFIG_FILE).is_file() else None


def _with_base(model: Any, base_model: str | Path | None) -> Any:
    """A model as `open_plain` takes it, of a checkpoint with its base's place."""
    if base_model is None:
        return model
    model = _resolved(model)
    if isinstance(model, Resumed):
        return Resumed(with_base(model.checkpoint, base_model))
    if isinstance(model, Checkpoint):
        return with_base(model, base_model)
    raise no_adapter(model if isinstance(model, str | Path) else "the model")


def _resolved(model: Any) -> Any:
    """The checkpoint in a folder that is one; anything else as it is."""
    is_path = isinstance(model, str | Path)
    folder = Path(model).expanduser() if is_path else None
    return open_checkpoint(folder) if folder and is_checkpoint(folder) else model


def folder_adapter(folder: Path, base_model: str | Path | None = None) -> tuple[Any, str]:
    """The configuration of an adapter in a folder, to be trained, and its base's folder or hub id.

    Of a base on the hub of which it names a revision, the folder of that.

    Args:
        base_model: where the base is; None: where the configuration says.

    Raises:
        InputError: it cannot be read or followed, or names no base, itself, or another adapter.
    """
    config = peft.from_json(read_json(folder / peft.CONFIG_FILE) | {"inference_mode": False})
    if base_model is not None:
        config.base_model_name_or_path, config.revision = place_of(base_model)
    if not config.base_model_name_or_path:
        raise InputError(
            f"{folder / peft.CONFIG_FILE}: names no base_model_name_or_path; put the base's folder "
            "or hub id there"
        )
    if peft.is_base(folder, config):
        raise InputError(
            f"{folder}: has both a model and an adapter of it; move {peft.CONFIG_FILE} and "
            f"{peft.WEIGHTS_FILE} to a folder of their own, and name that or this one"
        )
    base = str(config.base_model_name_or_path)
    if config.revision is not None and not Path(base).expanduser().exists():
        base = str(resolve_model(base, config.revision))
    if adapter_folder(base) is not None:
        raise _not_merged(folder, base)
    return config, base


def _not_merged(folder: Path, base: str) -> InputError:
    return InputError(
        f"{folder / peft.CONFIG_FILE}: its base {base} has an adapter itself; merge that first: "
        f"megatrain export {base} OUT --merged"
    )


def _grown(source: Source, config: Any) -> Source:
    """The source with an adapter put on its model."""
    source.model, source.grows = with_new_adapter(source.model, config), True
    names, buffers = source.names, source.untrained.buffers
    source.untrained.buffers = {names.get(n, n): b for n, b in buffers.items()}
    return source


def open_plain(
    model: PreTrainedModel | PreTrainedConfig | Alike | Checkpoint | Resumed | str | Path,
    *,
    scores: bool = False,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> Source:
    """Structure of a model given as a module, a configuration, a checkpoint, a folder or a hub id.

    Args:
        scores: of a folder, hub id or configuration the model that gives a score of each row.

    Raises:
        InputError: it cannot be read or is not a causal language model.
    """
    resumes, alike = isinstance(model, Resumed), isinstance(model, Alike)
    model = _resolved(model.config if isinstance(model, Alike) else model)
    if isinstance(model, Checkpoint | Resumed):
        saved = model.checkpoint if isinstance(model, Resumed) else model
        empty = open_model(
            saved, trust_remote_code=trust_remote_code, attn_implementation=attn_implementation
        )
        beside = saved_companions(saved)
        set_generation(empty, beside)
        source = Source(empty, saved_dtype(saved), saved=saved, resumes=resumes, companions=beside)
        source.origin = origin_of(saved, resumes=resumes)
        return source
    if isinstance(model, PreTrainedModel):
        empty = emptied(model, attn_implementation=attn_implementation)
        dtype = next(model.parameters()).dtype
        return Source(empty, dtype, given=model, untrained=_drawn_buffers(empty, dtype))
    folder, beside, origin, quantised = None, dict[str, bytes](), None, None
    if isinstance(model, PreTrainedConfig):
        config, dtype = model, getattr(model, "dtype", None) or torch.float32
    elif isinstance(model, str | Path):
        folder = resolve_model(model)
        config = load_config(folder, trust_remote_code=trust_remote_code)
        quantised = quantised_base(read_json(folder / "config.json"), folder)
        vars(config).pop("quantization_config", None)  # exports are whole
        dtype, beside = source_dtype(folder), companions(folder)
        local = Path(model).expanduser().exists()
        origin = Origin(str(folder.absolute())) if local else Origin(str(model), folder.name)
    else:
        raise InputError(
            f"the model is a {type(model).__name__}; give a transformers model or configuration, "
            "a folder, or a hub id"
        )
    config = scoring(config) if scores else config
    empty = empty_model(
        config, trust_remote_code=trust_remote_code, attn_implementation=attn_implementation
    )
    if folder is not None and type(empty.config) is not type(config):
        raise InputError(
            f"{folder}: its configuration is of a {config.model_type}, and {type(empty).__name__} "
            "is a part of that alone: an export would lose the rest; let architectures in "
            f"config.json name {MULTIMODAL_CLASSES.get(config.model_type, 'the whole model')}"
        )
    set_generation(empty, beside)
    untrained = _drawn_buffers(empty, dtype)
    source = Source(empty, dtype, folder, untrained=untrained, companions=beside, alike=alike)
    source.origin, source.base = origin, quantised or "bf16"
    return source


def structure(source: Source, *, trained: bool = True) -> ModelSpec:
    """The spec of a model that is `trained`, or only run.

    Raises:
        InputError: it cannot be streamed.
    """
    if trained in source.structures:
        return source.structures[trained]
    found = spec(source.model, trained=trained)
    frozen = [name for name, p in source.model.named_parameters() if not p.requires_grad]
    if still := [*frozen, *found.unused, *found.fixed]:
        types = _types(source)
        found.wide = {n for n in still if types.get(n, source.dtype) != torch.bfloat16}
    found.packed = _packings(source, found, trained=trained)
    source.structures[trained] = found
    return found


def _packings(source: Source, spec: ModelSpec, *, trained: bool) -> dict[str, WeightFormat]:
    """How frozen weights are kept: as a checkpoint or folder has them, or else as is asked for."""
    saved = source.saved
    if saved is not None and source.resumes:
        left = saved.settings.left_out
        own = (each for tile in saved.manifest.tiles for each in tile.parameters)
        kept = {each.name: each.packed for each in own if each.packed}
        kept |= {} if left is None else left.packed
        return {name: PACKINGS[how] for name, how in kept.items()}
    if source.folder is None or not (there := stored_packings(source.folder, plain(source.model))):
        return packed_weights(spec, source.base, frozen=not trained)
    parameters, names = dict(source.model.named_parameters()), source.names
    packed = {names.get(name, name): how for name, how in there.items()}
    if taught := [n for n in packed if trained and parameters[n].requires_grad]:
        raise InputError(
            f"{source.folder}: the weights of {taught[0]!r} are quantised, and such are not "
            "trained; give an adapter, or take the unquantised model"
        )
    layers = (f"{v.name}.{n}" for v in spec.layers for n, _ in v.module.named_parameters())
    return {name: packed[name] for name in layers if name in packed}


def _types(source: Source) -> dict[str, torch.dtype]:
    """The dtype that each parameter comes in; that of the source where it is drawn."""
    names = source.names
    if source.saved is not None:
        others = source.saved.settings.frozen_dtypes
        away = left_out_names(source.saved, source.model).values()
        return {name: saved_dtype(source.saved, others.get(name)) for name in away} | {
            names.get(each.name, each.name): saved_dtype(source.saved, others.get(each.name))
            if each.group is None
            else torch.float32  # a master
            for tile in source.saved.manifest.tiles
            for each in tile.parameters
        }
    if source.folder is not None:
        stored = stored_types(source.folder, plain(source.model))
        return {names.get(name, name): dtype for name, dtype in stored.items()}
    if source.copied is None:
        return {}
    return {names.get(n, n): p.dtype for n, p in source.copied.named_parameters()}


def _drawn_buffers(model: PreTrainedModel, dtype: torch.dtype) -> Untrained:
    """Buffers as the class makes them in `dtype`; most are replaced when weights are read."""
    buffers = persistent_buffers(model)
    types = loaded_types(model, dtype) if buffers else {}
    return Untrained({n: b.to(types.get(n, b.dtype), copy=True) for n, b in buffers.items()})
