"""Opens a model for an engine: its structure, its tiles, and the place of its weights."""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.base.json_yaml import read_json
from megatrain.base.units import size
from megatrain.checkpoint.manifest import Checkpoint, is_checkpoint, open_checkpoint
from megatrain.compat import peft
from megatrain.compat import transformers as hf
from megatrain.compat.gguf import is_gguf
from megatrain.device import Recording
from megatrain.device.disk import PlaneFile, disk_bytes
from megatrain.errors import DoesNotFit, InputError
from megatrain.loss import ClassHead
from megatrain.model import build
from megatrain.model.adapters import adapted, note_adapter, plain, with_new_adapter
from megatrain.model.companions import Companions, companions, sentence_files, set_generation
from megatrain.model.float8 import ROUTERS, require_torchao
from megatrain.model.probe import spec
from megatrain.model.quantised import kept_format, quantisation, quantised_base, stays_whole
from megatrain.model.rebuilt import difference, emptied
from megatrain.model.routers import NOT_ASKED, set_router_losses
from megatrain.model.safetensors_io import read_header
from megatrain.model.spec import ModelSpec
from megatrain.model.trained import Trained
from megatrain.model.weights import WeightPlan, resolve_model, source_dtype
from megatrain.optim import Rule
from megatrain.parallel.distributed import ALONE, Ranks
from megatrain.placement import Precision, Verify
from megatrain.source import state_io
from megatrain.source.tiles import DTYPES, Model
from megatrain.tile import formats
from megatrain.tile.formats import BASES, WeightFormat

_log = logging.getLogger(__name__)

Base = Literal["bf16", "fp8", "nf4", "folder"]
"""The format of frozen linear layers (`base` of an engine or a run file)."""

_FORMATS = {"nf4": (formats.NF4, formats.NF4_WIDE), "fp8": (formats.FP8,)}
_FORMATS["folder"] = (*_FORMATS["nf4"], *_FORMATS["fp8"], formats.BLOCKS, formats.MXFP4)


@dataclass
class Source:
    """A model without its weights, and the place of the weights.

    Weights are in a `folder`, a `saved` checkpoint or a model `in_memory`, or are initialised.
    """

    model: PreTrainedModel
    dtype: torch.dtype  # of the weights, in which exports are written
    folder: Path | None = None
    in_memory: PreTrainedModel | None = None
    saved: Checkpoint | None = None
    resumes: bool = False  # True if the optimizer's state is taken from `saved` as well
    # tensors of the source that no step changes
    untrained: state_io.Untrained = field(default_factory=state_io.Untrained)
    # files of the folder or checkpoint that are copied to exports and checkpoints
    companions: Companions = field(default_factory=dict)
    # the place of an adapter's base, for checkpoints to refer to; None: they save it all
    origin: state_io.Origin | None = None
    # a message about parts of the model that no checkpoint or export has; None: no part
    lost: str | None = None
    base: Base = "bf16"  # the format of frozen linear layers; with `resumes` that of the checkpoint
    alike: bool = False  # True if all layers of a kind may have the same random weights
    # True if the source has no adapter and the model gets one, randomly initialised or of
    # `adapter_folder`
    grows: bool = False
    adapter_folder: Path | None = None
    # raises InputError if the base of a run's finished adapter has changed
    require_base: Callable[[], None] = lambda: None
    # results of `structure`, by its argument `trained`
    structures: dict[bool, ModelSpec] = field(default_factory=dict)

    @property
    def stored(self) -> Path | Checkpoint | None:
        """The files with the weights; None: they are in memory, or randomly initialised."""
        return self.saved or self.folder

    @property
    def copied_model(self) -> PreTrainedModel | None:
        """The model whose weights are copied; None: they are read, or randomly initialised."""
        model = self.in_memory
        return None if model is None or next(model.parameters()).is_meta else model

    @property
    def names(self) -> Mapping[str, str]:
        """Names in the source -> names in the model, of parameters where the two differ."""
        adapters = adapted(self.model)
        return adapters.names if self.grows and adapters is not None else {}


@dataclass(frozen=True)
class Alike:
    """A configuration whose layers may all get the same weights, to measure large shapes."""

    config: PreTrainedConfig


Opens: TypeAlias = PreTrainedModel | PreTrainedConfig | Alike | Checkpoint | Source | str | Path
"""All types of values that an engine opens."""


