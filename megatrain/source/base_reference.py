"""The base of an adapter, which its checkpoints leave out: it is read again from where it was.

A base whose values are others is refused: training would go on, on another model.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.checkpoint import (
    BaseReference,
    Checkpoint,
    is_checkpoint,
    mark,
    masters,
    open_checkpoint,
)
from megatrain.checkpoint.files import ALGORITHM, ALGORITHMS
from megatrain.checkpoint.manifest import CARRIED
from megatrain.errors import InputError
from megatrain.model.adapters import Values, adapted, plain
from megatrain.model.safetensors_io import Stored, read_header
from megatrain.model.weights import (
    carried_tensors,
    lazy_weights,
    read_weights,
    resolve_model,
    stored_packings,
)
from megatrain.parallel.distributed import Ranks
from megatrain.telemetry.host import update_threads
from megatrain.tile import Entry
from megatrain.tile.packed import PACKINGS

Write = Callable[[str, Tensor], None]

_NAME_IT = (
    "put the base back as it was, or name its new place: --base-model PLACE (of train: "
    "--set model.base_model=PLACE; in Python: base_model)"
)


@dataclass
class Origin:
    """The place that a model's weights were read from, and checksums of what was read.

    Attributes:
        path: a folder, a checkpoint or a hub id.
        revision: of a hub id.
    """

    path: str
    revision: str | None = None
    algorithm: str = ALGORITHM
    _sums: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, values: Tensor) -> None:
        """Add a tensor's dtype, shape and bytes to the checksums; in any order, from any thread."""
        flat = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        shape = "x".join(map(str, values.shape))
        self._sums[name] = f"{values.dtype} {shape} {ALGORITHMS[self.algorithm](flat.data)}"

    def lacking(self, names: Iterable[str]) -> set[str]:
        """The names whose tensors were not added."""
        return {*names} - self._sums.keys()

    def fingerprint(self, names: Iterable[str]) -> str:
        """One checksum of all named tensors, after its algorithm's name and a colon."""
        lines = "\n".join(f"{name} {self._sums.get(name)}" for name in sorted(names))
        return f"{self.algorithm}:{ALGORITHMS[self.algorithm](lines.encode())}"


def origin_of(checkpoint: Checkpoint, *, resumes: bool) -> Origin | None:
    """The place of the base, for an adapter that is trained on a checkpoint or resumes from it.

    None if the base's values are in no file: another adapter changed them, or they are unpacked.
    """
    settings = checkpoint.settings
    if left := settings.left_out:
        return Origin(left.path, left.revision) if resumes or not left.packed else None
    return Origin(str(checkpoint.folder.absolute())) if settings.adapter is None else None


def place_of(base: str | Path) -> tuple[str, str | None]:
    """A model's absolute folder, or its hub id and current revision.

    Raises InputError: there is no such model.
    """
    folder = Path(base).expanduser()
    if folder.exists():
        return str(folder.absolute()), None
    return str(base), resolve_model(base).name


def with_base(checkpoint: Checkpoint, base: str | Path | None) -> Checkpoint:
    """The checkpoint of an adapter, with its base at a new place.

    The base's values are compared when they are read; later checkpoints and exports name this
    place.

    Args:
        base: a folder, a checkpoint or a hub id; None: the old place.

    Raises InputError: the checkpoint has no adapter, or there is no such model.
    """
    settings = checkpoint.settings
    if base is None:
        return checkpoint
    if settings.adapter is None:
        raise no_adapter(checkpoint.folder)
    path, revision = place_of(base)
    left = settings.left_out and replace(settings.left_out, path=path, revision=revision)
    named = {"base_model_name_or_path": path, "revision": revision}
    configs = {name: config | named for name, config in settings.adapter["configs"].items()}
    settings = replace(settings, left_out=left, adapter={**settings.adapter, "configs": configs})
    return replace(checkpoint, manifest=replace(checkpoint.manifest, settings=settings))


def no_adapter(model: object) -> InputError:
    """The error for `base_model` with a model that has no adapter."""
    return InputError(f"{model}: has no adapter, whose base could have moved; leave base_model out")


def base_reference(
    model: PreTrainedModel,
    origin: Origin | None,
    entries: Iterable[Entry],
    folder: Path,
    ranks: Ranks,
) -> BaseReference | None:
    """A reference to the base, which a checkpoint of an adapter leaves out; None: it has all of it.

    A base that is a checkpoint of ours is marked, so that no rotation removes it.

    Args:
        origin: of the base; None: it was not read, or not all of it.
        entries: all parameters of the model.
        folder: of the checkpoint; it replaces a folder that is there.
        ranks: all call this, and get the same result.
    """
    adapters, frozen = adapted(model), [entry for entry in entries if entry.group is None]
    reference = None
    if origin and adapters and all(entry.name in adapters.held for entry in frozen):
        packed = {entry.name: entry.packed.name for entry in frozen if entry.packed}
        checksum = origin.fingerprint(entry.name for entry in frozen)
        if origin.revision is not None or _stays(Path(origin.path), folder):
            reference = BaseReference(origin.path, origin.revision, checksum, packed)
    references = ranks.all_gather_object(reference)
    return references[0] if all(references) else None


