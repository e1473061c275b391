"""Tiles back from a checkpoint, straight into their planes, by many threads at once."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from megatrain.checkpoint.manifest import Checkpoint, TileRecord
from megatrain.checkpoint.snapshot import file_name, planes_of
from megatrain.device import Buffer
from megatrain.errors import InputError
from megatrain.model.safetensors_io import DTYPE_NAMES, DTYPES, Stored, read_header
from megatrain.optim import Plane
from megatrain.store.store import Tile
from megatrain.tile import Entry


@dataclass(frozen=True)
class _Range:
    """Bytes `start` to `stop` of a file and where they go (as many, uint8)."""

    start: int
    stop: int
    target: Buffer


def read_tiles(checkpoint: Checkpoint, tiles: Sequence[Tile], threads: int) -> None:
    """Fill every plane and version of `tiles`; every byte read is checked first or as it arrives.

    Parameters are found by name, wherever the checkpoint's tiles had them; those that it leaves out
    stay as they are. Each thread takes room for a piece at most, and only where a piece cannot be
    read into its plane as a whole. After an error the planes hold anything.

    Raises:
        InputError: a file is damaged, or the checkpoint is one of other parameters or planes.
    """
    _check(checkpoint, tiles)
    _run(_pieces(checkpoint, tiles), threads)
    records = checkpoint.manifest.tiles
    of_tile = {record.name: record.version for record in records}
    of_parameter = {each.name: record.version for record in records for each in record.parameters}
    for tile in tiles:
        first = next((entry.name for entry in tile.layout.entries), None)
        tile.version = of_tile.get(tile.name, 0) if first is None else of_parameter.get(first, 0)


def read_planes(
    checkpoint: Checkpoint, tile: Tile, wanted: Collection[Plane], threads: int
) -> None:
    """Fill some planes of one tile from a checkpoint that `read_tiles` has read for all tiles.

    Raises:
        InputError: a file is damaged, or does not have them.
    """
    _check(checkpoint, [tile], wanted)
    _run(_pieces(checkpoint, [tile], wanted), threads)


def _run(reads: Iterable[Callable[[], None]], threads: int) -> None:
    with ThreadPoolExecutor(threads, thread_name_prefix="read-checkpoint") as pool:
        running = [pool.submit(read) for read in reads]
        try:
            for future in running:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _check(
    checkpoint: Checkpoint, tiles: Sequence[Tile], only: Collection[Plane] | None = None
) -> None:
    """Raises InputError: the checkpoint has other parameters than `tiles`, or other planes."""
    for mismatch in _mismatches(checkpoint, tiles, only):
        raise InputError(f"{checkpoint.folder}: {mismatch}; it is of another model or precision")


def _mismatches(
    checkpoint: Checkpoint, tiles: Sequence[Tile], only: Collection[Plane] | None
) -> Iterator[str]:
    left_out, tile_records = checkpoint.settings.left_out is not None, checkpoint.manifest.tiles
    saved = {each.name: (record, each) for record in tile_records for each in record.parameters}
    for tile, entry in [(t, entry) for t in tiles for entry in t.layout.entries]:
        if entry.name not in saved:
            if not left_out or entry.group is not None:
                yield f"it has no parameter {entry.name!r}"
            continue
        record, parameter = saved.pop(entry.name)
        if parameter.shape != entry.shape:
            yield f"{entry.name!r} has shape {parameter.shape} instead of {entry.shape}"
        if parameter.entry.packed != entry.packed:
            yield f"{entry.name!r} is kept as {parameter.packed or 'its values'} there"
        end = parameter.offset + parameter.entry.stored
        for name, wanted in planes_of(tile).items():
            if not wanted.has(entry) or (only is not None and wanted not in only):
                continue
            plane, dtype = record.planes.get(name), DTYPE_NAMES[wanted.dtype]
            if plane is None or plane.numel < wanted.place(parameter.offset, end).stop:
                yield f"it has no {name} of {entry.name!r}"
            elif plane.dtype != dtype:
                yield f"{name} of {entry.name!r} is {plane.dtype}, not {dtype}"
    if saved and only is None:
        yield f"its parameter {min(saved)!r} is unknown to the model"


def _pieces(
    checkpoint: Checkpoint, tiles: Sequence[Tile], only: Collection[Plane] | None = None
) -> Iterator[Callable[[], None]]:
    """A function for each piece of the checkpoint's files, which reads it into `tiles`."""
    places = {entry.name: (tile, entry) for tile in tiles for entry in tile.layout.entries}
    others_read = only is not None or any(tile.layout.ranks > 1 for tile in tiles)
    for record in checkpoint.manifest.tiles:
        stored = tile_planes(checkpoint, record)
        if only is not None:
            names = {file_name(plane) for plane in only}
            stored = {name: plane for name, plane in stored.items() if name in names}
        ranges = list(_ranges(record, stored, places))
        for offset, num_bytes, checksum in checkpoint.manifest.files[record.file].spans():
            inside = [r for r in ranges if r.start < offset + num_bytes and offset < r.stop]
            if inside or not others_read:  # all else another rank or call reads, and checks
                span = (offset, num_bytes, checksum)
                yield partial(_read_piece, checkpoint, record.file, span, inside)