def open_source(
    model: Any,
    adapter: Any = None,
    base: Base = "bf16",
    routers: Mapping[str, float | None] = NOT_ASKED,
    *,
    resumes: bool = False,
    head: ClassHead | None = None,
    **code: Any,
) -> Source:
    """Open a model: its structure, and the place of its weights.

    Args:
        model: a module, a configuration, a checkpoint, a folder or a hub id of a causal language
            model; a PeftModel, the folder of an adapter; or a source, which is returned as it is.
        adapter: a LoraConfig of PEFT, or its keys: the adapter to train.
        base: the format of frozen linear layers.
        routers: settings of a mixture's routers, see `set_router_losses`.
        resumes: take a checkpoint's optimizer state as well, to continue its training.
        head: the head of a folder, hub id or configuration, in place of its own; an adapter's
            folder with a head implies it.
        code: trust_remote_code and attn_implementation, as for `empty_model`.
    """
    if isinstance(model, Source):
        return model
    if peft.has_adapter(model):
        inner, config, name = peft.unwrapped(model)
        source = _open_plain(inner, **code)
        note_adapter(source.model, config, name)
    elif (folder := adapter_folder(model)) is not None:
        config, base_path = folder_adapter(folder)
        source = _open_plain(base_path, head=head or _head_of(folder, config), **code)
        if adapted(source.model) is not None:
            raise _not_merged(folder, base_path)
        source.companions = {**source.companions, **companions(folder)}
        set_generation(source.model, source.companions)
        source = _add_adapter(source, config)
        source.adapter_folder = folder
        source.require_base = partial(state_io.require_base_of, folder, base_path, **code)
    else:
        source = _open_plain(model, resumes=resumes, head=head, **code)
    if head is not None and head.pooling is not None:
        width = source.model.config.get_text_config(decoder=True).hidden_size
        files = sentence_files(source.companions, width, head.pooling)
        source.companions = {**source.companions, **files}
    set_router_losses(source.model, routers)
    set_router_losses(plain(source.model), routers)  # the model of merged exports
    if source.base == "bf16" and not source.resumes:
        source.base = base
    elif base not in ("bf16", "folder", source.base):
        raise InputError(f"base is {base!r}, but the model comes in {source.base}; leave base out")
    if adapter is None:
        return source
    if adapted(source.model) is not None or source.resumes:
        raise InputError(
            "the model has an adapter already; leave adapter out to go on with that one, or merge "
            "it first: megatrain export MODEL OUT --merged"
        )
    config = _new_adapter_config(adapter, model, source.model)
    return _add_adapter(source, config)


def _new_adapter_config(adapter: Any, model: Any, opened: PreTrainedModel) -> Any:
    """The configuration of a new adapter, which names the model as its base."""
    config = peft.lora_config(adapter) if isinstance(adapter, Mapping) else copy.copy(adapter)
    peft.check(config)
    model = model.folder if isinstance(model, Checkpoint) else model
    if isinstance(model, str | Path):
        folder = Path(model).expanduser()
        config.base_model_name_or_path = str(folder.absolute() if folder.exists() else model)
    return peft.scoring(config, opened) if hf.task_of(opened) != "CAUSAL_LM" else config


def adapter_folder(model: Any) -> Path | None:
    """The folder of a PEFT adapter; None: `model` is something else."""
    folder = Path(model).expanduser() if isinstance(model, str | Path) else None
    return folder if folder is not None and (folder / peft.CONFIG_FILE).is_file() else None


def folder_adapter(folder: Path) -> tuple[Any, str]:
    """The configuration of a folder's adapter, for training, and its base's folder or hub id.

    If the adapter names a revision of a base on the hub, the base's local folder is returned.
    """
    config = peft.from_json(read_json(folder / peft.CONFIG_FILE) | {"inference_mode": False})
    if not config.base_model_name_or_path or not isinstance(config.base_model_name_or_path, str):
        raise InputError(
            f"{folder / peft.CONFIG_FILE}: names no base_model_name_or_path; put the base's folder "
            "or hub id there"
        )
    if peft.is_base(folder, config):
        raise InputError(
            f"{folder}: has both a model and an adapter of it; move {peft.CONFIG_FILE} and "
            f"{peft.WEIGHTS_FILE} to a folder of their own, and name that or this one"
        )
    base = config.base_model_name_or_path
    if config.revision is not None and not Path(base).expanduser().exists():
        base = str(resolve_model(base, config.revision))
    if adapter_folder(base) is not None:
        raise _not_merged(folder, base)
    return config, base


