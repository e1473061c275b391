"""The base of an adapter, which its checkpoints leave out: it is read again from where it was.

A base whose values are others is refused: training would go on, on another model.
"""

import logging
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
from megatrain.checkpoint.manifest import CARRIED, TILES
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
from megatrain.telemetry.cores import update_threads
from megatrain.tile import Entry
from megatrain.tile.packed import PACKINGS

Write = Callable[[str, Tensor], None]

_NAME_IT = (
    "name its new place: --base-model PLACE (of train and branch: --set model.base_model=PLACE; in "
    "Python: base_model)"
)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", f"{TILES}/*")  # of a folder, a checkpoint

_log = logging.getLogger(__name__)


class Fingerprint:
    """A hash of tensors (dtype, shape, every byte) that come in any order, from any thread."""

    def __init__(self, algorithm: str = ALGORITHM) -> None:
        self._algorithm = algorithm
        self._sums: dict[str, str] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Note a tensor that came."""
        flat = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        shape = "x".join(map(str, values.shape))
        self._sums[name] = f"{values.dtype} {shape} {ALGORITHMS[self._algorithm](flat.data)}"

    def lacking(self, names: Iterable[str]) -> set[str]:
        """The names of which no tensor came."""
        return {*names} - self._sums.keys()

    def of(self, names: Iterable[str]) -> str:
        """The fingerprint of the named tensors together, behind the name of its algorithm."""
        lines = "\n".join(f"{name} {self._sums.get(name)}" for name in sorted(names))
        return f"{self._algorithm}:{ALGORITHMS[self._algorithm](lines.encode())}"


@dataclass
class Origin:
    """The place that a model's weights were read from, and a hash of them.

    Attributes:
        path: a folder, a checkpoint or a hub id.
        revision: of a hub id.
        fingerprint: of all that is not trained.
    """

    path: str
    revision: str | None = None
    fingerprint: Fingerprint = field(default_factory=Fingerprint)

    def __post_init__(self) -> None:
        self._files = self._stamps()

    def is_as_read(self) -> bool:
        """True if its files have the sizes and times that they had when this was made."""
        return self._stamps() == self._files

    def _stamps(self) -> set[tuple[str, int, int]] | None:
        """Name, size and time of each file of weights; None: one is gone, or cannot be seen.

        Of a hub id there are none: the cache names files by what is in them.
        """
        if self.revision is not None:
            return set()
        try:
            files = [path for pattern in _WEIGHTS for path in Path(self.path).glob(pattern)]
            return {(str(p), s.st_size, s.st_mtime_ns) for p in files for s in [p.stat()]}
        except OSError:
            return None


def origin_of(checkpoint: Checkpoint, *, resumes: bool) -> Origin | None:
    """The place of an adapter's base, where it is trained on a checkpoint or goes on from it.

    None where its values are no file's: those of another adapter's, or unpacked.
    """
    settings = checkpoint.settings
    if left := settings.left_out:
        return Origin(left.path, left.revision) if resumes or not left.packed else None
    return Origin(str(checkpoint.folder.absolute())) if settings.adapter is None else None


def say_if_changed(origin: Origin | None, then: str) -> bool:
    """True if the base of an adapter has changed since it was read; warns of it, and of `then`."""
    if origin is None or origin.is_as_read():
        return False
    _log.warning("%s: the base has been changed or moved since it was read; %s", origin.path, then)
    return True


def place_of(base: str | Path) -> tuple[str, str | None]:
    """A model's folder, whole, or its hub id with the revision that is there now.

    Raises:
        InputError: there is no such model.
    """
    folder = Path(base).expanduser()
    if folder.exists():
        return str(folder.absolute()), None
    return str(base), resolve_model(base).name


def with_base(checkpoint: Checkpoint, base: str | Path | None) -> Checkpoint:
    """The checkpoint of an adapter with its base at another place: the base has moved.

    Its values are compared when they are read, and later checkpoints and exports name this place.

    Args:
        base: a folder, a checkpoint or a hub id; None: where it was.

    Raises:
        InputError: the checkpoint has no adapter, or there is no such model.
    """
    settings = checkpoint.settings
    if base is None:
        return checkpoint
    if settings.adapter is None:
        raise no_adapter(checkpoint.folder)
    path, revision = place_of(base)
    left = settings.left_out and replace(settings.left_out, path=path, revision=revision)
    named = {"base_model_name_or_path": path, "revision": revision}
    configs = {name: each | named for name, each in settings.adapter["configs"].items()}
    settings = replace(settings, left_out=left, adapter={**settings.adapter, "configs": configs})
    return replace(checkpoint, manifest=replace(checkpoint.manifest, settings=settings))


def no_adapter(model: object) -> InputError:
    """The error for a base's place that is given with a model that has no adapter."""
    return InputError(f"{model}: has no adapter, whose base could have moved; leave base_model out")


def base_reference(
    model: PreTrainedModel,
    origin: Origin | None,
    entries: Iterable[Entry],
    folder: Path,
    ranks: Ranks,
) -> BaseReference | None:
    """The base that a checkpoint of an adapter leaves out; None: it has everything.

    A base that is a checkpoint of ours is marked, so that it stays.

    Args:
        origin: of the base; None: it was not read, or not all of it.
        entries: all parameters of the model.
        folder: of the checkpoint, which takes the place of what is there.
        ranks: which all call this, and are given the same.
    """
    references = ranks.all_gather_object(_base_reference(model, origin, entries, folder))
    return references[0] if all(references) else None


def _base_reference(
    model: PreTrainedModel, origin: Origin | None, entries: Iterable[Entry], folder: Path
) -> BaseReference | None:
    adapters, frozen = adapted(model), [entry for entry in entries if entry.group is None]
    if adapters is None or origin is None or any(e.name not in adapters.held for e in frozen):
        return None
    base = Path(origin.path)
    if say_if_changed(origin, "so this checkpoint has all of the model"):
        return None
    if origin.revision is None and base.resolve() == folder.resolve():
        return None  # it is about to be replaced
    if is_checkpoint(base):
        try:
            mark(base)
        except OSError:  # who may not write there cannot see to it that it stays
            return None
    packed = {entry.name: entry.packed.name for entry in frozen if entry.packed}
    fingerprint = origin.fingerprint.of(entry.name for entry in frozen)
    return BaseReference(origin.path, origin.revision, fingerprint, packed)


def left_out_names(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, str]:
    """The parameters that a checkpoint leaves out: names in the base, and in the model."""
    adapters = adapted(model)
    if checkpoint.settings.left_out is None or adapters is None:
        return {}
    saved = {parameter.name for tile in checkpoint.manifest.tiles for parameter in tile.parameters}
    return {
        adapters.held[name]: name
        for name, _ in model.named_parameters()
        if name in adapters.held and name not in saved
    }


def read_left_out(
    checkpoint: Checkpoint, model: PreTrainedModel, write: Write, *, as_came: bool = False
) -> set[str]:
    """Hand what a checkpoint leaves out to `write`, by many threads at a time.

    Returns the names of what the base never had, such as a head of which the adapter has a copy.

    Args:
        as_came: also what is packed, which else has the values that were computed with.

    Raises:
        InputError: the base is not there, or is another one.
    """
    names, left = left_out_names(checkpoint, model), checkpoint.settings.left_out
    found = adapted(model)
    if left is None or found is None:
        return set()
    seen = Fingerprint(left.fingerprint.partition(":")[0])

    def hand_out(name: str, values: Tensor) -> None:
        if name in names:
            seen.add(names[name], values)
            write(names[name], values if as_came else _kept(left, model, names[name], values))

    base = _open(checkpoint, left)
    if isinstance(base, Checkpoint):
        whole = masters(base)
        with ThreadPoolExecutor(update_threads(), thread_name_prefix="read-base") as pool:
            list(pool.map(lambda name: hand_out(name, whole[name]()), names.keys() & whole.keys()))
    else:
        kept = {name for name, mine in names.items() if mine in left.packed}
        try:
            read_weights(base, found.base, hand_out, threads=update_threads(), packed=kept)
        except InputError as error:
            raise InputError(
                f"{left.path}: is not the base that {checkpoint.folder} was trained on ({error}); "
                f"put the base back as it was, or {_NAME_IT}"
            ) from error
    if seen.of(names.values()) != left.fingerprint:
        raise InputError(
            f"{left.path}: its weights are not those that {checkpoint.folder} was trained on; put "
            f"the base back as it was, or {_NAME_IT}"
        )
    return seen.lacking(names.values())


def carried(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, Stored]:
    """The tensors of a model's source that its class has no place for; see `carried_tensors`.

    Raises:
        InputError: the base, which a checkpoint of an adapter leaves out, is not there.
    """
    left, path = checkpoint.settings.left_out, checkpoint.folder / CARRIED
    if left is None:
        whole = read_header(path) if CARRIED in checkpoint.manifest.files else []
        opened = path.open("rb", buffering=0) if whole else None
        return {each.name: replace(each, opened=opened) for each in whole}
    base = _open(checkpoint, left)
    if isinstance(base, Checkpoint):
        return carried(base, plain(model))
    return carried_tensors(base, plain(model))


def whole_masters(checkpoint: Checkpoint, model: PreTrainedModel) -> Values:
    """All `masters`, those of the base too, which is read twice: to be checked first.

    Raises:
        InputError: a file is damaged, or the base is not there, or is another one.
    """
    names, left = left_out_names(checkpoint, model), checkpoint.settings.left_out
    found, own = adapted(model), masters(checkpoint)
    if left is None or found is None:
        return own
    read_left_out(checkpoint, model, lambda name, values: None, as_came=True)
    base = _open(checkpoint, left)
    if isinstance(base, Checkpoint):
        whole, already = masters(base), set[str]()
    else:
        whole, already = lazy_weights(base, found.base), {*stored_packings(base, found.base)}

    def read(name: str, mine: str) -> Tensor:
        return whole[name]() if name in already else _kept(left, model, mine, whole[name]())

    return {**own, **{mine: partial(read, name, mine) for name, mine in names.items()}}


def _kept(left: BaseReference, model: PreTrainedModel, name: str, came: Tensor) -> Tensor:
    """The values that layers are computed with."""
    if name not in left.packed:
        return came
    packing = PACKINGS[left.packed[name]]
    stored = came if came.dtype == torch.uint8 else packing.pack(came)
    return packing.unpacked(stored, model.get_parameter(name).shape)


def _open(checkpoint: Checkpoint, left: BaseReference) -> Checkpoint | Path:
    path = Path(left.path)
    try:
        if path.is_absolute() and not path.exists():
            raise InputError(f"{path} is not there; put it back, or {_NAME_IT}")
        if is_checkpoint(path):
            return open_checkpoint(path)
        return resolve_model(left.path, left.revision)
    except InputError as error:
        raise InputError(
            f"{checkpoint.folder}: has an adapter alone, and its base cannot be read: {error}"
        ) from error