def _stays(base: Path, folder: Path) -> bool:
    """True if a base exists and will neither be replaced by `folder` nor removed."""
    if not base.exists() or base.resolve() == folder.resolve():
        return False
    if is_checkpoint(base):
        try:
            mark(base)
        except OSError:  # it cannot be marked, so it may be removed
            return False
    return True


def left_out_names(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, str]:
    """The parameters that a checkpoint leaves out: names in the base, to names in the model."""
    adapters = adapted(model)
    if checkpoint.settings.left_out is None or adapters is None:
        return {}
    saved = {parameter.name for parameter in checkpoint.manifest.parameters}
    return {
        adapters.held[name]: name
        for name, _ in model.named_parameters()
        if name in adapters.held and name not in saved
    }


def read_left_out(checkpoint: Checkpoint, model: PreTrainedModel, write: Write) -> set[str]:
    """Pass the parameters that a checkpoint leaves out to `write`, unchanged, from many threads.

    Returns the names that the base never had, such as a head of which the adapter has a copy.

    Raises InputError: the base is not there, or is another one.
    """
    left = checkpoint.settings.left_out
    if left is None:
        return set()
    names, base = left_out_names(checkpoint, model), _open(checkpoint, left)
    seen = Origin(left.path, left.revision, left.fingerprint.partition(":")[0])

    def hand_out(name: str, values: Tensor) -> None:
        if name in names:
            seen.add(names[name], values)
            write(names[name], values)

    if isinstance(base, Checkpoint):
        whole = masters(base)
        with ThreadPoolExecutor(update_threads(), thread_name_prefix="read-base") as pool:
            list(pool.map(lambda name: hand_out(name, whole[name]()), names.keys() & whole.keys()))
    else:
        kept = {name for name, mine in names.items() if mine in left.packed}
        try:
            read_weights(base, plain(model), hand_out, threads=update_threads(), packed=kept)
        except InputError as error:
            raise InputError(
                f"{left.path}: is not the base that {checkpoint.folder} was trained on ({error}); "
                f"{_NAME_IT}"
            ) from error
    if seen.fingerprint(names.values()) != left.fingerprint:
        raise InputError(
            f"{left.path}: its weights are not those that {checkpoint.folder} was trained on; "
            f"{_NAME_IT}"
        )
    return seen.lacking(names.values())


def whole_masters(checkpoint: Checkpoint, model: PreTrainedModel) -> Values:
    """All `masters`, including those of a base that is left out, as layers compute with them.

    The base is read twice: first to be checked. Raises InputError: as `read_left_out`.
    """
    saved, left = masters(checkpoint), checkpoint.settings.left_out
    if left is None:
        return saved
    read_left_out(checkpoint, model, lambda name, values: None)
    base = _open(checkpoint, left)
    whole = stored_values(base, plain(model))
    unpacked = set[str]() if isinstance(base, Checkpoint) else stored_packings(base, plain(model))

    def read(name: str, mine: str) -> Tensor:
        values = whole[name]()
        if mine not in left.packed or name in unpacked:
            return values
        packing = PACKINGS[left.packed[mine]]
        return packing.unpacked(packing.pack(values), model.get_parameter(mine).shape)

    names = left_out_names(checkpoint, model)
    of_base = {mine: partial(read, name, mine) for name, mine in names.items() if name in whole}
    return {**saved, **of_base}


def stored_values(place: Checkpoint | Path, model: PreTrainedModel) -> Values:
    """Functions that read each parameter of a plain model from its files.

    Raises InputError: a file is damaged, or of another model.
    """
    return masters(place) if isinstance(place, Checkpoint) else lazy_weights(place, model)


def carried(place: Checkpoint | Path, model: PreTrainedModel) -> dict[str, Stored]:
    """The tensors of a model's source that its class does not have; see `carried_tensors`.

    Raises InputError: the base, which a checkpoint of an adapter leaves out, is not there.
    """
    if isinstance(place, Path):
        return carried_tensors(place, plain(model))
    if left := place.settings.left_out:
        return carried(_open(place, left), plain(model))
    if CARRIED not in place.manifest.files:
        return {}
    opened = (place.folder / CARRIED).open("rb", buffering=0)
    stored = read_header(place.folder / CARRIED)
    return {tensor.name: replace(tensor, opened=opened) for tensor in stored}


def _open(checkpoint: Checkpoint, left: BaseReference) -> Checkpoint | Path:
    path = Path(left.path)
    try:
        if path.is_absolute() and not path.exists():
            raise InputError(f"{path} is not there; {_NAME_IT}")
        if is_checkpoint(path):
            return open_checkpoint(path)
        return resolve_model(left.path, left.revision)
    except InputError as error:
        raise InputError(
            f"{checkpoint.folder}: has an adapter alone, and its base cannot be read: {error}"
        ) from error