def _head_of(folder: Path, config: Any) -> ClassHead | None:
    """The head in an adapter's folder, with as many labels as its weights; None: it has none."""
    if config.task_type == "FEATURE_EXTRACTION":
        return ClassHead(())
    if not peft.of_scores(config):
        return None
    shapes = {tensor.name: tensor.shape for tensor in read_header(folder / peft.WEIGHTS_FILE)}
    ends = ("score.weight", "classifier.weight")
    count = next((shape[0] for name, shape in shapes.items() if name.endswith(ends)), 0)
    if not count and config.task_type in (None, "CAUSAL_LM"):
        return None  # the weights have no head
    labels = tuple(f"LABEL_{number}" for number in range(count or 1))
    return ClassHead(labels, of_tokens=config.task_type == "TOKEN_CLS")


def _not_merged(folder: Path, base: str) -> InputError:
    return InputError(
        f"{folder / peft.CONFIG_FILE}: its base {base} has an adapter itself; merge that first: "
        f"megatrain export {base} OUT --merged"
    )


def _add_adapter(source: Source, config: Any) -> Source:
    """Put a new adapter on the source's model, and return the source."""
    source.model, source.grows = with_new_adapter(source.model, config), True
    renamed = {source.names.get(n, n): buffer for n, buffer in source.untrained.buffers.items()}
    source.untrained.buffers = renamed
    return source


def _open_plain(
    model: Any, *, resumes: bool = False, head: ClassHead | None = None, **code: Any
) -> Source:
    """Open a model without putting an adapter on it; arguments as of `open_source`."""
    folder = Path(model).expanduser() if isinstance(model, str | Path) else None
    model = open_checkpoint(folder) if folder and is_checkpoint(folder) else model
    beside: Companions = {}  # the files beside the model's weights
    if isinstance(model, Checkpoint):
        empty = state_io.open_model(model, **code)
        beside = state_io.saved_companions(model)
        source = Source(empty, state_io.FLOATS[model.settings.dtype], saved=model, resumes=resumes)
        source.origin = state_io.origin_of(model, resumes=resumes)
        source.base = model.settings.base if resumes else "bf16"
    elif isinstance(model, PreTrainedModel):
        empty = emptied(model, attn_implementation=code.get("attn_implementation"))
        source = Source(empty, next(model.parameters()).dtype, in_memory=model)
    elif isinstance(model, PreTrainedConfig | Alike):
        config = model.config if isinstance(model, Alike) else model
        empty = build.empty_model(build.with_head(config, head) if head else config, **code)
        dtype = config.dtype or config.get_text_config(decoder=True).dtype or torch.float32
        source = Source(empty, dtype, alike=isinstance(model, Alike))
    elif isinstance(model, str | Path):
        source = _open_folder(model, head, **code)
        assert source.folder is not None
        beside = companions(source.folder)
    else:
        raise InputError(
            f"the model is a {type(model).__name__}; give a transformers model or configuration, "
            "a folder, or a hub id"
        )
    set_generation(source.model, beside)
    source.companions = beside
    if source.saved is None:  # reading weights replaces most of these buffers
        buffers = state_io.persistent_buffers(source.model)
        types = build.loaded_types(source.model, source.dtype) if buffers else {}
        copies = {n: b.to(types.get(n, b.dtype), copy=True) for n, b in buffers.items()}
        source.untrained.buffers = copies
    return source


def _open_folder(model: str | Path, head: ClassHead | None, **code: Any) -> Source:
    """Open the model of a folder, a GGUF file or a hub id."""
    folder = resolve_model(model)
    config = build.load_config(folder, trust_remote_code=code.get("trust_remote_code", False))
    quantised = quantised_base(read_json(folder / "config.json"), folder)
    for _, part in hf.configs(config):  # exports are not quantised
        vars(part).pop("quantization_config", None)
    config = build.with_head(config, head) if head else config
    empty = build.empty_model(config, **code)
    hf.thaw(empty)
    if type(empty.config) is not type(config):
        raise InputError(
            f"{folder}: its configuration is of a {config.model_type}, and {type(empty).__name__} "
            "is a part of that alone: an export would lose the rest; let architectures in "
            f"config.json name {hf.MULTIMODAL_CLASSES.get(config.model_type, 'the whole model')}"
        )
    local = Path(model).expanduser()
    if is_gguf(local):
        dtype = str(source_dtype(folder)).removeprefix("torch.")
        _log.info("%s: dequantised to %s, in %s", model, dtype, folder)
    place = (str(local.absolute()),) if local.exists() else (str(model), folder.name)
    origin = state_io.Origin(*place)
    return Source(empty, source_dtype(folder), folder, origin=origin, base=quantised or "bf16")


