"""What a disk moves by the requests of a step with planes on it, and what they could be instead.

    python -m benchmarks.disk [--folder /tmp] [--gib 24] [--seconds 1] [--output disk.json]

First requests alone: kinds of memory, sizes, how many at once; then the engine's own stream of
reads, AdamW's updates and writes (`DiskStaging`). `KiB` and `at once` are what the kernel gave the
disk (/proc/diskstats). Takes a minute and a half, and `--gib` of the disk.
"""

import itertools
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.options import parse, write
from megatrain import kernels
from megatrain.base.units import GIB, MIB
from megatrain.device import Buffer, CpuDevice, disk
from megatrain.device.base import DISK_IN, DISK_OUT, UPDATE
from megatrain.device.cpu import host_range
from megatrain.device.disk import PlaneFile
from megatrain.device.host_stream import HostStream
from megatrain.optim import AdamW, TileRange, UpdateOptions
from megatrain.placement import Placement
from megatrain.store import store
from megatrain.store.store import DiskStaging, Store, Tile
from megatrain.telemetry.host import environment, update_threads, usable_cores
from megatrain.tile import Entry, TileLayout

_RULE, _REQUEST, _TILE_NUMEL = AdamW(), 32 * MIB, 1 << 26


class Streams(CpuDevice):
    """The host threads of a step, and no other device."""

    def __init__(self) -> None:
        self._workers = {
            name: HostStream(name, torch.zeros(1, dtype=torch.int32))
            for name in (UPDATE, DISK_IN, DISK_OUT)
        }

    def run(self, stream: str, name: str, work: Callable[[], Any], *_: Sequence[Buffer]) -> Any:
        return self._workers[stream].put(work)

    def copy(self, stream: str, to: Buffer, source: Buffer, numel: int | None = None) -> None:
        self.run(stream, "copy", lambda: CpuDevice.copy(self, stream, to, source, numel))

    def record(self, stream: str) -> Any:
        return self._workers[stream], self._workers[stream].mark()

    def wait(self, stream: str, event: Any, why: str) -> None:
        if event is not None:
            self.run(stream, why, lambda: event[0].wait(event[1]))

    def finish(self) -> None:
        for worker in self._workers.values():
            worker.wait(worker.mark())
            worker.check()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


class Disk:
    """Counts what the kernel has asked of the disk that a folder is on."""

    def __init__(self, folder: Path) -> None:
        number = os.stat(folder).st_dev
        self._key = [str(os.major(number)), str(os.minor(number))]
        self._folder = Path("/sys/dev/block") / ":".join(self._key) / "queue"

    def counts(self) -> list[int]:
        """Reads, their sectors, writes, their sectors, milliseconds times requests."""
        for line in Path("/proc/diskstats").read_text(encoding="ascii").splitlines():
            words = line.split()
            if words[:2] == self._key:
                return [int(words[i]) for i in (3, 5, 7, 9, 13)]
        return [0] * 5

    def queue(self) -> list[str]:
        """What the kernel may ask of it."""
        names = ("max_segments", "max_sectors_kb", "nr_requests", "scheduler")
        paths = [self._folder / name for name in names]
        return [f"{path.name} {path.read_text().strip()}" for path in paths if path.exists()]


class Table:
    """Prints and keeps what work took that moves bytes."""

    def __init__(self, folder: Path) -> None:
        self.disk = Disk(folder)
        self.rows: list[dict[str, Any]] = []
        print(f"{'':32} {'GB/s':>6} {'in':>5} {'out':>5} {'KiB':>5} {'at once':>8} {'CPU s/GB':>9}")

    def add(self, name: str, work: Callable[[], tuple[int, int]]) -> None:
        """`work` returns bytes read and written."""
        before, cpu, started = self.disk.counts(), time.process_time(), time.perf_counter()
        read, written = work()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        reads, in_sectors, writes, out_sectors, waited = (
            after - first for after, first in zip(self.disk.counts(), before, strict=True)
        )
        numbers = {
            "gbps": (read + written) / seconds / 1e9,
            "read_gbps": read / seconds / 1e9,
            "write_gbps": written / seconds / 1e9,
            "request_kib": (in_sectors + out_sectors) / 2 / max(reads + writes, 1),
            "at_once": waited / 1000 / seconds,
            "cpu_s_per_gb": cpu / ((read + written) / 1e9),
        }
        self.rows.append({"name": name, **numbers})
        form = "{:32} {:6.2f} {:5.2f} {:5.2f} {:5.0f} {:8.1f} {:9.2f}"
        print(form.format(name, *numbers.values()), flush=True)


def small_pages(num_bytes: int) -> Tensor:
    """Shared memory, as Python maps it unless told otherwise, touched by all cores."""
    flat = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    kernels.first_touch(flat, threads=usable_cores())
    return flat


