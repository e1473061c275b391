"""Reads the files of a checkpoint beside its tiles.

Checkpoints leave out the base of an adapter: it is read again from its place. A base with other
values is refused, because another model would then be trained.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.checkpoint.files import ALGORITHM, ALGORITHMS
from megatrain.checkpoint.manifest import (
    BUFFERS,
    CARRIED,
    COMPUTED,
    MODEL,
    BaseReference,
    Checkpoint,
    is_checkpoint,
    open_checkpoint,
    whole_checkpoints,
)
from megatrain.checkpoint.read import masters
from megatrain.compat.transformers import configs, set_attention, set_experts
from megatrain.errors import InputError, explained
from megatrain.model import weights
from megatrain.model.adapters import Values, adapted, plain, restored
from megatrain.model.build import empty_model, load_config
from megatrain.model.companions import read_files
from megatrain.model.safetensors_io import Stored, read_header
from megatrain.optim import NO_ADAFACTOR, RULES, Rule
from megatrain.placement import Placement, renamed
from megatrain.telemetry.host import update_threads
from megatrain.tile.formats import PACKINGS, WeightFormat

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PUT_BACK = "put the base back as it was; of one that has moved a link in its old place will do"


@dataclass
class Untrained:
    """The tensors of a model's source that no step changes: exports write them bit for bit."""

    # persistent buffers, on the CPU; the model computes with copies in its own dtypes
    buffers: dict[str, Tensor] = field(default_factory=dict)
    # buffers that no file of weights has, as the model's class computes them
    computed: dict[str, Tensor] = field(default_factory=dict)
    # dtypes of frozen parameters in the source, by name; the tiles have their values
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    # tensors of the source's files that the model's class does not have
    carried: Mapping[str, Stored] = field(default_factory=dict)
    rounded: bool = False  # True if the tiles hold fewer bits of a frozen parameter than the source

    @property
    def values(self) -> dict[str, Callable[[], Tensor]]:
        """For each buffer a function that returns it, as exports need."""
        return {name: partial(Tensor.detach, buffer) for name, buffer in self.buffers.items()}

    def as_came(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """The dtypes of tensors that an export in `dtype` (None: the source's) writes unchanged."""
        parameters = self.dtypes if dtype is None else {}
        return parameters | {name: buffer.dtype for name, buffer in self.buffers.items()}

    def export_dtype(self, dtype: torch.dtype | str | None) -> torch.dtype | None:
        """The dtype of an export, which may be given by its name.

        Raises InputError: unknown dtype, or not bf16 where the tiles hold only bf16 bits.
        """
        chosen = FLOATS.get(dtype) if isinstance(dtype, str) else dtype
        if chosen not in FLOATS.values() and dtype is not None:
            raise InputError(f"dtype is {dtype!r}; it must be float32, bfloat16, float16 or None")
        if self.rounded and chosen != torch.bfloat16:
            raise InputError(
                "an engine without an optimizer in bf16 has rounded its weights; export with "
                "dtype=torch.bfloat16, or open the model with precision='fp32'"
            )
        return chosen


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that a state_dict has, by name."""
    saved = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def computed_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that a state_dict lacks, on the CPU, by name."""
    saved = persistent_buffers(model)
    return {n: b.cpu().contiguous() for n, b in model.named_buffers() if n not in saved}


def read_untrained(checkpoint: Checkpoint, model: PreTrainedModel) -> Untrained:
    """Read a checkpoint's untrained tensors, and copy all its buffers into `model`."""
    stored, buffers = _stored(checkpoint, BUFFERS), persistent_buffers(model)
    if {n: (tensor.dtype.is_floating_point, tensor.shape) for n, tensor in stored.items()} != {
        n: (tensor.is_floating_point(), tuple(tensor.shape)) for n, tensor in buffers.items()
    }:
        raise InputError(
            f"{checkpoint.folder / BUFFERS}: its buffers are not those of a {type(model).__name__}"
        )
    values = {name: tensor.read() for name, tensor in stored.items()}
    for name, buffer in buffers.items():
        buffer.copy_(values[name])
    # Another version of transformers, or a model built in bf16, computes other values.
    computed = computed_buffers(model)
    for name, tensor in _stored(checkpoint, COMPUTED).items():
        if name not in computed or tensor.shape != tuple(computed[name].shape):
            raise InputError(
                f"{checkpoint.folder / COMPUTED}: {name!r} is no buffer of a {type(model).__name__}"
            )
        model.get_buffer(name).copy_(tensor.read())
    return Untrained(values, dtypes=frozen_types(checkpoint, model))


def frozen_types(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, torch.dtype]:
    """The dtypes of frozen parameters in the model's source, by name."""
    frozen = [p.name for p in checkpoint.manifest.parameters if p.group is None]
    frozen += left_out_names(checkpoint, model).values()
    settings = checkpoint.settings
    names = {name: settings.frozen_dtypes.get(name, settings.dtype) for name in frozen}
    return {name: FLOATS[dtype] for name, dtype in names.items()}


def _stored(checkpoint: Checkpoint, name: str) -> dict[str, Stored]:
    """The tensors of a checkpoint's file; none if it has no such file."""
    header = read_header(checkpoint.folder / name) if name in checkpoint.manifest.files else []
    return {tensor.name: tensor for tensor in header}


def open_model(checkpoint: Checkpoint, **code: Any) -> PreTrainedModel:
    """The checkpoint's model without weights, with the same parameters frozen."""
    settings, folder = checkpoint.settings, checkpoint.model_folder
    config = load_config(folder, trust_remote_code=code.get("trust_remote_code", False))
    # config.json does not name implementations. Outer parts come first, as they set inner ones.
    for path, part in configs(config):
        set_attention(part, settings.attn_implementation.get(path))
        set_experts(part, settings.experts_implementation.get(path))
    model = empty_model(config, **code)
    if type(model).__name__ != settings.model_class:
        raise InputError(
            f"{folder / 'config.json'}: it describes a {type(model).__name__}, but the "
            f"checkpoint holds a {settings.model_class}, which cannot be rebuilt"
        )
    if settings.adapter is not None:
        model = restored(model, settings.adapter)
    frozen, parameters = set(settings.frozen), dict(model.named_parameters())
    if unknown := frozen - parameters.keys():
        raise InputError(f"{checkpoint.folder}: its frozen parameter {min(unknown)!r} is unknown")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in frozen)
    return model