def structure(source: Source, *, trained: bool = True) -> ModelSpec:
    """The `ModelSpec` of a source's model, which is `trained` or only run; each is probed once."""
    if trained not in source.structures:
        probed = spec(source.model, trained=trained)
        adapters = adapted(source.model)
        if adapters is not None and not adapters.base_names.keys().isdisjoint(probed.router_biases):
            raise InputError(
                "router_bias_update moves biases of the base, which an adapter's folder does not "
                "hold; leave it out, or name the routers' modules in the adapter's modules_to_save"
            )
        frozen = [name for name, p in source.model.named_parameters() if not p.requires_grad]
        if untrained := [*frozen, *probed.unused, *probed.fixed]:
            types = _types(source)
            probed.wide = {n for n in untrained if types.get(n, source.dtype) != torch.bfloat16}
        if packed := _packings(source, probed, trained=trained):
            wide = probed.in_fp32(torch.bfloat16)
            probed.packed = {name: packing for name, packing in packed.items() if name not in wide}
        source.structures[trained] = probed
    return source.structures[trained]


def packed_weights(spec: ModelSpec, base: Base, *, frozen: bool = False) -> dict[str, WeightFormat]:
    """The formats of frozen matrices of the layers' linear modules and stacked experts, by name.

    Routers, other modules, embeddings and heads are not packed.

    Args: `frozen`: all parameters count as frozen, even those that require gradients.
    """
    if base == "bf16":
        return {}
    if base not in _FORMATS:
        raise InputError(f"base is {base!r}; it must be bf16, {', '.join(BASES)} or folder")
    adapters = adapted(spec.capture.model)
    config = plain(spec.capture.model).config.to_dict()
    packing = BASES.get(base) or kept_format(config)
    packs_stacks = base != "folder" or quantisation(config).get("expert_dtype") != "fp4"
    if packing is None:
        raise InputError(
            "base is 'folder', but the model does not come in mxfp4 or in float8 with blocks of "
            f"{formats.SIDE} x {formats.SIDE}; leave base out, or take {' or '.join(BASES)}"
        )
    names: list[str] = []
    for layer in spec.layers:
        for path, module in layer.module.named_modules():
            is_router = not ROUTERS.isdisjoint(path.split("."))
            for name, weight in module.named_parameters(recurse=False):
                is_matrix = type(module) is nn.Linear and name == "weight"
                is_stack = packs_stacks and hf.takes_grouped_products(module, [name])
                is_frozen = frozen or not weight.requires_grad
                if (is_matrix or is_stack) and is_frozen and packing.takes(weight.shape):
                    names += [] if is_router else [f"{layer.name}.{path}.{name}"]
    base_names = {n: n for n in names} if adapters is None else adapters.base_names
    modules = {n: base_names[n].rpartition(".")[0] for n in names if n in base_names}
    if modules:  # libraries that have packed a folder leave some of its modules unpacked
        method = quantisation(config).get("quant_method")
        is_packed = base == "folder" or method in ("bitsandbytes", "torchao")
        unpacked = {n for n, m in modules.items() if is_packed and stays_whole(config, m)}
        return {name: packing for name in modules if name not in unpacked}
    remedy = "give an adapter" if adapters is None else "leave base out (a Conv1D is not linear)"
    raise InputError(f"base is {base!r}, but no linear module of the layers is frozen; {remedy}")


def _packings(source: Source, spec: ModelSpec, *, trained: bool) -> dict[str, WeightFormat]:
    """The formats of frozen weights by name: a checkpoint's or folder's, else those of `base`."""
    saved = source.saved
    if saved is not None and source.resumes:
        base = saved.settings.left_out
        format_names = {p.name: p.packed for p in saved.manifest.parameters if p.packed}
        format_names |= {} if base is None else base.packed
        return {name: formats.PACKINGS[form] for name, form in format_names.items()}
    folder, names = source.folder, source.names
    stored = {} if folder is None else WeightPlan(folder, plain(source.model)).packings
    base_formats = _FORMATS.get(source.base, ())
    packed = {names.get(name, name): form for name, form in stored.items() if form in base_formats}
    if not packed:
        return packed_weights(spec, source.base, frozen=not trained)
    for name in packed if trained else ():
        if source.model.get_parameter(name).requires_grad:
            raise InputError(
                f"{folder}: the weights of {name!r} are quantised, and such are not trained; give "
                "an adapter, leave base out where you set it, or take the unquantised model"
            )
    layers = (f"{v.name}.{n}" for v in spec.layers for n, _ in v.module.named_parameters())
    return {name: packed[name] for name in layers if name in packed}


