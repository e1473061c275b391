"""A model's structure, and its weights from where they are to their place."""

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.checkpoint import (
    Checkpoint,
    is_checkpoint,
    masters,
    offering_another,
    open_checkpoint,
    read_converted,
    read_tiles,
)
from megatrain.compat import peft
from megatrain.errors import InputError
from megatrain.json_yaml import read_json
from megatrain.model.adapters import adapted, draw_adapters, noted, plain, with_adapters
from megatrain.model.build import empty_model, load_config, loaded_types
from megatrain.model.companions import Companions, companions, set_generation
from megatrain.model.init import initialise
from megatrain.model.probe import spec
from megatrain.model.rebuilt import emptied
from megatrain.model.safetensors_io import read_header
from megatrain.model.spec import ModelSpec
from megatrain.model.unsupported import refuse_rounding
from megatrain.model.weights import read_weights, resolve_model, source_dtype, stored_types
from megatrain.optim import Rule
from megatrain.source.base import Base, packed_weights
from megatrain.source.state_io import (
    open_model,
    read_untrained,
    saved_companions,
    saved_dtype,
    saved_optimizer,
)
from megatrain.source.untrained import Untrained, computed_buffers, persistent_buffers
from megatrain.store import Store
from megatrain.telemetry.cores import update_threads

Write = Callable[[str, Tensor], None]


@dataclass
class Source:
    """A model's structure, and where its weights come from: one of the last three, or drawn.

    Attributes:
        dtype: of the weights, in which exports are written.
        resumes: the optimizer's state is that of `saved`, too.
        untrained: see there; `fill` puts in what comes from the source.
        companions: files of the folder or checkpoint that exports and checkpoints have as well.
        lost: what neither a checkpoint nor an export would have of the model; None: nothing.
        base: how frozen linear layers are kept; a checkpoint's own, where its state is taken.
        alike: what is drawn is drawn once for all layers that are alike.
        grows: adapters are put on a source that has none: they are drawn, or those of
            `adapter_folder`.
    """

    model: PreTrainedModel
    dtype: torch.dtype
    folder: Path | None = None
    given: PreTrainedModel | None = None
    saved: Checkpoint | None = None
    resumes: bool = False
    untrained: Untrained = field(default_factory=Untrained)
    companions: Companions = field(default_factory=dict)
    lost: str | None = None
    base: Base = "bf16"
    alike: bool = False
    grows: bool = False
    adapter_folder: Path | None = None

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


@dataclass(frozen=True)
class Resumed:
    """A checkpoint whose optimizer state is taken, too, so that training goes on from it."""

    checkpoint: Checkpoint


@dataclass(frozen=True)
class Alike:
    """A configuration whose layers may all be drawn the same: for measurements of large shapes."""

    config: PreTrainedConfig


def open_source(model: Any, *, adapter: Any = None, base: Base = "bf16", **how: Any) -> Source:
    """As `open_plain`, and also of a PeftModel.

    Args:
        adapter: a LoraConfig of PEFT, or its keys: what the model is trained with.

    Raises:
        InputError: as `open_plain`; PEFT refuses the adapter, or the model has one already.
    """
    if peft.is_peft_model(model):
        inner, configs, active = peft.unwrapped(model)
        source = open_plain(inner, **how)
        noted(source.model, configs, active)
    elif (folder := adapter_folder(model)) is not None:
        keys = read_json(folder / peft.CONFIG_FILE)
        config = peft.from_json(keys | {"inference_mode": False})  # to be trained
        source = _grown(open_plain(_base_of(config, folder), **how), config)
        source.adapter_folder = folder
        source.companions = {**source.companions, **companions(folder)}
    else:
        source = open_plain(model, **how)
    source.base = source.saved.settings.base if source.saved and source.resumes else base
    if adapter is None:
        return source
    if adapted(source.model) is not None or source.resumes:
        raise InputError("the model has an adapter already; leave adapter out, or merge it first")
    config = peft.lora_config(adapter) if isinstance(adapter, Mapping) else copy.copy(adapter)
    peft.check(config)
    if isinstance(model, str | Path | Checkpoint):
        model = model.folder if isinstance(model, Checkpoint) else model
        there = Path(model).expanduser()
        config.base_model_name_or_path = str(there.absolute() if there.exists() else model)
    return _grown(source, config)


def adapter_folder(model: Any) -> Path | None:
    """A folder of PEFT's, with an adapter alone; None: it is something else."""
    folder = Path(model).expanduser() if isinstance(model, str | Path) else None
    if folder is None or (folder / "config.json").exists():
        return None
    return folder if (folder / peft.CONFIG_FILE).is_file() else None