def tile_planes(checkpoint: Checkpoint, record: TileRecord) -> dict[str, Stored]:
    """The places of planes in a tile's file.

    Raises:
        InputError: the file does not have the planes that the manifest says.
    """
    path = checkpoint.folder / record.file
    _, first, checksum = next(checkpoint.manifest.files[record.file].spans(), (0, 0, ""))
    with checkpoint.open(record.file) as file:
        file.read(memoryview(bytearray(first)), 0, checksum)
    stored = {each.name: each for each in read_header(path)}
    said = {n: (DTYPES[plane.dtype], (plane.numel,)) for n, plane in record.planes.items()}
    if {n: (each.dtype, each.shape) for n, each in stored.items()} != said:
        raise InputError(f"{path}: its planes are not those that the manifest gives tile "
                         f"{record.name!r}; the checkpoint is damaged")  # fmt: skip
    return stored


def _ranges(
    record: TileRecord, stored: dict[str, Stored], places: dict[str, tuple[Tile, Entry]]
) -> Iterator[_Range]:
    """The target of every byte of a tile's file: whole planes if the layout is as it was."""
    tile = next((places[p.name][0] for p in record.parameters if p.name in places), None)
    if tile is None:
        return
    saved = [(p.name, p.shape, p.offset, p.entry.packed) for p in record.parameters]
    entries = [(e.name, e.shape, e.offset, e.packed) for e in tile.layout.entries]
    for name, plane in stored.items():
        kind = planes_of(tile).get(name)
        if kind is not None and saved == entries:
            whole = tile.planes[kind]
            if len(whole.data) == plane.shape[0]:
                yield _Range(plane.start, plane.start + plane.num_bytes, whole.as_bytes())
                continue
        size = plane.dtype.itemsize
        for parameter in (p for p in record.parameters if p.name in places):
            there, entry = places[parameter.name]
            kind = planes_of(there).get(name)
            if kind is None or not kind.has(entry):
                continue
            here, own = there.place(entry)
            at = kind.place(parameter.offset + own.start, parameter.offset + own.stop)
            to = kind.place(here.start, here.stop)
            start = plane.start + at.start * size
            target = there.planes[kind].piece(to.start, to.stop).as_bytes()
            if len(target.data):
                yield _Range(start, start + len(target.data), target)


def _read_piece(
    checkpoint: Checkpoint, name: str, span: tuple[int, int, str], ranges: list[_Range]
) -> None:
    """Read a piece of a file into the `ranges` that lie in it; directly into a single one."""
    offset, num_bytes, checksum = span
    with checkpoint.open(name) as file:
        if len(ranges) == 1:
            at = offset - ranges[0].start
            target = ranges[0].target.data[max(at, 0) :][:num_bytes]
            if at >= 0 and len(target) == num_bytes and target.is_cpu:
                return file.read(target.numpy().data, offset, checksum)
        data = torch.empty(num_bytes, dtype=torch.uint8)
        file.read(data.numpy().data, offset, checksum)
    for part in ranges:
        start, stop = max(part.start, offset), min(part.stop, offset + num_bytes)
        with part.target.writing(slice(start - part.start, stop - part.start)) as place:
            place.copy_(data[start - offset : stop - offset])
    return None