def saved_companions(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files beside the model's configuration in a checkpoint; their bytes are checked."""
    names = [name for name in checkpoint.manifest.files if name.startswith(f"{MODEL}/")]
    inner = {name.removeprefix(f"{MODEL}/"): checkpoint.folder / name for name in names}
    return read_files({n: path for n, path in inner.items() if n != "config.json"})


def saved_optimizer(checkpoint: Checkpoint) -> Rule | None:
    """The checkpoint's optimizer rule. Raises InputError: it is unknown."""
    if checkpoint.settings.optimizer is None:
        return None
    settings = dict(checkpoint.settings.optimizer)
    name = str(settings.pop("name", None))
    if name == "adafactor":
        raise InputError(f"{checkpoint.folder}: trained with Adafactor. {NO_ADAFACTOR}")
    if name == "muon" and not settings.get("packed", True):
        del settings["packed"]  # a setting of earlier versions
    rule = RULES.get(name)
    keys = set() if rule is None else {setting.name for setting in fields(rule)}
    if rule is None or settings.keys() != keys:
        raise InputError(f"{checkpoint.folder}: its optimizer is none that is known")
    return rule(**settings)


def resumed_placement(
    checkpoint: Checkpoint, wanted: Placement | Literal["auto"] | None, device: str
) -> Placement | Literal["auto"]:
    """The placement to resume with: `wanted`, or the saved one, or `auto` on another device."""
    if wanted is not None:
        return wanted
    if checkpoint.settings.device != device:
        return "auto"
    saved = checkpoint.settings.placement
    problem, remedy = "its placement is of another version", "give one: placement='auto'"
    with explained(f"{checkpoint.folder}: {problem}", remedy, of=(LookupError, TypeError)):
        return Placement(**renamed(saved) | {"resident": tuple(saved["resident"])})


def check_precision(checkpoint: Checkpoint, requested: str | None) -> Any:
    """The saved precision, to resume with. Raises InputError: another one is requested."""
    saved = checkpoint.settings.precision
    if requested not in (None, saved):
        raise InputError(
            f"precision is {requested!r}, but {checkpoint.folder} was trained with {saved!r} and "
            "goes on with that; leave precision out, or export the model and start from the export"
        )
    return saved


@dataclass
class Origin:
    """The folder, checkpoint or hub id from which weights were read, and checksums of these."""

    path: str
    revision: str | None = None
    algorithm: str = ALGORITHM
    sums: dict[str, str] = field(default_factory=dict)
    carried: str | None = None  # the fingerprint of carried tensors; None: not computed yet

    def add(self, name: str, values: Tensor) -> None:
        """Add a tensor's dtype, shape and bytes to the checksums; in any order, from any thread."""
        flat = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        shape = "x".join(map(str, values.shape))
        self.sums[name] = f"{values.dtype} {shape} {ALGORITHMS[self.algorithm](flat.data)}"

    def fingerprint(self, names: Iterable[str]) -> str:
        """One checksum of all named tensors, after its algorithm's name and a colon."""
        lines = "\n".join(f"{name} {self.sums.get(name)}" for name in sorted(names))
        return f"{self.algorithm}:{ALGORITHMS[self.algorithm](lines.encode())}"


def fingerprint(carried: Mapping[str, Stored], algorithm: str = ALGORITHM) -> str:
    """One checksum of carried tensors (`carried_tensors`), without a record of their origin."""
    origin = Origin(path="", algorithm=algorithm)
    for name, tensor in carried.items():
        origin.add(name, tensor.read())
    return origin.fingerprint(carried)


def origin_of(checkpoint: Checkpoint, *, resumes: bool) -> Origin | None:
    """The place of the base, for an adapter that is trained on a checkpoint or resumed from it.

    None: no file has the base's values, as another adapter changed them, or packing rounded them.
    """
    settings = checkpoint.settings
    if base := settings.left_out:
        return Origin(base.path, base.revision) if resumes or not base.packed else None
    return Origin(str(checkpoint.folder.absolute())) if settings.adapter is None else None


def left_out_names(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, str]:
    """Names in the base -> names in the model, of the parameters that a checkpoint leaves out."""
    adapters = adapted(model)
    if checkpoint.settings.left_out is None or adapters is None:
        return {}
    saved = {parameter.name for parameter in checkpoint.manifest.parameters}
    return {
        adapters.base_names[name]: name
        for name, _ in model.named_parameters()
        if name in adapters.base_names and name not in saved
    }


def read_left_out(
    checkpoint: Checkpoint, model: PreTrainedModel, write: weights.Write, *, as_computed: bool
) -> set[str]:
    """Read the parameters that a checkpoint leaves out, and call `write` from many threads.

    Args: `as_computed`: packed parameters as layers compute with them; else as they are stored.

    Returns the names that the base does not have, such as a head of which the adapter has a copy.
    """
    reference = checkpoint.settings.left_out
    if reference is None:
        return set()
    names, base = left_out_names(checkpoint, model), _open_base(checkpoint, reference)
    origin = Origin(reference.path, reference.revision, reference.fingerprint.partition(":")[0])
    types: dict[str, torch.dtype] = {}

    def sum_and_write(base_name: str, values: Tensor) -> None:
        if (name := names.get(base_name)) is not None:
            origin.add(name, values)
            if as_computed:
                values = _unpacked(reference, model, name, values, types.get(base_name))
            write(name, values)

    if isinstance(base, Checkpoint):
        base_masters = masters(base)
        with ThreadPoolExecutor(update_threads(), thread_name_prefix="read-base") as pool:
            present = names.keys() & base_masters.keys()
            list(pool.map(lambda name: sum_and_write(name, base_masters[name]()), present))
    else:
        formats = _formats(reference, names)
        inner, threads = plain(model), update_threads()
        with _another_base(checkpoint, reference):
            types = weights.WeightPlan(base, inner).types if as_computed else {}
            weights.read_weights(base, inner, sum_and_write, threads=threads, packed=formats)
    _check_base(checkpoint, reference, origin.fingerprint(names.values()), reference.fingerprint)
    return {*names.values()} - origin.sums.keys()


def _unpacked(
    reference: BaseReference, model: PreTrainedModel, name: str, values: Tensor, dtype: Any
) -> Tensor:
    """A base's values as layers compute with them, rounded by packing if the reference packs them.

    Args: `dtype`: to unpack to, if values are stored packed (uint8).
    """
    if name not in reference.packed:
        return values
    packing, shape = PACKINGS[reference.packed[name]], model.get_parameter(name).shape
    if values.dtype == torch.uint8:
        return packing.unpacked(values, shape).to(dtype)
    return packing.unpacked(packing.pack(values), shape)


def _formats(reference: BaseReference, names: Mapping[str, str]) -> dict[str, WeightFormat]:
    """The formats of packed parameters by their names in the base."""
    packed = ((base, name) for base, name in names.items() if name in reference.packed)
    return {base: PACKINGS[reference.packed[name]] for base, name in packed}


def _another_base(checkpoint: Checkpoint, reference: BaseReference) -> AbstractContextManager[None]:
    """Within this context errors say that the base is not that of the checkpoint."""
    another = f"{reference.path}: is not the base that {checkpoint.folder} was trained on"
    return explained(another, _PUT_BACK, of=InputError)


def _check_base(checkpoint: Checkpoint, reference: BaseReference, now: str, before: str) -> None:
    """Raises InputError: the base's fingerprint is another one `now` than `before`."""
    if now != before:
        raise InputError(
            f"{reference.path}: its weights are not those that {checkpoint.folder} was trained on; "
            f"{_PUT_BACK}"
        )


def whole_masters(checkpoint: Checkpoint, model: PreTrainedModel) -> Values:
    """The `masters` of a checkpoint and of a base that it leaves out, as layers compute them."""
    saved, reference = masters(checkpoint), checkpoint.settings.left_out
    if reference is None:
        return saved
    base, names = _open_base(checkpoint, reference), left_out_names(checkpoint, model)
    types: dict[str, torch.dtype] = {}
    if isinstance(base, Checkpoint):
        base_values: Values = masters(base)
    else:
        with _another_base(checkpoint, reference):
            base_values = weights.lazy_weights(base, plain(model), _formats(reference, names))
            types = weights.WeightPlan(base, plain(model)).types

    def read(base_name: str) -> Tensor:
        values = base_values[base_name]()
        return _unpacked(reference, model, names[base_name], values, types.get(base_name))

    return saved | {name: partial(read, n) for n, name in names.items() if n in base_values}


def require_same_base(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Raises InputError: the base that a checkpoint leaves out has changed."""
    read_left_out(checkpoint, model, lambda name, values: None, as_computed=False)
    carried(checkpoint, model)


def require_base_of(adapter: Path, base: str, **code: Any) -> None:
    """Raises InputError: the adapter in a finished run's folder was trained on another base.

    The newest whole checkpoint of the run has its checksums; other adapters are not compared.

    Args: `base`: the folder, checkpoint or hub id that the adapter names.
    """
    from megatrain.run_folder import layout  # it needs the libraries of run files

    adapter = adapter.resolve()
    saved = whole_checkpoints(adapter.parent / layout.CHECKPOINTS)
    if adapter.name != layout.MODEL or not saved:
        return
    newest = open_checkpoint(saved[0])
    if (reference := newest.settings.left_out) is None:
        return
    settings = replace(newest.settings, left_out=replace(reference, path=base, revision=None))
    newest = replace(newest, manifest=replace(newest.manifest, settings=settings))
    require_same_base(newest, open_model(newest, **code))


def stored_values(place: Checkpoint | Path, model: PreTrainedModel) -> Values:
    """For each parameter of a model without adapter a function that reads it from files."""
    return masters(place) if isinstance(place, Checkpoint) else weights.lazy_weights(place, model)


def carried(place: Checkpoint | Path, model: PreTrainedModel) -> dict[str, Stored]:
    """The tensors of a model's source that its class does not have; see `carried_tensors`.

    Raises InputError: the base of a checkpoint's adapter has changed since the save.
    """
    if isinstance(place, Path):
        return weights.carried_tensors(place, plain(model))
    if base := place.settings.left_out:
        tensors = carried(_open_base(place, base), plain(model))
        if base.carried:
            now = fingerprint(tensors, base.carried.partition(":")[0])
            _check_base(place, base, now, base.carried)
        return tensors
    opened = cache(lambda path: path.open("rb", buffering=0))
    return {name: tensor.kept_open(opened) for name, tensor in _stored(place, CARRIED).items()}


def _open_base(checkpoint: Checkpoint, reference: BaseReference) -> Checkpoint | Path:
    """The checkpoint or folder of a base that is left out. Raises InputError: there is none."""
    path = Path(reference.path)
    problem = f"{checkpoint.folder}: has an adapter alone, and its base cannot be read"
    with explained(problem, of=InputError):
        if path.is_absolute() and not path.exists():
            raise InputError(f"{path} is not there; {_PUT_BACK}")
        if is_checkpoint(path):
            return open_checkpoint(path)
        return weights.resolve_model(reference.path, reference.revision)
