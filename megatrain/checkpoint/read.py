"""Reads tiles, or masters alone, from a checkpoint, and checks every byte that is used."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import call

import torch
from torch import Tensor

from megatrain import kernels
from megatrain.checkpoint.files import PieceSum
from megatrain.checkpoint.manifest import Checkpoint, Parameter, TileRecord
from megatrain.device import Buffer
from megatrain.errors import InputError
from megatrain.model.safetensors_io import DTYPE_NAMES, DTYPES, Stored, read_header
from megatrain.optim import Plane
from megatrain.store.store import Tile
from megatrain.tile import Entry

_READERS = 4  # threads that check weights


@dataclass(frozen=True)
class _Range:
    """Bytes `start` to `stop` of a file, and the memory (uint8, as long) that they go to."""

    start: int
    stop: int
    target: Buffer


def read_tiles(checkpoint: Checkpoint, tiles: Sequence[Tile], threads: int) -> None:
    """Fill all planes and versions of `tiles`, and check every byte while it is read.

    Parameters are matched by name, whatever the layout of the checkpoint's tiles. Parameters that
    the checkpoint leaves out stay as they are. Each thread may need memory for one piece. After an
    error the planes hold arbitrary values.

    Raises InputError: a file is damaged, or the checkpoint has other parameters or planes.
    """
    for mismatch in _mismatches(checkpoint, tiles):
        raise InputError(f"{checkpoint.folder}: {mismatch}; it is of another model or precision")
    with ThreadPoolExecutor(threads, thread_name_prefix="read-checkpoint") as pool:
        list(pool.map(call, _pieces(checkpoint, tiles)))  # an error cancels the other pieces
    records = checkpoint.manifest.tiles
    # by names of tiles and of parameters, which the checkpoint may have in other tiles
    versions = {record.name: record.version for record in records}
    versions |= {p.name: record.version for record in records for p in record.parameters}
    skipped = {p.name: p.skipped for p in checkpoint.manifest.parameters if p.skipped}
    for tile in tiles:
        tile.skipped = Counter({n: skipped[n] for n in tile.layout.by_name if n in skipped})
        first_name = next((entry.name for entry in tile.layout.entries), tile.name)
        tile.version = versions.get(first_name, 0)


def _mismatches(checkpoint: Checkpoint, tiles: Sequence[Tile]) -> Iterator[str]:
    """Yield each reason why the checkpoint cannot be loaded into `tiles`."""
    leaves_out_base = checkpoint.settings.left_out is not None
    saved = {p.name: (record, p) for record in checkpoint.manifest.tiles for p in record.parameters}
    for tile, entry in [(t, entry) for t in tiles for entry in t.layout.entries]:
        if entry.name not in saved:
            if entry.group is not None or not leaves_out_base:  # trained, or not left out
                yield f"it has no parameter {entry.name!r}"
            continue
        record, parameter = saved.pop(entry.name)
        if parameter.shape != entry.shape:
            yield f"{entry.name!r} has shape {parameter.shape} instead of {entry.shape}"
        if parameter.entry.packed != entry.packed:
            yield f"{entry.name!r} is kept as {parameter.packed or 'its values'} there"
        end = parameter.offset + parameter.entry.stored
        for plane_name, plane in planes_of(tile).items():
            if not plane.has(entry):
                continue
            saved_plane, dtype = record.planes.get(plane_name), DTYPE_NAMES[plane.dtype]
            if saved_plane is None or saved_plane.numel < plane.place(parameter.offset, end).stop:
                yield f"it has no {plane_name} of {entry.name!r}"
            elif saved_plane.dtype != dtype:
                yield f"{plane_name} of {entry.name!r} is {saved_plane.dtype}, not {dtype}"
    if saved:
        yield f"its parameter {min(saved)!r} is unknown to the model"


def planes_of(tile: Tile) -> dict[str, Plane]:
    """A tile's planes by their names in files; wide dtypes come first, so all are aligned."""
    states_first = sorted(tile.planes, key=lambda plane: plane not in tile.states)
    wide_first = sorted(states_first, key=lambda plane: -plane.dtype.itemsize)
    return {plane.name.replace(" ", "_"): plane for plane in wide_first}


def _pieces(checkpoint: Checkpoint, tiles: Sequence[Tile]) -> Iterator[Callable[[], None]]:
    """Yield functions that each read one piece of the checkpoint's files into `tiles`."""
    reads_part = any(tile.layout.ranks > 1 for tile in tiles)  # other ranks read other pieces
    places = {entry.name: (tile, entry) for tile in tiles for entry in tile.layout.entries}
    for record in checkpoint.manifest.tiles:
        ranges = list(_ranges(record, tile_planes(checkpoint, record), places))
        for piece in checkpoint.manifest.files[record.file].spans():
            stop = piece.offset + piece.num_bytes
            overlapping = [r for r in ranges if r.start < stop and piece.offset < r.stop]
            if overlapping or not reads_part:
                yield partial(_read_piece, checkpoint, record.file, piece, overlapping)


