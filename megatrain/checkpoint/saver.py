"""Saves an engine's state while it trains: the one place that writes checkpoints."""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatrain.base.units import gib
from megatrain.base.whole_files import flush, hidden, publish, write_file
from megatrain.checkpoint import files, manifest, snapshot
from megatrain.device import Device
from megatrain.device.base import SAVE
from megatrain.device.host_stream import start_thread
from megatrain.errors import MegatrainError, RunFailed, os_reason
from megatrain.parallel.distributed import ALONE, Ranks, require_same
from megatrain.store.store import Tile

_log = logging.getLogger(__name__)

Sums = dict[str, list[files.PieceSum]]  # by a tile's file
Written = tuple[Sums, dict[str, manifest.FileRecord]]  # a rank's tiles, and its other files
_HEALTH_SECONDS = 0.5  # between two checks of the device's host threads while writers write


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint besides its tiles."""

    settings: manifest.Settings
    extra: str  # the caller's values as JSON text
    # writes the model's configuration and buffers into the folder
    documents: Callable[[Path], None]
    # writes the caller's files beside the configuration; None: no files
    attach: Callable[[Path], None] | None = None
    keep: bool = False


class Saving:
    """A running or ended save."""

    def __init__(
        self, saver: "Saver", folder: Path, contents: Contents, jobs: list[snapshot.TileFile]
    ) -> None:
        """Begin the save: each rank writes its pieces of tiles, and rank 0 all other files."""
        self._device, self._ranks = saver.device, replace(saver.ranks, host=saver.ranks.saves)
        self.folder, self.step = folder, contents.settings.steps
        self.num_bytes = sum(job.num_bytes for job in jobs)  # bytes of all tiles
        # the failure; None while the save runs, and after success
        self.error: RunFailed | None = None
        # from the call to the end of the save; None while it runs
        self.seconds: float | None = None
        self._has_final_name = False
        self.snapshot = snapshot.Snapshot(saver.staging)
        self._contents, self._jobs = contents, jobs
        self._started = time.perf_counter()
        # No daemon thread: a program that ends without `close` still completes its checkpoint.
        self._thread = start_thread(f"save of step {self.step} to {folder}", self._run)

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Block until the checkpoint is whole on the disk.

        Raises RunFailed: it could not be written; only older checkpoints are there.
        """
        self.join()
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        """Block until the save has ended, with or without success."""
        if not self.done:
            with suppress(RunFailed):  # a host thread has died: the save fails by itself
                self._device.synchronize(self._device.record(SAVE), "save put on its way")
        self._thread.join()

    def abandon(self) -> None:
        """Make the save fail soon."""
        self.snapshot.abandon([piece for job in self._jobs for piece in job.pieces])

    def _run(self) -> None:
        partial, ranks = hidden(self.folder, files.PARTIAL), self._ranks
        try:
            with ExitStack() as stack:
                ranks.from_first(lambda: self._make_folder(partial, stack))
                written = ranks.agree(lambda: self._fill(partial))
                ranks.from_first(lambda: self._publish(partial, written))
        except BaseException as error:
            self._fail(error)
        self.seconds = time.perf_counter() - self._started

    def _fail(self, error: BaseException) -> None:
        """End the save: remove its hidden folder, and set `self.error`."""
        self.abandon()
        reason = os_reason(error) if isinstance(error, OSError) else repr(error)
        if isinstance(error, MegatrainError):
            reason = str(error)
        remains = "nothing of it is left"
        try:
            partial = hidden(self.folder, files.PARTIAL)
            if self._ranks.rank == 0 and os.path.lexists(partial):
                shutil.rmtree(partial)
        except OSError as removal_error:
            remains = f"what it has written could not be removed ({os_reason(removal_error)})"
        if self._has_final_name:
            remains = "it is there and whole, but may be gone after a power failure"
        self.error = RunFailed(
            f"{self.folder}: cannot save the checkpoint of step {self.step}: {reason}; {remains}, "
            "earlier checkpoints are as they were"
        )
        self.error.__cause__ = error
        _log.warning("%s", self.error)  # the caller may never call `wait`

    def _make_folder(self, partial: Path, stack: ExitStack) -> None:
        """Make the hidden folder that all ranks fill. Raises RunFailed: the disk is too full."""
        parent = self.folder.parent
        parent.mkdir(parents=True, exist_ok=True)
        flush(parent.parent)
        files.put_right(parent)
        free = shutil.disk_usage(parent).free
        if free < self.num_bytes:
            raise RunFailed(f"it takes {gib(self.num_bytes)} and the disk has {gib(free)} left")
        partial.mkdir()
        stack.enter_context(files.claimed(partial))
        for name in (manifest.TILES, manifest.MODEL):
            (partial / name).mkdir()
        for job in self._jobs:  # each rank opens the files to write its part
            (partial / job.record.file).touch()

    def _fill(self, partial: Path) -> Written:
        """Write this rank's part of all files and flush them to the disk."""
        files.require_seen(partial)
        with self._writers(partial) as tiles:
            documents = {} if self._ranks.rank else self._write_documents(partial)
        return tiles, documents

    def _publish(self, partial: Path, written: Sequence[Written]) -> None:
        """Write the manifest of all ranks' files, and rename the folder to its final name."""
        records = dict(written[0][1])  # files beside the tiles, which the first rank has written
        for job in self._jobs:
            name = job.record.file
            pieces = files.joined_sums(job.tile.name, [sums[name] for sums, _ in written])
            records[name] = manifest.FileRecord(job.num_bytes, pieces)
        tiles = tuple(sorted((job.record for job in self._jobs), key=lambda tile: tile.file))
        content = manifest.Manifest(files.ALGORITHM, self._contents.settings, records, tiles)
        for folder in [path for path in partial.rglob("*") if path.is_dir()]:
            flush(folder)
        text = json.dumps(manifest.signed(asdict(content)), indent=1) + "\n"
        write_file(partial / manifest.MANIFEST, text)
        flush(partial)
        publish(partial, self.folder, hidden(self.folder, files.REPLACED))
        self._has_final_name = True
        flush(self.folder.parent)
        with suppress(OSError):  # the next save tries again
            files.put_right(self.folder.parent)

    @contextmanager
    def _writers(self, partial: Path) -> Iterator[Sums]:
        """Write all tiles during the `with` block; the yielded records are complete at its end.

        Each thread writes one tile's file at a time, since a file takes one write at a time. They
        are no pool, because an interpreter that is exiting starts no work in pools.
        """
        records: Sums = {}
        failures: list[BaseException] = []
        jobs_left = iter(self._jobs)  # of all threads

        def write() -> None:
            try:
                for job in jobs_left:
                    records[job.record.file] = self._write_tile(partial, job)
                    if failures:
                        return
            except BaseException as error:
                failures.append(error)
                self.abandon()

        threads: list[threading.Thread] = []
        try:
            for _ in range(snapshot.AT_ONCE):
                threads.append(start_thread("megatrain save", write))
            yield records
            for thread in threads:
                while thread.is_alive():
                    self._device.synchronize(None, "save going on")  # raises if a thread has died
                    thread.join(_HEALTH_SECONDS)
            self._device.synchronize(None, "save going on")  # raises if an update has failed
        except BaseException:
            self.abandon()
            raise
        finally:
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]

    def _write_tile(self, partial: Path, job: snapshot.TileFile) -> list[files.PieceSum]:
        """Write this rank's pieces of a tile's file; return their checksums."""
        checksum = files.ALGORITHMS[files.ALGORITHM]
        pieces: list[files.PieceSum] = []
        writes = self._ranks.replicas.rank == 0  # other hosts only compute checksums
        with ExitStack() as stack:
            path = partial / job.record.file
            file = stack.enter_context(files.NewFile(path)) if writes else None
            if self._ranks.rank == 0 and file is not None:
                pieces.append(files.PieceSum(0, len(job.header), checksum(job.header)))
                file.write(job.header, 0)
            for piece in job.pieces:
                data = self.snapshot.take(piece)
                try:
                    pieces.append(files.PieceSum(piece.offset, len(data), checksum(data)))
                    if file is not None:
                        file.write(data, piece.offset)
                finally:
                    self.snapshot.change(piece, snapshot.Stage.WRITTEN, None)
        return pieces

    def _write_documents(self, partial: Path) -> dict[str, manifest.FileRecord]:
        """Write all files except tiles and manifest; return their records by name."""
        contents = self._contents
        contents.documents(partial)
        if contents.attach is not None:
            contents.attach(partial / manifest.MODEL)
        write_file(partial / manifest.EXTRA, contents.extra)
        records = {}
        for path in partial.rglob("*"):
            name = path.relative_to(partial).as_posix()
            is_tile = name.startswith(f"{manifest.TILES}/")
            if not is_tile and (path.is_symlink() or not path.is_dir()):
                files.regular_size(partial, name)  # raises if it is a link, which no load reads
                if not manifest.lies_inside(name):
                    raise RunFailed(f"{name!r} is no name that every system takes")
                records[name] = manifest.FileRecord(*files.settle(path))
        if contents.keep:
            manifest.mark(partial)
        return records