def _base_of(config: Any, folder: Path) -> str:
    if not config.base_model_name_or_path:
        raise InputError(
            f"{folder / peft.CONFIG_FILE}: names no base_model_name_or_path; put the base's folder "
            "or hub id there"
        )
    return str(config.base_model_name_or_path)


def _grown(source: Source, config: Any) -> Source:
    """The source with an adapter put on its model."""
    source.model, source.grows = with_adapters(source.model, {"default": config}), True
    names, buffers = source.names, source.untrained.buffers
    source.untrained.buffers = {names.get(n, n): b for n, b in buffers.items()}
    return source


def read_adapter(source: Source, write: Write) -> None:
    """Read the adapter of the source's folder, if it has one. Raises InputError: another's."""
    found = adapted(source.model)
    if source.adapter_folder is None or found is None:
        return
    path = source.adapter_folder / peft.WEIGHTS_FILE
    names = peft.file_names(source.model, found.active)
    shapes = {name: tuple(p.shape) for name, p in source.model.named_parameters()}
    stored = {each.name: each for each in read_header(path)}
    wanted = {name: shapes[own] for name, own in names.items()}
    if {name: each.shape for name, each in stored.items()} != wanted:
        raise InputError(f"{path}: its tensors are not those that {peft.CONFIG_FILE} makes")
    for name, mine in names.items():
        write(mine, stored[name].read())


