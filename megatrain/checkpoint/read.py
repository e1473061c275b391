"""Tiles, or the weights alone, back from a checkpoint: every byte that is taken is checked."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatrain import kernels
from megatrain.checkpoint.folders import offering_another
from megatrain.checkpoint.manifest import Checkpoint, Parameter, TileRecord
from megatrain.checkpoint.snapshot import planes_of
from megatrain.device import Buffer
from megatrain.errors import InputError
from megatrain.kernels.reference import join_block, split_block
from megatrain.model.safetensors_io import DTYPE_NAMES, DTYPES, Stored, read_header
from megatrain.optim import Plane, PlaneKind, Rule
from megatrain.store.store import Tile
from megatrain.tile import Entry
from megatrain.tile.layout import ALIGNMENT, MOST_ELEMENTS

_log = logging.getLogger(__name__)

_READERS = 4  # threads that check weights
# Elements converted at a time: what is made meanwhile stays small.
_PIECE = ALIGNMENT << 15


@dataclass(frozen=True)
class _Range:
    """Bytes `start` to `stop` of a file, and their target (equally many, uint8)."""

    start: int
    stop: int
    target: Buffer


def read_tiles(checkpoint: Checkpoint, tiles: Sequence[Tile], threads: int) -> None:
    """Fill all planes and versions of `tiles`; every byte is checked as it is read.

    Parameters are found by name, whatever the layout of the checkpoint's tiles; those that it
    leaves out stay as they are. A thread needs memory for one piece, and only if the piece cannot
    be read directly into a plane. After an error the planes hold arbitrary values.

    Raises InputError: a file is damaged, or the checkpoint has other parameters or planes.
    """
    _check(checkpoint, tiles)
    _read(checkpoint, tiles, threads, partly=any(tile.layout.ranks > 1 for tile in tiles))


def _read(checkpoint: Checkpoint, tiles: Sequence[Tile], threads: int, *, partly: bool) -> None:
    """Fill tiles; `partly`: skip pieces without bytes of them, which other ranks check."""
    with ThreadPoolExecutor(threads, thread_name_prefix="read-checkpoint") as pool:
        running = [pool.submit(read) for read in _pieces(checkpoint, tiles, partly=partly)]
        try:
            for future in running:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    records = checkpoint.manifest.tiles
    tile_versions = {record.name: record.version for record in records}
    parameter_versions = {
        parameter.name: record.version for record in records for parameter in record.parameters
    }
    for tile in tiles:
        first = next((entry.name for entry in tile.layout.entries), None)
        tile.version = (
            tile_versions.get(tile.name, 0) if first is None else parameter_versions.get(first, 0)
        )


def _check(checkpoint: Checkpoint, tiles: Sequence[Tile]) -> None:
    """Raises InputError: the checkpoint has other parameters than `tiles`, or other planes."""
    for mismatch in _mismatches(checkpoint, tiles):
        raise InputError(f"{checkpoint.folder}: {mismatch}; it is of another model or precision")


def _mismatches(checkpoint: Checkpoint, tiles: Sequence[Tile]) -> Iterator[str]:
    left_out, tile_records = checkpoint.settings.left_out is not None, checkpoint.manifest.tiles
    saved = {p.name: (record, p) for record in tile_records for p in record.parameters}
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
            if not wanted.has(entry):
                continue
            plane, dtype = record.planes.get(name), DTYPE_NAMES[wanted.dtype]
            if plane is None or plane.numel < wanted.place(parameter.offset, end).stop:
                yield f"it has no {name} of {entry.name!r}"
            elif plane.dtype != dtype:
                yield f"{name} of {entry.name!r} is {plane.dtype}, not {dtype}"
    if saved:
        yield f"its parameter {min(saved)!r} is unknown to the model"


def _pieces(
    checkpoint: Checkpoint, tiles: Sequence[Tile], *, partly: bool
) -> Iterator[Callable[[], None]]:
    """Functions that each read one piece of the checkpoint's files into `tiles`."""
    places = {entry.name: (tile, entry) for tile in tiles for entry in tile.layout.entries}
    for record in checkpoint.manifest.tiles:
        ranges = list(_ranges(record, tile_planes(checkpoint, record), places))
        for offset, num_bytes, checksum in checkpoint.manifest.files[record.file].spans():
            inside = [r for r in ranges if r.start < offset + num_bytes and offset < r.stop]
            if inside or not partly:
                span = (offset, num_bytes, checksum)
                yield partial(_read_piece, checkpoint, record.file, span, inside)


def tile_planes(checkpoint: Checkpoint, record: TileRecord) -> dict[str, Stored]:
    """The places of planes in a tile's file.

    Raises InputError: the file does not have the planes that the manifest says.
    """
    path = checkpoint.folder / record.file
    _, first, checksum = next(checkpoint.manifest.files[record.file].spans(), (0, 0, ""))
    with checkpoint.open(record.file) as file:
        file.read(memoryview(bytearray(first)), 0, checksum)
    stored = {tensor.name: tensor for tensor in read_header(path)}
    planes = {n: (DTYPES[plane.dtype], (plane.numel,)) for n, plane in record.planes.items()}
    if {n: (tensor.dtype, tensor.shape) for n, tensor in stored.items()} != planes:
        raise InputError(f"{path}: its planes are not those that the manifest gives tile "
                         f"{record.name!r}; the checkpoint is damaged")  # fmt: skip
    return stored


