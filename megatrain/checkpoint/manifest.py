"""Checkpoints in a run's folder, and their manifests (`manifest.json`).

A manifest is validated before anything in it is used.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import dropwhile, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Interval, Len, Predicate

from megatrain.base.json_yaml import MAX_JSON_BYTES, MAX_NAME_LENGTH, parse_object, read_json
from megatrain.base.whole_files import fill, forget_pages
from megatrain.checkpoint import files
from megatrain.errors import InputError, explained, in_one_line
from megatrain.model.companions import tokenizer_files
from megatrain.model.safetensors_io import DTYPES, MAX_DIMENSIONS
from megatrain.placement import Precision
from megatrain.tile import Entry, TileKind
from megatrain.tile.formats import PACKINGS

MANIFEST, EXTRA, BUFFERS, COMPUTED, CARRIED, MODEL, TILES, KEEP = (
    "manifest.json", "extra.json", "buffers.safetensors", "computed_buffers.safetensors",
    "carried.safetensors", "model", "tiles", "keep",
)  # fmt: skip
_OWN_NAMES = {MANIFEST, EXTRA, BUFFERS, COMPUTED, CARRIED, MODEL, TILES, KEEP}

_LARGEST = 2**62  # of any number that counts bytes or elements
Dtype = Annotated[str, Predicate(("float32", "bfloat16", "float16").__contains__)]
Count = Annotated[int, Interval(ge=0, lt=_LARGEST)]


class _Strict:
    """Lets pydantic convert no values and accept no unknown fields."""

    __pydantic_config__: ClassVar = {"strict": True, "extra": "forbid"}


def lies_inside(name: str) -> bool:
    """True if a file of this name lies inside the checkpoint's folder on every system."""
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & {*name.split("/")}


@dataclass(frozen=True)
class FileRecord(_Strict):
    """One file: its size, and `(bytes, checksum)` of each of its pieces in order."""

    num_bytes: Count
    pieces: tuple[tuple[Annotated[int, Interval(ge=1, le=files.MAX_PIECE_BYTES)], str], ...]

    def spans(self) -> Iterator[files.PieceSum]:
        """The pieces with their places."""
        offset = 0
        for num_bytes, checksum in self.pieces:
            yield files.PieceSum(offset, num_bytes, checksum)
            offset += num_bytes


@dataclass(frozen=True)
class Plane(_Strict):
    """One flat tensor of a tile's file; `dtype` is its name in safetensors."""

    dtype: Annotated[str, Predicate(DTYPES.__contains__)]
    numel: Count


@dataclass(frozen=True)
class Parameter(_Strict):
    """A parameter's place in its tile's planes: `offset` in elements, the same in each plane.

    The optimizer's planes hold only parameters with a group; a frozen parameter has no group.
    `skipped`: updates of the tile that left the parameter out, because it had no gradient.
    """

    name: Annotated[str, Len(0, MAX_NAME_LENGTH)]
    shape: Annotated[tuple[Count, ...], Len(0, MAX_DIMENSIONS)]
    offset: Count
    group: Count | None
    packed: Annotated[str, Predicate(PACKINGS.__contains__)] | None = None
    skipped: Count = 0

    @property
    def entry(self) -> Entry:
        """The parameter as an entry of a tile."""
        packed = None if self.packed is None else PACKINGS[self.packed]
        return Entry(self.name, self.shape, self.offset, self.group, packed=packed)


@dataclass(frozen=True)
class TileRecord(_Strict):
    """One tile: the file of its planes; `version` is the number of its updates."""

    name: str
    file: str
    version: Count
    planes: dict[str, Plane]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class BaseReference(_Strict):
    """Names the base of an adapter, whose frozen weights are read again from their source."""

    path: str  # the base's folder, checkpoint or hub id, with the hub's `revision`
    revision: str | None
    fingerprint: str  # of the values of all parameters that the checkpoint leaves out
    packed: dict[str, str]  # the formats of packed parameters, by name
    # fingerprint of the base's tensors without a use; None in older checkpoints
    carried: str | None = None


