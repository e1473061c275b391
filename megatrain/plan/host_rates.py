"""Rates of the host: memory by threads, the optimizer's update, the disk."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from megatrain.base.units import GIB, MIB
from megatrain.device.host_mappings import host_range
from megatrain.device.plane_file import PlaneFile
from megatrain.errors import DoesNotFit, MegatrainError, first_line
from megatrain.optim import (
    AdamW,
    TileRange,
    UpdateOptions,
    gradient_plane,
    moved_bytes,
    parameter_bytes,
    tile_planes,
)
from megatrain.plan.rate_measurement import Measurement, attempt, host_seconds
from megatrain.telemetry.cores import update_threads, usable_cores
from megatrain.telemetry.memory import host_available_bytes

_RULE, _DTYPE = AdamW(), torch.bfloat16
UPDATE_BYTES = moved_bytes(_RULE, _DTYPE)  # of a parameter
_CHUNK = 64 * MIB
_DISK_SECONDS = 2.0  # each of filling, writing, reading, and both at once


def host_measurements(folder: Path, *, most_bytes: int = 4 * GIB) -> list[Measurement]:
    """All of them; host memory of `most_bytes` is used at most, and a tenth of what is free."""
    room = min(most_bytes, host_available_bytes() // 10)
    threads = update_threads()
    found = [
        attempt(
            f"host_triad_{n}_threads_gbps",
            f"host memory, a = b + c, {n} thread{'s' if n > 1 else ''}",
            "GB/s",
            partial(triad_gbps, n, room),
        )
        for n in thread_counts(usable_cores())
    ]
    found.append(
        attempt(
            "update_gparams",
            f"AdamW on the host, {threads} thread{'s' if threads > 1 else ''}",
            "Gparam/s",
            lambda: update_gparams(threads, room),
        )
    )
    return [*found, *disk_measurements(folder)]


def thread_counts(cores: int) -> list[int]:
    """Powers of two up to all cores, and all cores."""
    return sorted({1 << n for n in range(cores.bit_length()) if 1 << n <= cores} | {cores})


def triad_gbps(threads: int, room_bytes: int) -> float:
    """Reads two arrays and writes a third; 12 bytes an element are counted."""
    numel = min(room_bytes // 12, 128 << 20)
    one, two, three = (host_range("triad", numel, torch.float32) for _ in range(3))
    with torch_threads(threads):
        return 12 * numel / host_seconds(lambda: torch.add(one, two, out=three)) / 1e9


def update_gparams(threads: int, room_bytes: int) -> float:
    """Billions of parameters a second through the update, split master and bf16 gradient."""
    numel = min(int(room_bytes / parameter_bytes(_RULE, _DTYPE)), 256 << 20)
    if numel < 1 << 20:
        raise DoesNotFit("too little host memory is free")
    types = [plane.dtype for plane in (*tile_planes(_RULE, _DTYPE), gradient_plane(_DTYPE))]
    weights, remainder, *states, grad = (host_range("update", numel, dtype) for dtype in types)
    grad.fill_(0.01)
    tile, options = TileRange(weights, remainder, states, grad), UpdateOptions(0, 10, 1.0, threads)
    seconds = host_seconds(lambda: _RULE.update(tile, vars(_RULE), options))
    return numel / seconds / 1e9


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch's own CPU work on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def disk_measurements(folder: Path, *, num_bytes: int = 2 * GIB) -> list[Measurement]:
    """Sequential writes and reads of a file of planes in `folder`, by the engine's own requests."""
    labels = {
        "disk_write_gbps": "disk, write",
        "disk_read_gbps": "disk, read",
        "disk_both_gbps": "disk, read while as much is written",
    }
    try:
        free = os.statvfs(folder)
        wanted = min(num_bytes, free.f_bavail * free.f_frsize // 10) // _CHUNK * _CHUNK
        if not wanted:
            raise DoesNotFit("too little disk space is free")
        file = PlaneFile.create(folder, wanted)
    except (MegatrainError, OSError) as error:
        why = first_line(error)
        return [Measurement(name, label, None, "GB/s", why) for name, label in labels.items()]
    rooms = [host_range("disk", _CHUNK, torch.uint8).random_() for _ in range(2)]
    filled = 0

    def write(at: int) -> None:
        file.write(at, rooms[0])

    def read(at: int) -> None:  # backwards: not what is written at the same time
        file.read(filled - _CHUNK - at, rooms[1])

    def gbps(*moves: Callable[[int], None]) -> float:
        nonlocal filled
        # Blocks take longer when they are written first; steps write the same ones again.
        filled = filled or _moved(write, wanted)[0]
        with ThreadPoolExecutor(len(moves)) as threads:
            done = list(threads.map(lambda move: _moved(move, filled), moves))
        return sum(moved for moved, _ in done) / len(moves) / max(s for _, s in done) / 1e9

    try:
        moves = ((write,), (read,), (write, read))
        return [
            attempt(name, label, "GB/s", partial(gbps, *some))
            for (name, label), some in zip(labels.items(), moves, strict=True)
        ]
    finally:
        file.close()


def _moved(move: Callable[[int], None], most: int) -> tuple[int, float]:
    """Bytes moved in at most `_DISK_SECONDS`, and the time that took."""
    moved, started = 0, time.perf_counter()
    while moved < most and time.perf_counter() - started < _DISK_SECONDS:
        move(moved)
        moved += _CHUNK
    return moved, time.perf_counter() - started
