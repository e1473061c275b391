"""Writes a model as a Hugging Face folder, shard by shard, which appears when it is complete."""

import copy
import errno
import json
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.base.json_yaml import read_json
from megatrain.base.units import GIB, gib
from megatrain.base.whole_files import link_file, whole_folder
from megatrain.compat import peft
from megatrain.compat import transformers as hf
from megatrain.errors import InputError, RunFailed, explained
from megatrain.model.adapters import Values, adapted
from megatrain.model.build import loaded_types
from megatrain.model.companions import GENERATION, Companions, write_companions
from megatrain.model.quantised import Packed, quantisation, with_packed_weights
from megatrain.model.safetensors_io import (
    INDEX_FILE,
    SINGLE_FILE,
    Stored,
    stored_tensors,
    write_shard,
)

Tensors = dict[str, Tensor]


class ExportPiece(NamedTuple):
    """Tensors to write: shapes and dtypes by name, and a function that makes the values."""

    blanks: Tensors
    read: Callable[[], Tensors]


_SHARD_BYTES = 5 * GIB
SHARD_FILE = "model-{:05d}-of-{:05d}.safetensors"
# Files that an export replaces in an existing folder; others (tokenizer, notes) stay.
REPLACED = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|config\.json|generation_config\.json|adapter_(config\.json|model\.safetensors)"
)