def open_plain(
    model: PreTrainedModel | PreTrainedConfig | Alike | Checkpoint | Resumed | str | Path,
    *,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> Source:
    """Structure of a model given as a module, a configuration, a checkpoint, a folder or a hub id.

    Raises:
        InputError: it cannot be read or is not a causal language model.
    """
    resumes, alike = isinstance(model, Resumed), isinstance(model, Alike)
    model = model.config if isinstance(model, Alike) else model
    if isinstance(model, str | Path) and is_checkpoint(Path(model).expanduser()):
        model = open_checkpoint(Path(model).expanduser())
    if isinstance(model, Checkpoint | Resumed):
        saved = model.checkpoint if isinstance(model, Resumed) else model
        empty = open_model(
            saved, trust_remote_code=trust_remote_code, attn_implementation=attn_implementation
        )
        beside = saved_companions(saved)
        set_generation(empty, beside)
        return Source(empty, saved_dtype(saved), saved=saved, resumes=resumes, companions=beside)
    if isinstance(model, PreTrainedModel):
        empty = emptied(model, attn_implementation=attn_implementation)
        dtype = next(model.parameters()).dtype
        return Source(empty, dtype, given=model, untrained=_drawn_buffers(empty, dtype))
    folder, beside = None, dict[str, bytes]()
    if isinstance(model, PreTrainedConfig):
        config, dtype = model, getattr(model, "dtype", None) or torch.float32
    elif isinstance(model, str | Path):
        folder = resolve_model(model)
        config = load_config(folder, trust_remote_code=trust_remote_code)
        dtype, beside = source_dtype(folder), companions(folder)
    else:
        raise InputError(
            f"the model is a {type(model).__name__}; give a transformers model or configuration, "
            "a folder, or a hub id"
        )
    empty = empty_model(
        config, trust_remote_code=trust_remote_code, attn_implementation=attn_implementation
    )
    set_generation(empty, beside)
    untrained = _drawn_buffers(empty, dtype)
    return Source(empty, dtype, folder, untrained=untrained, companions=beside, alike=alike)


def structure(source: Source, *, trained: bool = True) -> ModelSpec:
    """What the engine has to know of a model that is `trained`, or only run.

    Raises:
        InputError: it cannot be streamed.
    """
    found = spec(source.model)
    frozen = [name for name, p in source.model.named_parameters() if not p.requires_grad]
    if still := [*frozen, *found.unused, *found.fixed]:
        types = _types(source)
        found.wide = {n for n in still if types.get(n, source.dtype) != torch.bfloat16}
    found.packed = packed_weights(found, source.base, frozen=not trained)
    return found


def _types(source: Source) -> dict[str, torch.dtype]:
    """In what each parameter comes; what is drawn has the dtype of the source."""
    names = source.names
    if source.saved is not None:
        others = source.saved.settings.frozen_dtypes
        return {
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


def fill(source: Source, found: ModelSpec, store: Store, seed: int) -> None:
    """Bring every weight and persistent buffer to its place: read, copied, or drawn.

    From a checkpoint, also the rest of a tile's state.

    Raises:
        InputError: float64 weights that a float32 master cannot hold, or weights that would be
            computed with in fewer bits than transformers keeps.
    """
    dtype = store.tiles[0].weights.data.dtype
    refuse_rounding(loaded_types(source.model, dtype), found.computed, dtype)
    write = _writer(store, source, threads=1)  # one of many readers at a time
    drawn = source.saved is None and source.folder is None and source.copied is None
    whole = adapted(source.model)
    base = None if whole is None else set(whole.held)

    def draw(only: Any = None) -> None:
        threads = update_threads()
        write = _writer(store, source, threads=threads)
        frozen = {entry.name: entry for _, entry in store.entries() if entry.group is None}

        def as_source(name: str, values: Tensor) -> Tensor:
            if name not in frozen:
                return values
            values, packed = values.to(source.dtype), frozen[name].packed
            return values if packed is None else packed.pack(values)

        named, alike = base if only is None else only, source.alike
        initialise(found, seed, write, named, threads=threads, kept=as_source, alike=alike)

    if source.saved is not None:
        with offering_another(source.saved.folder):
            if source.resumes:
                _read_state(source.saved, store)
            else:
                _read_masters(source.saved, write)
            rounded = source.untrained.rounded
            source.untrained = read_untrained(source.saved, source.model)
            source.untrained.rounded = rounded
    elif source.folder is not None:
        model = plain(source.model)
        missing = read_weights(source.folder, model, write, threads=update_threads())
        if missing:
            draw({source.names.get(name, name) for name in missing})
    elif source.copied is None:
        draw()
    else:
        for name, parameter in source.copied.named_parameters():
            write(name, parameter.detach().cpu())
        for name, buffer in persistent_buffers(source.copied).items():
            if not buffer.is_meta:
                write(name, buffer.detach().cpu().clone())
    read_adapter(source, write)
    if source.adapter_folder is None and whole is not None and (source.grows or drawn):
        read = {e.name: partial(tile.read_master, e) for tile, e in store.entries()}
        draw_adapters(source.model, read, write, seed)
    source.untrained.computed = computed_buffers(source.model)


def _read_state(checkpoint: Checkpoint, store: Store) -> None:
    """Weights and the optimizer's state, which is converted where the rule keeps it otherwise."""
    saved, rule, threads = saved_optimizer(checkpoint), store.rule, update_threads()
    if saved is None or rule is None or kept(saved) == kept(rule):
        read_tiles(checkpoint, store.tiles, threads)
    else:
        read_converted(checkpoint, store.tiles, threads, saved, rule)


def kept(rule: Rule) -> tuple[Any, ...]:
    """In which form a rule keeps masters and states."""
    return rule.state_planes, rule.remainder


def _read_masters(checkpoint: Checkpoint, write: Write) -> None:
    """Read the exact fp32 weights, whatever optimizer the checkpoint or the engine has."""
    values = masters(checkpoint)
    with ThreadPoolExecutor(update_threads(), thread_name_prefix="read-masters") as pool:
        list(pool.map(lambda name: write(name, values[name]()), values))


def _writer(store: Store, source: Source, *, threads: int) -> Write:
    places = {entry.name: (tile, entry) for tile, entry in store.entries()}
    buffers, untrained = dict(source.model.named_buffers()), source.untrained
    names = source.names

    def write(name: str, values: Tensor) -> None:
        name = names.get(name, name)
        if name not in places:
            untrained.buffers[name] = values
            buffers[name].copy_(values)
            return
        if values.dtype == torch.float64 and not torch.equal(values.float().double(), values):
            raise InputError(
                f"{name!r} has float64 values that a float32 master cannot hold; convert the "
                "weights to float32 first"
            )
        tile, entry = places[name]
        if entry.group is None:
            came = values.dtype if values.is_floating_point() else source.dtype
            untrained.dtypes[name] = came
            narrow = tile.remainder_of(entry) is None and tile.weights.data.dtype == torch.bfloat16
            untrained.rounded |= narrow and not entry.packed and came != torch.bfloat16
        tile.write_master(entry, values, threads)

    return write


def _drawn_buffers(model: PreTrainedModel, dtype: torch.dtype) -> Untrained:
    """Buffers as the class makes them in `dtype`; most are replaced when weights are read."""
    buffers = persistent_buffers(model)
    types = loaded_types(model, dtype) if buffers else {}
    return Untrained({n: b.to(types.get(n, b.dtype), copy=True) for n, b in buffers.items()})
