"""Checksums of the tiles' planes: a bit that changes while nobody writes it stops the run.

An update takes the checksums in its own pass over the bytes that it reads and writes
(`kernels.checksum`). With `verify="save"` planes are compared with their checksums when they are
saved. With `step` they are compared in each step, too: host and disk planes as the update reads
them, planes on the device before the updates start, gradients when they have landed and again when
the update reads them, the device's copies of weights after the visit that used them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megatrain import kernels
from megatrain.device import Buffer, Device, disk
from megatrain.device.base import COMPUTE, UPDATE
from megatrain.errors import RunFailed
from megatrain.kernels.reference import SUMMED_BYTES
from megatrain.kernels.states import Checksums, TileRange, UpdateOptions
from megatrain.optim import Plane, Rule
from megatrain.parallel.distributed import ALONE, Ranks
from megatrain.placement import Verify
from megatrain.store.store import Tier, Tile

_REMEDY = (
    "Nothing has written there: go on from the last checkpoint (--resume), and if it happens again "
    "test this machine's memory, disk and GPU"
)

# The key of weights of which the device has a copy: the tile's index, True if they are trained, the
# weights' version (-1: they never change), and the rank that keeps them.
_CopyKey = tuple[int, bool, int, int]


@dataclass(frozen=True)
class _Part:
    """The trained or the frozen part of a plane: values `start` to `stop` of `buffer`."""

    tile: Tile
    plane: Plane
    buffer: Buffer
    start: int
    stop: int
    trained: bool

    def copy_key(self, version: int, rank: int | None = None) -> _CopyKey:
        changes = self.trained or bool(self.tile.layout.copies)
        rank = self.tile.rank if rank is None else rank
        return self.tile.index, self.trained, version if changes else -1, rank

    @property
    def tier(self) -> Tier:
        return self.tile.rests.tier(self.plane)

    @property
    def text(self) -> str:
        return f"{self.tile.name}: the plane of {self.plane.name} ({self.tier.value})"


def _parts(tile: Tile) -> Iterator[_Part]:
    """Yield the trained part and the frozen part of each plane, unless they are empty."""
    for plane, buffer in tile.planes.items():
        size = len(buffer.data)
        trained_stop = min(size, plane.place(0, tile.own_numel).stop)
        if trained_stop:
            yield _Part(tile, plane, buffer, 0, trained_stop, trained=True)
        if trained_stop < size:
            yield _Part(tile, plane, buffer, trained_stop, size, trained=False)


def _updated_parts(tile: Tile) -> list[_Part]:
    return [part for part in _parts(tile) if part.trained and not part.plane.on_device]


def _zero_sums(numel: int, buffer: Buffer) -> Tensor:
    """Two sums, still zero, for each block of a plane's first `numel` values, on its device."""
    device = "cpu" if isinstance(buffer, disk.DiskBuffer) else buffer.data.device
    count = -(-numel * buffer.data.itemsize // SUMMED_BYTES)
    return torch.zeros(count, 2, dtype=torch.int64, device=device)


@dataclass
class UpdateSums:
    """Checksums of the planes that a tile's update reads and writes, and of the gradient."""

    version: int  # of the tile, after the update
    read: Mapping[Plane, Tensor]
    written: Mapping[Plane, Tensor]
    gradient: Tensor | None

    def apply(
        self,
        rule: Rule | None,
        part: TileRange,
        planes: Sequence[Plane | None],
        start: int,
        group: Mapping[str, object],
        options: UpdateOptions,
    ) -> None:
        """Update a range of the planes; add their values before and after to the checksums.

        Args:
            rule: None leaves the range as it is.
            part: the range's values of each plane, and its gradient.
            planes: the planes of `part`: of the weights, the remainder and the states.
            start: the number of the range's first element among this rank's elements of the tile.
        """
        first = [0 if p is None else p.place(start, start).start * p.dtype.itemsize for p in planes]
        sums = Checksums(
            [*(None if p is None else self.read.get(p) for p in planes), self.gradient],
            [*(None if p is None else self.written.get(p) for p in planes), None],
            [*first, start * part.grad.element_size()],
        )
        if rule is not None and rule.sums_in_pass and kernels.is_native and part.weights.is_cpu:
            rule.update(part, group, options._replace(sums=sums))
            return
        data = (part.weights, part.remainder, *part.states, part.grad)

        def add_to(totals: Sequence[Tensor | None]) -> None:
            for plane, total, byte in zip(data, totals, sums.first, strict=True):
                if plane is not None and total is not None:
                    kernels.checksum(plane.view(torch.uint8), total, byte, threads=options.threads)

        add_to(sums.read)
        if rule is not None:
            rule.update(part, group, options)
        add_to(sums.written)


class BitChecks:
    """The checksums of an engine's tiles."""

    def __init__(self, device: Device, tiles: Sequence[Tile], verify: Verify, threads: int) -> None:
        self._device, self._tiles, self._threads = device, tiles, threads
        self._sums_any, self._sums_steps = verify != "off", verify == "step"
        self._checksums: dict[_Part, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}  # by tile index, of gradients that have landed
        self._weights: dict[_CopyKey, Tensor] = {}  # of each tile's newest two versions
        self._copies: dict[_CopyKey, Tensor] | None = None  # of copies used in the current step
        # Comparisons on the device since the last report: text, expected and computed checksum.
        self._comparisons: list[tuple[str, Tensor, Tensor]] = []
        # on the device, the number of differences there; it is part of a step's report
        self.flag = device.empty("planes that differ", 1, torch.float32)
        device.run(COMPUTE, "clear flag", self.flag.data.zero_, writes=[self.flag])

    def seal(self) -> None:
        """Take checksums of all planes as they are now; with `verify="save"` not of disk planes."""
        for part in (p for t in self._tiles if self._sums_any for p in _parts(t)):
            if part.tier is Tier.DEVICE:
                work = partial(self._sum_part, part)
                self._device.run(COMPUTE, f"sum {part.tile.name}", work, [part.buffer])
            elif self._sums_steps or part.tier is Tier.HOST:
                self._sum_part(part)

    def _sum_part(self, part: _Part, version: int | None = None) -> None:
        checksum = self._sum(part.buffer, part.start, part.stop)
        self._store(part, checksum, part.tile.version if version is None else version)

    def _store(self, part: _Part, checksum: Tensor, version: int) -> None:
        """Keep a part's checksum; of weights the newest two, as copies on the device may be old."""
        self._checksums[part] = checksum
        if self._sums_steps and part.buffer is part.tile.weights:
            self._weights.pop(part.copy_key(version - 2), None)
            self._weights[part.copy_key(version)] = checksum

    def _sum(self, buffer: Buffer, start: int, stop: int, offset: int = 0) -> Tensor:
        """The checksum of a buffer's values `start` to `stop`; `offset`: its place in the plane."""
        size, blocks = buffer.data.itemsize, _zero_sums(offset + stop, buffer)
        piece = disk.PIECE if isinstance(buffer, disk.DiskBuffer) else max(1, stop - start)
        for first in range(start, stop, piece):
            values = buffer.values(slice(first, min(first + piece, stop))).view(torch.uint8)
            kernels.checksum(values, blocks, (offset + first) * size, threads=self._threads)
        return blocks

    def begin(self) -> None:
        """Begin a step: compare the frozen parts that do not rest on the device."""
        self._copies = {}
        for tile in self._tiles if self._sums_steps else ():
            if frozen := [p for p in _parts(tile) if not p.trained and p.tier is not Tier.DEVICE]:
                self._compare_on(UPDATE, tile, frozen)

    def sum_gradient(self, tile: Tile, gradient: Buffer, landed: Any) -> None:
        """Take the checksum of a gradient that has arrived (`landed`) and waits for its update."""
        if not self._sums_steps:
            return
        stream = tile.rests.updates
        if tile.rests.gradient is not Tier.DEVICE:
            self._device.wait(stream, landed, "gradient landed")

        def work() -> None:
            self._gradients[tile.index] = self._sum(gradient, 0, tile.own_numel)

        self._device.run(stream, f"sum gradient of {tile.name}", work, [gradient])

    def sum_copy(self, tile: Tile, weights: Buffer, version: int) -> None:
        """After a visit of a step, take checksums of the weights that it used, for `report`."""
        copies = self._copies
        if not self._sums_steps or copies is None:
            return
        parts = [part for part in _parts(tile) if part.buffer is tile.weights]

        def work() -> None:
            # With owned experts this rank's slot has its own experts alone.
            ranks: Sequence[int] = [tile.rank] if tile.layout.owned else range(tile.layout.ranks)
            for part, rank in product(parts, ranks):
                key, blocks = part.copy_key(version, rank), _zero_sums(part.stop, weights)
                for span in tile.layout.spans(rank):
                    start, stop = max(part.start, span.start), min(part.stop, span.stop)
                    if start < stop:
                        shift = span.slot - span.start
                        values = weights.data[start + shift : stop + shift].view(torch.uint8)
                        kernels.checksum(values, blocks, start * weights.data.itemsize)
                # The checksums of several visits in a step follow each other.
                copies[key] = torch.cat((copies[key], blocks)) if key in copies else blocks

        self._device.run(COMPUTE, f"sum copy of {tile.name}", work, [weights])

    def compare_on_device(self, gradients: Sequence[tuple[Tile, Buffer]]) -> None:
        """Before a step's updates, compare the planes and gradients that rest on the device."""
        if not self._sums_steps:
            return
        for tile in self._tiles:
            if parts := [part for part in _parts(tile) if part.tier is Tier.DEVICE]:
                self._compare_on(COMPUTE, tile, parts)

        def compare(tile: Tile, gradient: Buffer) -> None:
            if (expected := self._gradients.pop(tile.index, None)) is not None:
                computed = self._sum(gradient, 0, tile.own_numel)
                self._count_difference(f"{tile.name}: the gradient (device)", expected, computed)

        for tile, gradient in gradients:
            if tile.rests.gradient is Tier.DEVICE:
                work = partial(compare, tile, gradient)
                self._device.run(COMPUTE, "check gradient", work, [gradient], [self.flag])

    def _compare_on(self, stream: str, tile: Tile, parts: Sequence[_Part]) -> None:
        work = partial(self._compare_now, parts, on_device=stream == COMPUTE)
        writes = [self.flag] if stream == COMPUTE else []
        reads = [part.buffer for part in parts]
        self._device.run(stream, f"check {tile.name}", work, reads, writes)

    def _compare_now(self, parts: Iterable[_Part], *, on_device: bool = False) -> None:
        for part in parts:
            if (expected := self._checksums.get(part)) is None:
                continue
            computed = self._sum(part.buffer, part.start, part.stop)
            if on_device:
                self._count_difference(part.text, expected, computed)
            else:
                _compare(part.text, expected, computed, part.buffer)

    def _count_difference(self, text: str, expected: Tensor, computed: Tensor) -> None:
        expected = expected.to(computed.device)
        self.flag.data.add_((expected != computed).any())
        self._comparisons.append((text, expected, computed))

    def report(self, differing: float, ranks: Ranks) -> None:
        """Raise RunFailed if planes on the ranks' devices differ (`differing`), or used copies."""
        comparisons, self._comparisons = self._comparisons, []
        copies, self._copies = self._copies, None
        if differing:
            for comparison in comparisons:
                _compare(*comparison)
            raise RunFailed(
                "a plane on the device of another rank has changed; see what that one says"
            )
        if not copies:
            return
        # Compare the copies with the weights, which any rank may keep.
        sources = {key: self._weights[key] for key in copies if key in self._weights}
        for sources_of_rank in ranks.all_gather_object({k: v.cpu() for k, v in sources.items()}):
            sources = sources_of_rank | sources
        tiles = {tile.index: tile for tile in self._tiles}
        for key, visit_sums in copies.items():
            if key not in sources:
                continue
            index, _, version, _ = key
            tile, expected = tiles[index], sources[key].cpu()
            for computed in visit_sums.cpu().split(len(expected)):
                if not torch.equal(computed, expected) and tile.version == version:
                    self._compare_now(_parts(tile))  # raises first if the source has changed
                _compare(f"{tile.name}: the copy of weights on the device", expected, computed)

    def update_sums(self, tile: Tile, host_gradient: Buffer) -> UpdateSums | None:
        """Return zero checksums for a tile's update to add to; None if this run takes none."""
        if not self._sums_any:
            return None
        parts = [p for p in _updated_parts(tile) if p.tier is not Tier.DEVICE]
        compared = parts if self._sums_steps else []
        gradient = None
        if self._sums_steps and tile.rests.gradient is not Tier.DEVICE:
            gradient = _zero_sums(tile.own_numel, host_gradient)
        return UpdateSums(
            tile.version,
            {p.plane: _zero_sums(p.stop, p.buffer) for p in compared},
            {p.plane: _zero_sums(p.stop, p.buffer) for p in parts},
            gradient,
        )

    def updated(self, tile: Tile, sums: UpdateSums) -> None:
        """After an update, compare the checksums of planes as read; keep those of new planes."""
        for part in _updated_parts(tile):
            if part.tier is Tier.DEVICE:
                self._sum_part(part, sums.version)
                continue
            expected, computed = self._checksums.get(part), sums.read.get(part.plane)
            if expected is not None and computed is not None:
                _compare(part.text, expected, computed, part.buffer)
            self._store(part, sums.written[part.plane], sums.version)
        if tile.layout.copies:  # the update has renewed the copies of masters
            for part in _parts(tile):
                if not part.trained and part.buffer is tile.weights and part in self._checksums:
                    self._sum_part(part, sums.version)
        expected = self._gradients.pop(tile.index, None)
        if expected is not None and sums.gradient is not None:
            _compare(f"{tile.name}: the gradient (host)", expected, sums.gradient)

    @contextmanager
    def checking_change(self, tile: Tile, state: Buffer, start: int) -> Iterator[None]:
        """Compare the checksum of `state` before the device changes it, and keep the new one after.

        Args: `start`: the place of the state's first value in its plane.
        """
        [part] = [p for p in _parts(tile) if p.plane.on_device]
        expected, size = self._checksums.get(part), len(state.data)
        if self._sums_steps and expected is not None:
            computed = self._sum(state, 0, size, start)
            self._count_difference(part.text, expected[: len(computed)], computed)
        yield
        if self._sums_any:
            self._checksums[part] = self._sum(state, 0, size, start)

    def compare_all(self, *, wait: bool = True) -> None:
        """Compare all planes with their checksums.

        Args: `wait`: True: return when all are compared; False: a save waits for UPDATE's part.

        Raises RunFailed: a plane has changed.
        """
        if not self._sums_any:
            return
        self.put_comparisons()
        resident = [p for t in self._tiles for p in _parts(t) if p.tier is Tier.DEVICE]
        if resident or self._comparisons:
            self._device.synchronize(self._device.record(COMPUTE), "resident version to check")
            self.report(float(self.flag.data), ALONE)
        self._compare_now(resident)
        for tile in self._tiles if wait else ():
            self._device.synchronize(tile.updated, "planes compared")

    def put_comparisons(self) -> None:
        """Queue comparisons of host and disk planes on UPDATE; a save of a tile waits for them."""
        for tile in self._tiles if self._sums_any else ():
            if parts := [part for part in _parts(tile) if part.tier is not Tier.DEVICE]:
                self._device.wait(UPDATE, tile.written, "disk version to check")
                self._compare_on(UPDATE, tile, parts)
                tile.updated = self._device.record(UPDATE)


def _compare(text: str, expected: Tensor, computed: Tensor, buffer: Buffer | None = None) -> None:
    """Raise RunFailed if checksums differ; say where, and if one flipped bit may explain that."""
    expected, computed = expected.cpu(), computed.cpu()
    if torch.equal(expected, computed):
        return
    blocks = (expected != computed).any(1).nonzero().flatten().tolist()
    first, address = blocks[0] * SUMMED_BYTES, ""
    if isinstance(buffer, disk.DiskBuffer):
        address = f", {buffer.at + first} of the file on the disk"
    elif buffer is not None:
        address = f", address {buffer.data.data_ptr() + first:#x}"
    cause = "no single flipped bit explains it"
    changes = (computed - expected)[blocks[0]].tolist()
    if len(blocks) == 1 and (place := _flipped(*changes)) is not None:
        cause = f"one flipped bit may explain it{place}, a fault of the hardware"
    raise RunFailed(
        f"{text} differs from its checksum in {len(blocks)} blocks of {SUMMED_BYTES:,} bytes, the "
        f"first from byte {first:,} on{address}; {cause}. {_REMEDY}"
    )


def _flipped(change: int, numbered_change: int) -> str | None:
    """Find the one flipped bit that may explain how both sums of a block have changed.

    Args: `change`: of the sum of words; `numbered_change`: of the sum of `place * word`.

    Returns text that names the bit's byte; "" if several bytes are possible; None if no bit fits.
    """
    for sign in (1, -1):
        bit_value, numbered = sign * change % 2**64, sign * numbered_change % 2**64
        if bit_value.bit_count() == 1:
            bit = bit_value.bit_length() - 1
            word = numbered >> bit
            if word < SUMMED_BYTES // 8 and word << bit == numbered:
                is_certain = SUMMED_BYTES // 8 << bit <= 2**64
                return f", in byte {8 * word + bit // 8:,} of the block" if is_certain else ""
    return None