@dataclass(frozen=True)
class Settings(_Strict):
    """All settings of an engine, without its tiles.

    Attributes:
        attn_implementation, experts_implementation: of each configuration inside the model's.
        frozen_dtypes: dtypes of the frozen parameters whose source has another one than `dtype`.
        adapter: configurations of PEFT, by the adapters' names, and the active one's name.
        left_out: the base, if its parameters are not in the tiles; None: all are in the tiles.
    """

    steps: Count
    seed: int
    precision: Precision
    max_grad_norm: float | None
    device: str
    placement: dict[str, Any]
    dtype: Dtype  # that of the model's source, in which exports are written
    model_class: str
    attn_implementation: dict[str, str]
    frozen: tuple[str, ...]
    optimizer: dict[str, Any] | None
    groups: tuple[dict[str, Any], ...]  # torch's parameter groups with their current settings
    num_steps: Count  # the optimizer's own count of steps
    frozen_dtypes: dict[str, Dtype] = field(default_factory=dict)
    experts_implementation: dict[str, str] = field(default_factory=dict)
    base: Literal["bf16", "fp8", "nf4", "folder"] = "bf16"
    adapter: dict[str, Any] | None = None
    left_out: BaseReference | None = None


@dataclass(frozen=True)
class Manifest(_Strict):
    """The whole of `manifest.json`. `algorithm` made all checksums, `checksum` this file's own."""

    format: Literal["megatrain checkpoint"] = field(default="megatrain checkpoint", kw_only=True)
    version: Literal[1] = field(default=1, kw_only=True)
    algorithm: Annotated[str, Predicate(files.ALGORITHMS.__contains__)]
    settings: Settings
    files: dict[Annotated[str, Predicate(lies_inside)], FileRecord]
    tiles: tuple[TileRecord, ...]
    checksum: str = ""

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters of all tiles."""
        return [parameter for tile in self.tiles for parameter in tile.parameters]


def signed(content: dict[str, Any]) -> dict[str, Any]:
    """A manifest's content with the checksum of that content, which comes last."""
    content = {key: value for key, value in content.items() if key != "checksum"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return content | {"checksum": files.ALGORITHMS[content["algorithm"]](text.encode())}


def as_json(extra: dict[str, Any]) -> str:
    """The caller's dictionary as JSON text. Raises InputError: a load could not read it."""
    subject = "the extra state of a checkpoint"
    refusals = TypeError, ValueError, RecursionError
    with explained(f"{subject} cannot be saved", "give plain JSON values", of=refusals):
        text = json.dumps(extra, allow_nan=False)
    if len(text) > MAX_JSON_BYTES:
        raise InputError(f"{subject} takes {len(text)} bytes; {MAX_JSON_BYTES} are allowed")
    parse_object(text.encode(), subject)  # raises InputError now, as a load would later
    return text


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with a valid manifest; `extra`: JSON values that the save's caller gave."""

    folder: Path
    manifest: Manifest
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        return self.manifest.settings

    @property
    def step(self) -> int:
        return self.settings.steps

    @property
    def model_folder(self) -> Path:
        """The folder with the model's configuration and the caller's attached files; no weights."""
        return self.folder / MODEL

    def read(self, name: str, buffer: memoryview, offset: int, checksum: str) -> None:
        """Fill `buffer` from `offset` of a file. Raises InputError: unreadable, link, damaged."""
        path = self.folder / name
        with explained(f"{path}: cannot read it", of=(OSError, EOFError)):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fill(buffer, descriptor, offset)
                forget_pages(descriptor, offset, len(buffer))
            finally:
                os.close(descriptor)
        if files.ALGORITHMS[self.manifest.algorithm](buffer) != checksum:
            raise InputError(
                f"{path}: bytes {offset} to {offset + len(buffer)} are not those that were saved "
                "(checksums differ); the file is damaged or another one"
            )

    def check_file(self, name: str, start: int = 0, stop: int = _LARGEST) -> None:
        """Check a file's pieces between bytes `start` and `stop`. Raises InputError: damaged."""
        record = self.manifest.files[name]
        buffer = memoryview(bytearray(max((size for size, _ in record.pieces), default=0)))
        for offset, num_bytes, checksum in record.spans():
            if start < offset + num_bytes and offset < stop:
                self.read(name, buffer[:num_bytes], offset, checksum)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest; check all sizes, and bytes but for tiles. Raises InputError."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no checkpoint there")
    files.regular_size(folder, MANIFEST)
    manifest = _validated(read_json(folder / MANIFEST), folder / MANIFEST)
    for name, record in manifest.files.items():
        actual = files.regular_size(folder, name)
        if actual != record.num_bytes:
            problem = "truncated" if actual < record.num_bytes else "too long"
            raise InputError(
                f"{folder / name}: {problem}: it has {actual} bytes; {record.num_bytes} were saved"
            )
    for path in tokenizer_files(folder / MODEL) if (folder / MODEL).is_dir() else ():
        if path.relative_to(folder).as_posix() not in manifest.files:
            raise InputError(
                f"{path}: not saved with the checkpoint, and would change its tokenizer; remove it"
            )
    checkpoint = Checkpoint(folder, manifest)
    for name in manifest.files.keys() - {tile.file for tile in manifest.tiles}:
        checkpoint.check_file(name)
    return replace(checkpoint, extra=read_json(folder / EXTRA) if EXTRA in manifest.files else {})