def _types(source: Source) -> dict[str, torch.dtype]:
    """The dtype of each parameter in its source, by name; missing ones have `source.dtype`."""
    if (saved := source.saved) is not None:
        masters = {p.name: torch.float32 for p in saved.manifest.parameters}
        types = masters | state_io.frozen_types(saved, source.model)
    elif source.folder is not None:
        types = WeightPlan(source.folder, plain(source.model)).types
    else:
        model = source.copied_model
        types = {} if model is None else {n: p.dtype for n, p in model.named_parameters()}
    return {source.names.get(name, name): dtype for name, dtype in types.items()}


@dataclass(frozen=True)
class EngineSetup:
    """Everything that an engine needs except its placement; see `Engine` for the settings."""

    source: Source
    model: Model
    max_grad_norm: float | None
    precision: Precision
    device: Recording
    # bytes of host memory that the process may take; None: all that the machine has
    host_limit: int | None
    disk_space: int | None  # bytes that planes may take on the disk; None: all that is free
    disk: str | Path | None
    seed: int
    ranks: Ranks = ALONE
    # the ranks that share every row; one alone if each rank has its own rows
    sequence_ranks: Ranks = ALONE
    verify: Verify = "save"

    @property
    def disk_bytes(self) -> int:
        """Disk space for planes of this rank; 0 without a disk. Raises InputError: no such disk."""
        if self.disk is None:
            return 0
        return disk_bytes(self.disk, self.disk_space) // self.ranks.on_host

    def open_file(self, num_bytes: int) -> PlaneFile:
        """A file for planes of this rank on the disk. All ranks call this, and get its errors."""
        files: list[PlaneFile] = []

        def create() -> None:
            if self.disk is None:
                raise InputError(
                    f"the placement keeps {size(num_bytes)} on a disk (disk_moments, "
                    "disk_remainder, disk_weights), but none is given; set disk to a folder on it"
                )
            all_bytes = num_bytes * self.ranks.on_host
            if self.disk_space is not None and all_bytes > self.disk_space:
                raise DoesNotFit(
                    f"the placement keeps {size(all_bytes)} on the disk, and disk_space is "
                    f"{size(self.disk_space)}; raise it"
                )
            files.append(PlaneFile(self.disk, num_bytes))

        try:
            self.ranks.agree(create)
        except BaseException:
            for file in files:
                file.close()
            raise
        return files[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that layers are computed in."""
        return DTYPES[self.precision]


def open_structure(
    source: Source, optimizer: Rule | None, ranks: Ranks, precision: Precision, *, saveable: bool
) -> Model:
    """The model's structure and tiles. Raises InputError: the model cannot be saved."""
    if source.saved is None and not source.structures:  # `structure` changes the model's forwards
        computed_dtype = torch.float32 if source.copied_model is None else source.dtype
        with_code = source.folder is not None
        source.lost = difference(source.model, source.dtype, computed_dtype, with_code=with_code)
    spec = structure(source, trained=optimizer is not None)
    if optimizer is not None and saveable and source.lost is not None:
        raise InputError(f"{source.lost}; or give saveable=False, to train what is never saved")
    return Model(spec, optimizer, ranks.shards.size, ranks.hosts, precision)


def choose_parameters(source: Source, trained: Trained, *, pretrained: bool) -> None:
    """Set which parameters require gradients.

    Encoders of a pretrained model are frozen, unless `train_only` names them or it has an adapter.
    Raises InputError: a pattern matches none, or none is trained.
    """
    if pretrained and trained.train_only is None and adapted(source.model) is None:
        for encoder in hf.encoders(source.model):
            encoder.requires_grad_(False)
    trained.choose(source.model)


def choose_trained(
    source: Source, trained: Trained, optimizer: Rule | None, precision: Precision
) -> None:
    """`choose_parameters`, and check base and precision. Raises InputError: these do not fit."""
    adapters = adapted(source.model)
    choose_parameters(source, trained, pretrained=source.stored is not None and not source.resumes)
    if source.base != "bf16" and (precision == "fp32" or (adapters is None and precision == "fp8")):
        raise InputError(f"base is {source.base!r}, and precision {precision!r}; take bf16")
    if adapters is None:
        if precision == "fp8":
            require_torchao()
        return
    if precision == "fp8" and adapters.config.use_dora:
        raise InputError("precision is 'fp8', but use_dora needs the base's weights; take bf16")
    if optimizer is not None and not any(p.requires_grad for p in source.model.parameters()):
        raise InputError(
            "every parameter of the model with the adapter is frozen: load it by "
            "PeftModel.from_pretrained with is_trainable=True, and do not disable it"
        )