def tile_planes(checkpoint: Checkpoint, record: TileRecord) -> dict[str, Stored]:
    """The places of planes in a tile's file. Raises InputError: they contradict the manifest."""
    path = checkpoint.folder / record.file
    _, num_bytes, checksum = next(checkpoint.manifest.files[record.file].spans(), (0, 0, ""))
    # Read for the checksum alone: the first piece has the header, which is parsed next.
    checkpoint.read(record.file, memoryview(bytearray(num_bytes)), 0, checksum)
    stored = {tensor.name: tensor for tensor in read_header(path)}
    planes = {n: (DTYPES[plane.dtype], (plane.numel,)) for n, plane in record.planes.items()}
    if {n: (tensor.dtype, tensor.shape) for n, tensor in stored.items()} != planes:
        raise InputError(f"{path}: its planes are not those that the manifest gives tile "
                         f"{record.name!r}; the checkpoint is damaged")  # fmt: skip
    return stored


def _ranges(
    record: TileRecord, stored: dict[str, Stored], places: dict[str, tuple[Tile, Entry]]
) -> Iterator[_Range]:
    """Yield the ranges of a tile's file with values of the parameters in `places`."""
    for parameter in (p for p in record.parameters if p.name in places):
        tile, entry = places[parameter.name]
        place, part = tile.place(entry)  # in the tile, and in the parameter
        offset = parameter.offset
        for name, plane in planes_of(tile).items():
            if name not in stored or not plane.has(entry):
                continue
            saved, source = stored[name], plane.place(offset + part.start, offset + part.stop)
            start = saved.start + source.start * saved.dtype.itemsize
            place_in_plane = plane.place(place.start, place.stop)
            target = tile.planes[plane].piece(place_in_plane.start, place_in_plane.stop).as_bytes()
            if len(target.data):
                yield _Range(start, start + len(target.data), target)


def _read_piece(checkpoint: Checkpoint, name: str, piece: PieceSum, ranges: list[_Range]) -> None:
    """Read a piece of a file into its `ranges`: directly, if one host range takes all of it."""
    offset, num_bytes, checksum = piece
    if len(ranges) == 1:
        position = offset - ranges[0].start
        target = ranges[0].target.data[max(position, 0) :][:num_bytes]
        if position >= 0 and len(target) == num_bytes and target.is_cpu:
            checkpoint.read(name, target.numpy().data, offset, checksum)
            return
    data = torch.empty(num_bytes, dtype=torch.uint8)
    checkpoint.read(name, data.numpy().data, offset, checksum)
    for part in ranges:
        start, stop = max(part.start, offset), min(part.stop, offset + num_bytes)
        with part.target.writing(slice(start - part.start, stop - part.start)) as memory:
            memory.copy_(data[start - offset : stop - offset])


def masters(checkpoint: Checkpoint) -> dict[str, Callable[[], Tensor]]:
    """Functions that read each parameter's exact fp32 master to the CPU, by name.

    Checks the bytes of all masters first, but not those of the optimizer's states.
    """
    values: dict[str, Callable[[], Tensor]] = {}
    checks: list[Callable[[], None]] = []
    for tile in checkpoint.manifest.tiles:
        planes = tile_planes(checkpoint, tile)
        for plane in (planes[name] for name in ("weights", "remainder") if name in planes):
            stop = plane.start + plane.num_bytes
            checks.append(partial(checkpoint.check_file, tile.file, plane.start, stop))
        values |= {p.name: partial(_master, planes, p) for p in tile.parameters}
    with ThreadPoolExecutor(_READERS, thread_name_prefix="check-checkpoint") as pool:
        list(pool.map(call, checks))
    return values


def _master(planes: dict[str, Stored], parameter: Parameter) -> Tensor:
    weights, packed = _values(planes["weights"], parameter), parameter.entry.packed
    if packed is not None:
        return packed.unpacked(weights, parameter.shape)
    remainder = planes.get("remainder")
    if remainder is None or parameter.offset >= remainder.shape[0]:  # frozen, and exact in bf16
        return weights.float().view(parameter.shape)
    master = torch.empty(weights.numel(), dtype=torch.float32)
    kernels.join(weights, _values(remainder, parameter), master, threads=1)
    return master.view(parameter.shape)


def _values(plane: Stored, parameter: Parameter) -> Tensor:
    size = plane.dtype.itemsize
    data = plane.read_bytes(parameter.offset * size, parameter.entry.stored * size)
    return data.view(plane.dtype)