@cache
def _manifest_type() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Manifest)


def _validated(content: dict[str, Any], path: Path) -> Manifest:
    from pydantic import ValidationError

    try:  # from JSON text pydantic also takes lists for tuples, and objects for dataclasses
        manifest: Manifest = _manifest_type().validate_json(json.dumps(content))
        if manifest.checksum != signed(content)["checksum"]:
            raise ValueError("its text was changed after it was saved (its own checksum differs)")
        if lost := {tile.file for tile in manifest.tiles} - manifest.files.keys():
            raise ValueError(f"{min(lost)[:80]!r}, the file of a tile, is not among its files")
        if _is_torn(manifest):
            raise ValueError("its tiles are of different versions, or of more updates than steps")
        return manifest
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        problem = f"{where}: {first['msg'].removeprefix('Input ')}"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    raise InputError(f"{path}: {in_one_line(problem, 400)}; damaged, or of another version")


def _is_torn(manifest: Manifest) -> bool:
    """True if tiles are of different steps; encoders may lag behind, since steps leave them out."""
    in_every_step = [t for t in manifest.tiles if t.name != TileKind.MEDIA.value]
    trained = [t for t in in_every_step if any(p.group is not None for p in t.parameters)]
    newest = max((tile.version for tile in manifest.tiles), default=0)
    return len({tile.version for tile in trained}) > 1 or newest > manifest.settings.steps


def is_checkpoint(folder: str | Path) -> bool:
    """True if a folder has a checkpoint's manifest; the checkpoint may be damaged."""
    return (Path(folder) / MANIFEST).is_file()


def require_replaceable(folder: Path) -> None:
    """Raise InputError if `folder` is a file, or holds files that are no part of a checkpoint."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder}: is a file; give a folder to save to")
    foreign = sorted({path.name for path in folder.iterdir()} - _OWN_NAMES)
    if foreign:
        raise InputError(
            f"{folder}: holds {foreign[0]}, which is no part of a checkpoint and would be lost; "
            "give another folder to save to"
        )


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a checkpoint; check its manifest, small files and all files' sizes, but not its tiles.

    Raises InputError: names the file, what is wrong, and the newest whole checkpoint near it.
    """
    folder = Path(folder)
    try:
        return read_checkpoint(folder)
    except InputError as error:
        within = [*whole_checkpoints(folder), *whole_checkpoints(folder / "checkpoints")]
        hints = within or [path for path in whole_checkpoints(folder.parent) if path != folder]
        hint = f"the newest whole one there is {hints[0]}" if hints else "no whole one is there"
        raise InputError(f"{error}; {hint}") from error


def verify(folder: str | Path) -> Checkpoint:
    """Open a checkpoint and check every byte of every file. Raises InputError: one is damaged."""
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.manifest.files:
        checkpoint.check_file(name)
    return checkpoint


def whole_checkpoints(
    parent: str | Path, refused: Callable[[InputError], object] = lambda error: None
) -> list[Path]:
    """The checkpoints in a folder that `open_checkpoint` accepts, the newest (most steps) first.

    Args: `refused`: called with the error of each other folder or file there.
    """
    complete: list[Checkpoint] = []
    for folder in sorted(Path(parent).glob("[!.]*")):
        try:
            complete.append(read_checkpoint(folder))
        except InputError as error:
            refused(error)
    return [c.folder for c in sorted(complete, key=lambda c: (c.step, c.folder.name), reverse=True)]


def mark(folder: str | Path) -> None:
    """Mark a checkpoint, so that `rotate` never removes it."""
    (Path(folder) / KEEP).touch()


def rotate(
    parent: str | Path, keep_last: int, *, newest: Path | None = None, spared: Collection[Path] = ()
) -> list[Path]:
    """Remove whole checkpoints except the newest `keep_last`, marked and `spared` ones.

    Returns the removed ones. Damaged checkpoints and other folders stay. Checkpoints after `newest`
    stay, too, and do not count: their tiles may be damaged.

    Raises OSError: a checkpoint could not be removed; the others are.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; the newest checkpoint always stays")
    from_newest = dropwhile(lambda path: newest not in (None, path), whole_checkpoints(parent))
    superseded = [path for path in islice(from_newest, keep_last, None) if path not in spared]
    old = [path for path in superseded if not (path / KEEP).exists()]
    failures = []
    for folder in old:
        try:
            files.remove(folder)
        except OSError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return old