def _ranges(
    record: TileRecord, stored: dict[str, Stored], places: dict[str, tuple[Tile, Entry]]
) -> Iterator[_Range]:
    """The targets of a tile file's bytes: whole planes if the layout has not changed."""
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
            target_tile, entry = places[parameter.name]
            kind = planes_of(target_tile).get(name)
            if kind is None or not kind.has(entry):
                continue
            here, part = target_tile.place(entry)
            at = kind.place(parameter.offset + part.start, parameter.offset + part.stop)
            to = kind.place(here.start, here.stop)
            start = plane.start + at.start * size
            target = target_tile.planes[kind].piece(to.start, to.stop).as_bytes()
            if len(target.data):
                yield _Range(start, start + len(target.data), target)


def _read_piece(
    checkpoint: Checkpoint, name: str, span: tuple[int, int, str], ranges: list[_Range]
) -> None:
    """Read a piece of a file into the `ranges` that lie in it; without a copy if there is one."""
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


def read_converted(
    checkpoint: Checkpoint, tiles: Sequence[Tile], threads: int, saved: Rule, rule: Rule
) -> None:
    """`read_tiles` where `saved` is the checkpoint's rule and `rule` that of `tiles`.

    Needs extra host memory for the saved state of one tile at a time.

    Raises InputError: as `read_tiles`; or `rule` cannot convert the state of `saved`.
    """
    both = [("name", saved.name, rule.name)]
    if saved.name == rule.name:
        both = [(name, getattr(saved, name), getattr(rule, name)) for name in rule.choices]
    _log.warning(
        "%s: the optimizer's state is converted (%s), so the run does not go on exactly as it "
        "would have",
        checkpoint.folder,
        ", ".join(f"{name} {before} to {after}" for name, before, after in both if before != after),
    )
    same_states = saved.state_planes == rule.state_planes

    def is_same(plane: Plane) -> bool:
        if plane.kind is PlaneKind.REMAINDER:
            return plane.dtype == saved.remainder
        return plane.kind is not PlaneKind.STATE or same_states

    alike = [
        replace(tile, planes={p: b for p, b in tile.planes.items() if is_same(p)}) for tile in tiles
    ]
    _check(checkpoint, alike)
    for tile, part in zip(tiles, alike, strict=True):
        states = () if same_states else saved.state_planes
        others = [p for p in tile.planes if p.kind is PlaneKind.REMAINDER and not is_same(p)]
        remainders = [replace(plane, dtype=saved.remainder) for plane in others]
        old = {
            plane: Buffer(plane.name, torch.zeros(plane.numel(tile.layout), dtype=plane.dtype))
            for plane in (*states, *remainders)
        }
        as_saved = replace(part, planes={**part.planes, **old})
        _read(checkpoint, [as_saved], threads, partly=True)
        tile.version = as_saved.version
        for plane in remainders:
            _convert_masters(tile, old.pop(plane).data)
        if not same_states:
            _convert_states(tile, saved, rule, old)


def _convert_masters(tile: Tile, old: Tensor) -> None:
    """Convert the masters of a tile, whose weights are read already, from another remainder."""
    assert tile.remainder is not None
    for start in range(0, len(old), _PIECE):
        part = slice(start, start + _PIECE)
        with tile.remainder.writing(part) as remainder:
            high = tile.weights.values(part).to(remainder.device)
            master = torch.empty_like(high, dtype=torch.float32)
            join_block(high, old[part].to(high.device), master)
            split_block(master, high, remainder)
            with tile.weights.writing(part) as weights:
                weights.copy_(high)


def _convert_states(tile: Tile, saved: Rule, rule: Rule, old: Mapping[Plane, Buffer]) -> None:
    for start in range(0, tile.layout.trainable_numel, _PIECE):
        stop = min(start + _PIECE, tile.layout.trainable_numel)
        with ExitStack() as writing:
            new = [
                writing.enter_context(b.writing(plane.place(start, stop)))
                for plane, b in tile.states.items()
            ]
            rule.take_over(
                saved,
                [b.data[plane.place(start, stop)].to(new[0].device) for plane, b in old.items()],
                new,
                at=tile.index * MOST_ELEMENTS + start,
                step=tile.version,
            )


def masters(checkpoint: Checkpoint) -> dict[str, Callable[[], Tensor]]:
    """For each parameter, by name, a function that reads its exact fp32 master, on the CPU.

    Checks the bytes of all masters first; does not read the optimizer's state.

    Raises InputError: a file is damaged.
    """
    values: dict[str, Callable[[], Tensor]] = {}
    with (
        offering_another(checkpoint.folder),
        ThreadPoolExecutor(_READERS, thread_name_prefix="check-checkpoint") as pool,
    ):
        checks = []
        for tile in checkpoint.manifest.tiles:
            planes = tile_planes(checkpoint, tile)
            for plane in (planes[name] for name in ("weights", "remainder") if name in planes):
                stop = plane.start + plane.num_bytes
                checks.append(pool.submit(checkpoint.check_file, tile.file, plane.start, stop))
            for parameter in tile.parameters:
                values[parameter.name] = partial(_master, planes, parameter)
        for check in checks:
            check.result()
    return values


def _master(planes: dict[str, Stored], parameter: Parameter) -> Tensor:
    weights, packed = _values(planes["weights"], parameter), parameter.entry.packed
    if packed is not None:
        return packed.unpacked(weights, parameter.shape)
    rest = planes.get("remainder")
    if rest is None or parameter.offset >= rest.shape[0]:  # it came in bf16, and is frozen
        return weights.float().view(parameter.shape)
    master = torch.empty(weights.numel(), dtype=torch.float32)
    kernels.join(weights, _values(rest, parameter), master, threads=1)
    return master.view(parameter.shape)


def _values(plane: Stored, parameter: Parameter) -> Tensor:
    size = plane.dtype.itemsize
    data = plane.read_bytes(parameter.offset * size, parameter.entry.stored * size)
    return data.view(plane.dtype)