def write_weights(
    folder: Path,
    model: PreTrainedModel,
    tensors: Values,
    *,
    dtype: torch.dtype,
    as_came: Mapping[str, torch.dtype] | None = None,
    beside: Companions | None = None,
    carried: Mapping[str, Stored] | None = None,
    max_shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write config.json, generation_config.json and safetensors shards, as `save_pretrained` does.

    Tied weights are written once, in the layout that the model has on the hub. One tensor is in
    memory at a time (or one layer's experts, if they are split), beside those of `tensors`.

    Args:
        folder: created, or replaced as a whole (`whole_folder`); other files in it are kept.
        model: has the configuration, names and shapes; its parameters are not read.
        tensors: functions that return values on the CPU, by the first name of each parameter and
            of some persistent buffers; other buffers are the model's.
        dtype: of the files, but for buffers and what the class always keeps in float32.
        as_came: dtypes of tensors that are not written in `dtype`, by first name.
        beside: more files; only generation_config.json replaces one that `folder` has.
        carried: more tensors, which are written unchanged under their names.
        max_shard_bytes: a larger tensor gets a shard of its own.

    Raises InputError: `folder` is a file; RunFailed: the disk is full or cannot be written, and
    nothing is left behind; ValueError: the names of `tensors` are not the model's.
    """
    saved = _saved_names(model, tensors)
    usual_types = loaded_types(model, dtype)
    metas: Tensors = {}  # shape and file dtype of all that is written
    for name, first in saved.items():
        reference = model.get_parameter_or_buffer(name)
        is_parameter = isinstance(reference, nn.Parameter)
        file_dtype = usual_types.get(name, dtype) if is_parameter else reference.dtype
        file_dtype = (as_came or {}).get(first, file_dtype)
        metas[name] = torch.empty(reference.shape, dtype=file_dtype, device="meta")

    def value(name: str) -> Tensor:
        first = saved[name]
        values = tensors[first]() if first in tensors else model.get_parameter_or_buffer(first)
        return values.detach()

    def read(name: str, tensor: Stored) -> Tensors:
        return {name: tensor.read()}

    pieces = _pieces(model, metas, value)
    for name, tensor in (carried or {}).items():
        pieces.append(ExportPiece({name: tensor.blank()}, partial(read, name, tensor)))
    described = _described(pieces)
    with _exported(folder, described, beside or {}) as new:
        write_configs(new, model, dtype)
        _write_shards(new, described, _values_of(pieces), max_shard_bytes)


def write_adapter(
    folder: Path,
    model: PreTrainedModel,
    tensors: Values,
    *,
    dtype: torch.dtype,
    beside: Companions | None = None,
) -> None:
    """Write the active adapter of a model as PEFT does, for `PeftModel.from_pretrained`.

    Args and errors: as of `write_weights`; files of `beside` that match `REPLACED` are skipped.
    """
    adapter = adapted(model)
    assert adapter is not None
    names = peft.file_names(model, adapter.name)
    state = model.state_dict()
    parameters = dict(model.named_parameters())
    described: Tensors = {}
    for name, model_name in names.items():  # buffers keep their own dtype
        stored = dtype if model_name in parameters else tensors[model_name]().dtype
        described[name] = torch.empty_like(state[model_name], dtype=stored, device="meta")
    beside = {n: data for n, data in (beside or {}).items() if not REPLACED.fullmatch(n)}
    with _exported(folder, described, beside) as new:
        values = (_cast(n, tensors[name](), described[n].dtype) for n, name in names.items())
        write_shard(new / peft.WEIGHTS_FILE, described, values)
        peft.write_config(adapter.config, new, model)
        if model.can_generate():  # it has the end tokens that the run has added
            model.generation_config.to_json_file(new / GENERATION)


def packed_weights_of(reference: Path) -> dict[str, Packed]:
    """The packed weights of a folder in mxfp4 or float8, by name, for `pack_like`.

    Raises InputError: it is packed in another format, or not at all.
    """
    weights = with_packed_weights(reference, stored_tensors(reference))
    packed = {name: weight for name, weight in weights.items() if isinstance(weight, Packed)}
    if not packed or not all(weight.pack for weight in packed.values()):
        method = quantisation(read_json(reference / "config.json")).get("quant_method", "nothing")
        raise InputError(
            f"--like {reference}: its weights are packed by {method}; only mxfp4 and float8 (fp8, "
            "compressed-tensors) are written; leave --like out, and pack the export elsewhere"
        )
    return packed


def pack_like(folder: Path, reference: Path, packed: Mapping[str, Packed]) -> None:
    """Pack the weights in a model's folder in the formats of another folder's, by name.

    A weight that is equal to the reference's keeps its bytes. The disk has the shards twice for a
    while. `packed`: the weights of `reference`, whose `quantization_config` is copied.

    Raises InputError: the reference is of another model.
    """
    exported = stored_tensors(folder)
    for name, weight in packed.items():
        if name not in exported or exported[name].shape != weight.shape:
            size = [*exported[name].shape] if name in exported else "not there"
            raise InputError(
                f"--like {reference}: {name!r} is {[*weight.shape]} and in the exported model "
                f"{size}; give the folder from which the run began"
            )

    def read(tensor: Stored) -> Tensors:
        values = tensor.read()
        weight = packed.get(tensor.name)
        return {tensor.name: values} if weight is None else weight.packed(values)

    pieces: list[ExportPiece] = []
    for name, tensor in exported.items():
        parts = packed[name].parts if name in packed else [tensor]
        blanks = {part.name: part.blank() for part in parts}
        pieces.append(ExportPiece(blanks, partial(read, tensor)))
    described = _described(pieces)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        _write_shards(Path(name), described, _values_of(pieces), _SHARD_BYTES)
        for file in {tensor.file for tensor in exported.values()}:
            file.unlink()
        (folder / INDEX_FILE).unlink(missing_ok=True)
        for file in Path(name).iterdir():
            file.rename(folder / file.name)
    config, of_reference = (read_json(path / "config.json") for path in (folder, reference))
    config["quantization_config"] = quantisation(of_reference)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _described(pieces: list[ExportPiece]) -> Tensors:
    """Sort pieces, widest elements first so that shards are aligned; returns all their tensors."""
    pieces.sort(key=lambda piece: -next(iter(piece.blanks.values())).dtype.itemsize)
    return {name: blank for piece in pieces for name, blank in piece.blanks.items()}


@contextmanager
def _exported(folder: Path, described: Tensors, beside: Companions) -> Iterator[Path]:
    """Yield a new folder, which then replaces `folder` and gets its other files."""
    folder = Path(folder).resolve()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; give a folder to export to")
    num_bytes = sum(tensor.nbytes for tensor in described.values())
    problem = f"{folder}: cannot export the model"
    remedy = "nothing was written, make room or choose another folder"
    with (
        explained(problem, remedy, of=OSError, into=RunFailed),
        whole_folder(folder, replace=True) as new,
    ):
        if (free := shutil.disk_usage(new).free) < num_bytes:
            lacking = f"it takes {gib(num_bytes)} and the disk has {gib(free)} left"
            raise OSError(errno.ENOSPC, lacking)
        yield new
        if folder.exists():
            shutil.copytree(
                folder,
                new,
                symlinks=True,
                ignore=lambda directory, names: [
                    n for n in names if Path(directory) == folder and REPLACED.fullmatch(n)
                ],
                copy_function=link_file,
                dirs_exist_ok=True,
            )
        replacing = (n for n in beside if REPLACED.fullmatch(n) or not (new / n).exists())
        write_companions(new, {name: beside[name] for name in replacing})


def _saved_names(model: PreTrainedModel, tensors: Values) -> dict[str, str]:
    """The names to write, each with the first name of the same tensor."""
    aliases: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        aliases.setdefault(id(tensor), []).append(name)
    needed = {name for name, _ in model.named_parameters()}
    firsts = {names[0] for names in aliases.values()}
    if needed - tensors.keys() or tensors.keys() - firsts:
        raise ValueError(f"names do not match: {sorted(needed ^ (tensors.keys() - firsts))[:3]}")
    # transformers expects the name to which others are tied.
    tied = model.all_tied_weights_keys
    ignored = hf.not_saved(model)
    saved: dict[str, str] = {}
    for first, *others in aliases.values():
        untied = next((name for name in (first, *others) if name not in tied), first)
        if untied not in ignored:
            saved[untied] = first
    return saved


def saved_config(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedConfig:
    """The configuration to save with a model that is stored in `dtype`."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    for key in config.sub_configs:
        if getattr(config, key, None) is not None:
            getattr(config, key).dtype = dtype
    return config


def write_configs(folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Write config.json and generation_config.json of a model that is stored in `dtype`."""
    # Without transformers' strict check: a questionable configuration must not stop an export.
    saved_config(model, dtype).to_json_file(folder / "config.json", use_diff=True)
    if model.can_generate():
        model.generation_config.to_json_file(folder / GENERATION)


def _values_of(pieces: Sequence[ExportPiece]) -> Iterator[Tensor]:
    for piece in pieces:
        tensors = piece.read()
        for name in piece.blanks:
            yield tensors.pop(name)  # only the caller keeps it alive


def _write_shards(
    folder: Path, described: Tensors, values: Iterator[Tensor], max_shard_bytes: int
) -> None:
    shards = _split(described, max_shard_bytes)
    count = len(shards)
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = SINGLE_FILE if count == 1 else SHARD_FILE.format(number, count)
        write_shard(folder / file_name, shard, values)
        file_of |= dict.fromkeys(shard, file_name)
    if count == 1:
        return
    numbers = sum(tensor.numel() for tensor in described.values())
    size = sum(tensor.nbytes for tensor in described.values())
    metadata = {"total_parameters": numbers, "total_size": size}
    index = {"metadata": metadata, "weight_map": file_of}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _split(described: Tensors, max_shard_bytes: int) -> list[Tensors]:
    """The tensors of each shard, in order; a shard has more bytes only if it has one tensor."""
    shards: list[Tensors] = [{}]
    size = 0
    for name, tensor in described.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _pieces(
    model: PreTrainedModel, metas: Tensors, value: Callable[[str], Tensor]
) -> list[ExportPiece]:
    """A model's tensors in the hub's layout, in the order of `metas`; `value` returns values."""

    def renamed(name: str, source: str) -> Tensors:
        return {name: _cast(source, value(source), metas[source].dtype)}

    def converted(get: Callable[[str], Tensor], group: Sequence[str]) -> Tensors:
        """The tensors that a folder has for a group of parameters, all in the widest dtype."""
        dtype = max((metas[name].dtype for name in group), key=lambda dtype: dtype.itemsize)
        values = {name: _cast(name, get(name), dtype) for name in group}
        on_hub = hf.loading.revert_weight_conversion(model, values)
        return {name: _unlisted(tensors) for name, tensors in on_hub.items()}

    on_hub = hf.loading.revert_weight_conversion(model, dict(metas))
    name_of = {id(meta): name for name, meta in metas.items()}
    pieces: dict[str, ExportPiece] = {}  # by the first of the names that they are made of
    for name, meta in on_hub.items():
        if (source := name_of.get(id(meta))) is not None:
            pieces[source] = ExportPiece({name: meta}, partial(renamed, name, source))
    for group in _groups(model, {name: m for name, m in metas.items() if name not in pieces}):
        blanks = converted(metas.__getitem__, group)
        pieces[group[0]] = ExportPiece(blanks, partial(converted, value, group))
    planned = sorted((n, t.shape) for piece in pieces.values() for n, t in piece.blanks.items())
    if planned != sorted((name, _unlisted(meta).shape) for name, meta in on_hub.items()):
        raise RunFailed(
            f"{type(model).__name__} cannot be exported layer by layer: transformers converts "
            "its weights all at once; save a checkpoint instead"
        )
    return [pieces[name] for name in metas if name in pieces]


def _cast(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in `dtype`. Raises InputError: they exceed float16's largest number, 65504."""
    cast = values.to(dtype)
    if dtype == torch.float16 and not cast.is_meta and (cast.isinf() & values.isfinite()).any():
        raise InputError(
            f"{name} has numbers beyond float16's largest, 65504; export in bfloat16 or float32"
        )
    return cast


def _groups(model: PreTrainedModel, names: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Groups of names whose tensors one of transformers' converters takes together."""
    conversions = hf.conversions_of(model)
    if conversions is None:  # the model was never loaded: as in transformers
        conversions = hf.get_model_conversion_mapping(model, add_legacy=False)
    converters = [
        conversion.reverse_transform()
        for conversion in reversed(conversions)
        if isinstance(conversion, hf.loading.WeightConverter)
    ]
    groups: defaultdict[str, list[str]] = defaultdict(list)  # by the name of the group's target
    for name in sorted(names, key=hf.loading.dot_natural_key):
        matches = (converter.rename_source_key(name) for converter in converters)
        targets = (target for target, pattern in matches if pattern is not None)
        groups[next(targets, name)].append(name)
    return [tuple(group) for group in groups.values()]


def _unlisted(value: Tensor | list[Tensor]) -> Tensor:
    return value[0] if isinstance(value, list) else value
