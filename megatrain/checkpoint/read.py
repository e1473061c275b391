"""Tiles back from a checkpoint, straight into their planes, by many threads at once."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.checkpoint.files import OldFile
from megatrain.checkpoint.manifest import Checkpoint, Parameter, TileRecord
from megatrain.checkpoint.snapshot import dtype_name, file_name, planes_of
from megatrain.device import Buffer
from megatrain.errors import InputError
from megatrain.model.safetensors_io import DTYPES, Stored, read_header
from megatrain.optim import Plane
from megatrain.store import Tile
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
    _Match(checkpoint, tiles).check()
    _run(_jobs(checkpoint, tiles), threads)
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
    _Match(checkpoint, [tile], wanted).check()
    _run((job for job in _jobs(checkpoint, [tile], wanted) if job.ranges), threads)


def _run(jobs: Iterable["_Job"], threads: int) -> None:
    with ThreadPoolExecutor(threads, thread_name_prefix="read-checkpoint") as pool:
        reads = [pool.submit(job) for job in jobs]
        try:
            for each in reads:
                each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@dataclass
class _Match:
    """Compares the checkpoint's parameters with the parameters that are to be filled."""

    checkpoint: Checkpoint
    tiles: Sequence[Tile]
    only: Collection[Plane] | None = None  # of one of the tiles

    def check(self) -> None:
        left_out = self.checkpoint.settings.left_out is not None
        saved = {
            each.name: (record, each)
            for record in self.checkpoint.manifest.tiles
            for each in record.parameters
        }
        for tile in self.tiles:
            for entry in tile.layout.entries:
                if entry.name not in saved and left_out and entry.group is None:
                    continue
                if entry.name not in saved:
                    self._refuse(f"it has no parameter {entry.name!r}")
                record, parameter = saved.pop(entry.name)
                self._check_parameter(tile, entry, record, parameter)
        if saved and self.only is None:
            self._refuse(f"its parameter {min(saved)!r} is unknown to the model")

    def _check_parameter(
        self, tile: Tile, entry: Entry, record: TileRecord, parameter: Parameter
    ) -> None:
        if parameter.shape != entry.shape:
            self._refuse(f"{entry.name!r} has shape {parameter.shape} instead of {entry.shape}")
        if parameter.entry.packed != entry.packed:
            self._refuse(f"{entry.name!r} is kept as {parameter.packed or 'its values'} there")
        end = parameter.offset + parameter.entry.stored
        for name, wanted in planes_of(tile).items():
            if not wanted.has(entry) or (self.only is not None and wanted not in self.only):
                continue
            plane = record.planes.get(name)
            if plane is None or plane.numel < wanted.place(parameter.offset, end).stop:
                self._refuse(f"it has no {name} of {entry.name!r}")
            elif plane.dtype != dtype_name(wanted):
                self._refuse(f"{name} of {entry.name!r} is {plane.dtype}, not {dtype_name(wanted)}")

    def _refuse(self, what: str) -> None:
        raise InputError(f"{self.checkpoint.folder}: {what}; it is of another model or precision")


def _jobs(
    checkpoint: Checkpoint, tiles: Sequence[Tile], only: Collection[Plane] | None = None
) -> Iterator["_Job"]:
    places = {entry.name: (tile, entry) for tile in tiles for entry in tile.layout.entries}
    for record in checkpoint.manifest.tiles:
        stored = tile_planes(checkpoint, record)
        if only is not None:
            names = {file_name(plane) for plane in only}
            stored = {name: plane for name, plane in stored.items() if name in names}
        ranges = list(_ranges(record, stored, places))
        for offset, num_bytes, checksum in checkpoint.manifest.files[record.file].spans():
            inside = [r for r in ranges if r.start < offset + num_bytes and offset < r.stop]
            if not inside and any(tile.layout.ranks > 1 for tile in tiles):
                continue  # another rank reads, and checks, it
            yield _Job(checkpoint, record.file, offset, num_bytes, checksum, inside)


def tile_planes(checkpoint: Checkpoint, record: TileRecord) -> dict[str, Stored]:
    """Where the planes of a tile's file lie.

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
    """Where every byte of a tile's file goes: whole planes if the layout is as it was."""
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


@dataclass(frozen=True)
class _Job:
    """One piece of a file and the ranges that lie in it."""

    checkpoint: Checkpoint
    file: str
    offset: int
    num_bytes: int
    checksum: str
    ranges: list[_Range]

    def __call__(self) -> None:
        with self.checkpoint.open(self.file) as file:
            if len(self.ranges) == 1:
                [only] = self.ranges
                at = self.offset - only.start
                target = only.target.data[max(at, 0) :][: self.num_bytes]
                if at >= 0 and len(target) == self.num_bytes and target.is_cpu:
                    return self._read(file, target)
            data = torch.empty(self.num_bytes, dtype=torch.uint8)
            self._read(file, data)
        for each in self.ranges:
            start, stop = max(each.start, self.offset), min(each.stop, self.offset + self.num_bytes)
            with each.target.writing(slice(start - each.start, stop - each.start)) as place:
                place.copy_(data[start - self.offset : stop - self.offset])
        return None

    def _read(self, file: OldFile, target: Tensor) -> None:
        file.read(target.numpy().data, self.offset, self.checksum)