class Saver:
    """Saves an engine's checkpoints; owns the memory that saves need; `last`: the newest save."""

    def __init__(
        self,
        device: Device,
        tiles: Sequence[Tile],
        spare_bytes: int | None,
        host_limit: int | None,
        *,
        reverse: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        self.device, self._tiles, self.ranks = device, tiles, ranks
        self._reverse = reverse  # True if the last tile is updated first
        self.staging = snapshot.StagingBlocks(device, spare_bytes, host_limit)
        self.last: Saving | None = None

    def begin(self, folder: Path, contents: Contents, *, background: bool) -> Saving:
        """Wait for an earlier save; then start to save the state after all started updates.

        Args: `background`: True if updates may start before everything is written.
        """
        self.close()
        jobs = self._jobs(trained=contents.settings.left_out is not None)
        pieces = [piece.num_bytes for job in jobs for piece in job.pieces]
        some_leave = any(job.leaving for job in jobs)

        def prepare() -> str:
            self.staging.prepare(pieces, leaving=some_leave, background=background)
            return str(folder)

        require_same([{"folder to save to": path} for path in self.ranks.agree(prepare)])
        self.last = Saving(self, folder, contents, jobs)
        try:
            self.last.snapshot.start(self.device, jobs)
        except BaseException:
            self.last.abandon()
            with suppress(RunFailed):  # all of the save is removed before the caller sees the error
                self.last.wait()
            raise
        return self.last

    def close(self) -> None:
        """Wait for a running save."""
        if self.last is not None:
            self.last.join()

    def _jobs(self, *, trained: bool) -> list[snapshot.TileFile]:
        """The files of all or of `trained` tiles; those that leave a device or disk come first."""
        jobs = []
        for tile in sorted(self._tiles, key=lambda tile: tile.index, reverse=self._reverse):
            if tile.layout.trainable_numel or not trained:
                tile_name = f"{tile.index:04d}-{tile.name.replace(' ', '-')}"
                file_name = f"{manifest.TILES}/{tile_name}.safetensors"
                jobs.append(snapshot.tile_file(tile, file_name, trained=trained))
        return sorted(jobs, key=lambda job: not job.leaving)