def requests(
    file: PlaneFile, seconds: float, ways: str, rooms: Sequence[Tensor]
) -> Callable[[], tuple[int, int]]:
    """Reads and writes of different halves of the file, in order; each by a thread of its own."""

    def one(way: int, moved: list[int], until: float) -> None:
        size, draw = rooms[way].nbytes, random.Random(time.perf_counter())
        most = file.num_bytes // 2 // size
        at = draw.randrange(most)
        move = (file.read, file.write)[way]
        while time.perf_counter() < until:
            move((at % most + way * most) * size, rooms[way])
            moved[way], at = moved[way] + size, at + 1

    def work() -> tuple[int, int]:
        moved, until = [0, 0], time.perf_counter() + seconds
        threads = [
            threading.Thread(target=one, args=(way, moved, until))
            for way in range(2)
            if "rw"[way] in ways
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return moved[0], moved[1]

    return work


@contextmanager
def python_beside(threads: int) -> Iterator[None]:
    """Threads that keep Python's lock as long as they may."""
    going = [True]

    def spin() -> None:
        while going[0]:
            sum(range(1000))

    spinning = [threading.Thread(target=spin) for _ in range(threads)]
    for thread in spinning:
        thread.start()
    try:
        yield
    finally:
        going[0] = False
        for thread in spinning:
            thread.join()


class Engine:
    """Tiles whose moments fill a file, and their updates, without the steps around them."""

    def __init__(self, file: PlaneFile) -> None:
        self.device, count = Streams(), file.num_bytes // (8 * _TILE_NUMEL)
        layouts = [
            TileLayout(f"layer {i}", [Entry("w", (_TILE_NUMEL,), 0, 0)]) for i in range(count)
        ]
        self._tiles = Store(
            self.device, layouts, torch.bfloat16, rule=_RULE,
            placement=Placement(disk_moments=count), open_file=lambda _: file,
        ).tiles  # fmt: skip
        self._grad = torch.full((_TILE_NUMEL,), 0.01, dtype=torch.bfloat16)

    def step(self, seconds: float, *, updates: bool) -> tuple[int, int]:
        """As many tiles as the time is for."""
        staging, moved = DiskStaging(self.device, self._tiles), 0
        until, before = time.perf_counter() + seconds, None
        for tile in itertools.cycle(self._tiles):
            if time.perf_counter() > until:
                break
            for first, last, part in staging.visit(tile):
                work = partial(self._update, part, first, last) if updates else int
                self.device.run(UPDATE, "update", work)
                moved += 8 * (last - first)
            if before is not None:
                before[0].wait(before[1])
            before = tile.written
        self.device.finish()
        return moved, moved

    def _update(self, part: Tile, first: int, last: int) -> None:
        assert part.remainder is not None
        states = [buffer.data for buffer in part.states.values()]
        planes = TileRange(part.weights.data, part.remainder.data, states, self._grad[first:last])
        _RULE.update(planes, vars(_RULE), UpdateOptions(first, threads=update_threads()))


@contextmanager
def at_once(threads: int, piece_bytes: int) -> Iterator[None]:
    """Requests by so many threads, each of so many bytes."""
    with (
        mock.patch.object(disk, "THREADS", threads),
        mock.patch.object(disk, "PIECE_BYTES", piece_bytes),
    ):
        yield


def alone(table: Table, file: PlaneFile, seconds: float) -> None:
    """Requests without updates."""
    rooms = [host_range("room", 2 * _REQUEST, torch.uint8).random_() for _ in range(2)]
    small = [small_pages(2 * _REQUEST).random_() for _ in range(2)]
    for ways in ("r", "w", "rw"):
        table.add(f"{ways}, small pages", requests(file, seconds, ways, small))
    for ways in ("r", "w", "rw"):
        table.add(f"{ways}, huge pages", requests(file, seconds, ways, rooms))
    for threads, mib in [(1, 8), (2, 8), (8, 8), (4, 2), (8, 4), (4, 16)]:
        with at_once(threads, mib * MIB):
            name = f"rw, {threads} x {mib} MiB each way"
            table.add(name, requests(file, seconds, "rw", rooms))
    with python_beside(1):
        table.add("rw, Python computing beside", requests(file, seconds, "rw", rooms))


def in_engine(table: Table, file: PlaneFile, seconds: float) -> None:
    """The engine's own stream of requests."""
    engine = Engine(file)
    for lanes in (2, 4, 8):
        with mock.patch.object(store, "LANES", lanes):
            table.add(f"engine, {lanes} lanes", partial(engine.step, seconds, updates=True))
    table.add("engine, no updates", partial(engine.step, seconds, updates=False))
    for threads, mib in [(2, 8), (8, 4), (8, 8)]:
        with at_once(threads, mib * MIB):
            name = f"engine, {threads} x {mib} MiB each way"
            table.add(name, partial(engine.step, seconds, updates=True))
    with python_beside(1):
        table.add("engine, Python computing beside", partial(engine.step, seconds, updates=True))
    engine.device.close()


def main() -> None:
    given = parse(__doc__, folder=Path("/tmp"), gib=24, seconds=1.5, output=Path)
    table, file = Table(given.folder), PlaneFile(given.folder, given.gib * GIB)
    print(f"direct access: {file.direct}; {' '.join(table.disk.queue())}")
    first = host_range("room", _REQUEST, torch.uint8).random_()
    quarter = file.num_bytes // 4
    for start in range(0, file.num_bytes, quarter):
        table.add(
            f"first write, from {start / GIB:.0f} GiB on",
            partial(fill, file, first, start, quarter),
        )
    alone(table, file, given.seconds)
    in_engine(table, file, given.seconds)
    file.close()
    told = {"benchmark": "disk", "rows": table.rows, "environment": environment("cpu")}
    write(given.output, told)


def fill(file: PlaneFile, room: Tensor, start: int, num_bytes: int) -> tuple[int, int]:
    for at in range(start, start + num_bytes, room.nbytes):
        file.write(at, room)
    return 0, num_bytes


if __name__ == "__main__":
    main()
